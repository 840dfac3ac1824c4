# SPDX-License-Identifier: Apache-2.0
"""Counts a decode step's GPU dispatches, and writes the table of benchmarks/README.md.

    PYTHONPATH=$PWD:$PWD/tests .venv/bin/python -m tests.dispatches

Nothing runs: the step's graph is recorded. Each of our kernels is one operation, and so is each
function that MLX has compiled or provides in mlx.core.fast. Counting rules:

- views count as none: reshapes, transpositions, slices, broadcasts;
- a concatenation counts as one per part;
- a rotation of a part of each head counts as two: MLX copies, then rotates in the copy;
- adjacent elementwise operations count as one, as MLX's compiler joins them;
- an input of one of our kernels that is a slice of longer rows adds one: MLX copies it first;
- any other operation counts as one.

The models have small shapes, which do not affect the count.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from metal_kernels.command_buffers import MOST_DISPATCHES
from vllm_metal.cli.fit.graph import Graph, Operation, record, recordable
from vllm_metal.engine.attention.layers import attention_layers
from vllm_metal.engine.batch.requests import BlockTables
from vllm_metal.engine.batch.rows import Rows
from vllm_metal.engine.kv_cache.kernels import KERNELS, KernelBackend
from vllm_metal.engine.models.paged_layers import PagedLayers
from vllm_metal.patches.mlx_patches import registry, seam
from vllm_metal.patches.mlx_patches.replacing import replaced

PAGE = Path(__file__).parents[1] / "benchmarks" / "README.md"
HEAD = "| model | rotation | a layer | a step | command buffers |"
_ALIGNED = "| --- | --- | ---: | ---: | ---: |"
_LAYERS, _REQUESTS, _BLOCK = 32, 16, 16
_CONTEXT = 1000
_VIEWS = {
    *("AsStrided", "Broadcast", "BroadcastAxes", "Copy", "ExpandDims", "Flatten", "Full"),
    *("Reshape", "Slice", "Split", "Squeeze", "StopGradient", "Transpose", "Unflatten", "View"),
}
_SLICES = ("Slice", "Split")
_ELEMENTWISE = {
    *("Abs", "Add", "AsType", "Divide", "Equal", "Exp", "Greater", "GreaterEqual", "Less"),
    *("LessEqual", "Log", "Log1p", "LogAddExp", "Maximum", "Minimum", "Multiply", "Negative"),
    *("Power", "Rsqrt", "Select", "Sigmoid", "Sqrt", "Square", "Subtract", "Tanh"),
}

_BASE = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "vocab_size": 64,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
_MLA = {
    "num_key_value_heads": 8,
    "head_dim": None,
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 0,
    "n_group": 1,
    "topk_group": 1,
}
_STATES = {
    "head_dim": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "full_attention_interval": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}
_YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
#: Layer-relevant settings of each family.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3_5": _STATES,
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_scaling": _YARN,
    },
    "deepseek_v3": _MLA,
}


@dataclass(frozen=True)
class Count:
    """Dispatches of a step."""

    step: int
    layer: float  # mean per layer; without what surrounds the layers

    @property
    def buffers(self) -> int:
        """Command buffers of MLX's default size, in a step without pacing."""
        return math.ceil(self.step / MOST_DISPATCHES)


@functools.cache
def count(family: str, rotates: bool = True) -> Count:
    """Counts a decode step of 32 layers.

    Args:
        family: a key of FAMILIES.
        rotates: whether writes rotate; otherwise MLX does, as in earlier versions.
    """
    few, many = (dispatches(graph_of(family, layers, rotates)) for layers in (4, 8))
    layer = (many - few) / 4
    return Count(round(few + (_LAYERS - 4) * layer), layer)


def dispatches(graph: Graph) -> int:
    """Counts the dispatches of a recorded graph, see above."""
    made_by = {name: operation for operation in graph.operations for name in operation.outputs}
    total, chains = 0, _Chains()
    for operation in graph.operations:
        chains.passes(operation)
        if operation.kind == "Concatenate":
            total += len(operation.inputs)
        elif operation.kind not in _VIEWS | _ELEMENTWISE:
            total += 1 + sum(_is_copied(name, made_by, graph) for name in _rows_of(operation))
    return total + chains.count


class _Chains:
    """Groups elementwise operations that read each other, directly, into one dispatch.

    An operation's stage is the length of the longest chain of non-elementwise operations before it.
    """

    def __init__(self) -> None:
        self._stage_of: dict[str, int] = {}  # by array
        self._chain_of: dict[str, list[int]] = {}  # by output: the number of its chain, in a cell
        self._joined: set[int] = set()
        self._begun = 0

    def passes(self, operation: Operation) -> None:
        """Adds an operation; operations come after those that they read."""
        stage = max((self._stage_of.get(name, 0) for name in operation.inputs), default=0)
        if operation.kind in _ELEMENTWISE:
            self._add(operation, stage)
        elif operation.kind not in _VIEWS:
            stage += 1
        self._stage_of.update(dict.fromkeys(operation.outputs, stage))

    def _add(self, operation: Operation, stage: int) -> None:
        read = [name for name in operation.inputs if self._stage_of.get(name) == stage]
        known = [self._chain_of[name] for name in read if name in self._chain_of]
        chain = known[0] if known else [self._begun]
        self._begun += not known
        for other in known[1:]:
            if other[0] != chain[0]:
                self._joined.add(other[0])
                other[0] = chain[0]
        self._chain_of.update(dict.fromkeys(operation.outputs, chain))

    @property
    def count(self) -> int:
        return self._begun - len(self._joined)


def _rows_of(operation: Operation) -> Iterable[str]:
    """Returns the inputs of one of our kernels, each twice, see `record`."""
    half = len(operation.inputs) // 2
    is_kernel = operation.opaque and operation.inputs[:half] == operation.inputs[half:]
    return dict.fromkeys(operation.inputs) if is_kernel else ()


def _is_copied(name: str, made_by: dict[str, Operation], graph: Graph) -> bool:
    """Returns whether an array is a view of some elements of longer rows."""
    while (operation := made_by.get(name)) is not None and operation.kind in _VIEWS:
        if not operation.inputs:
            return False
        (source, *_) = operation.inputs
        whole, part = graph.arrays[source][0], graph.arrays[name][0]
        if operation.kind in _SLICES and part[-1] != whole[-1]:
            return True
        name = source
    return False


def make_model(family: str, num_layers: int) -> Any:
    """Makes a small mlx-lm model."""
    seam.install()
    module = importlib.import_module(f"mlx_lm.models.{family}")
    registry.install()
    config = _BASE | FAMILIES[family] | {"model_type": family, "num_hidden_layers": num_layers}
    if family == "qwen3_5":
        config = {"model_type": family, "text_config": config}
    return module.Model(module.ModelArgs.from_dict(config))


def graph_of(family: str, num_layers: int, rotates: bool = True) -> Graph:
    """Records the graph of a decode step."""
    model = make_model(family, num_layers)
    model.set_dtype(mx.float16)
    layers = attention_layers(model, family)
    backend = KERNELS if rotates else KernelBackend(rotates=False)
    rows, tables = _decodes()
    num_blocks = tables.tables_np[0].max() + 1
    size = 512 if family == "qwen3_5" else _BLOCK  # a block has room for a state
    states = {
        layer.name: layer.allocate(int(num_blocks), size, mx.float16, backend) for layer in layers
    }
    paged = PagedLayers(layers, states, dict.fromkeys(states, 0), size, paced=False)
    names, parameters = zip(*tree_flatten(model.parameters()), strict=True)

    def build(*given: mx.array) -> list[mx.array]:
        inputs = iter(given)
        model.update(tree_unflatten([(name, next(inputs)) for name in names]))
        for storage in paged.storages:
            storage.arrays = [next(inputs) for _ in storage.arrays]
        with paged.step(rows, tables) as caches:
            return [model(rows.input_ids[:, None], cache=caches)]

    with recordable(metal=True), replaced(mx.fast, "rope", _in_parts(mx.fast.rope)):
        return record(build, [*parameters, *paged.pool_arrays()])


def _in_parts(rope: Any) -> Any:
    """Emulates MLX's rotation, which copies partially rotated heads first."""

    def rotate(x: mx.array, dims: int, **options: Any) -> mx.array:
        copied = rope(x, dims, **options) if dims < x.shape[-1] else x
        return rope(copied, dims, **options)

    return rotate


def _decodes() -> tuple[Rows, BlockTables]:
    """Returns one row for each of several requests."""
    rows = np.arange(_REQUESTS, dtype=np.int32)
    positions = np.full(_REQUESTS, _CONTEXT, np.int32)
    width = _CONTEXT // _BLOCK + 1
    tables = BlockTables(1, _REQUESTS, width)
    for row in rows:
        tables.replace(int(row), [range(1 + row * width, 1 + (row + 1) * width)])
    found = Rows(
        req_indices_np=rows,
        query_start_loc_np=np.arange(_REQUESTS + 1, dtype=np.int32),
        seq_lens_np=positions + 1,
        positions_np=positions,
        positions=mx.array(positions),
        input_ids=mx.zeros(_REQUESTS, mx.int32),
        logits_indices=None,
    )
    return found, tables


def table() -> str:
    """Formats the counts of all families."""
    lines = [HEAD, _ALIGNED]
    for family in FAMILIES:
        for rotates, how in ((False, "by MLX"), (True, "by `kv_write`")):
            found = count(family, rotates)
            figures = f"{found.layer:g} | {found.step} | {found.buffers}"
            lines.append(f"| {family} | {how} | {figures} |")
    return "\n".join(lines)


def written(page: str) -> str:
    """Returns the page with an updated table."""
    start = page.index(HEAD)
    end = page.index("\n\n", start)
    return page[:start] + table() + page[end:]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
