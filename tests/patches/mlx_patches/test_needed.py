# SPDX-License-Identifier: Apache-2.0
"""MLX, mlx-lm and mlx-vlm still need every change this plugin makes to them.

Families' modules have tests of their own: `test_registry.py` and `models/test_plain.py`.
"""

import importlib
import inspect
import re
import sys
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import base, gated_delta, llama, mla, ssm
from mlx_lm.models.cache import KVCache
from mlx_lm.tuner.lora import LoRALinear, LoRASwitchLinear
from patches.mlx_patches.test_seam import Noting
from patches.mlx_patches.test_traced_layers import operations

from vllm_metal.cli.fit.graph import record
from vllm_metal.patches import mlx_patches
from vllm_metal.patches.mlx_patches import library_kernels, mlx_vlm_families, seam
from vllm_metal.patches.mlx_patches.replacing import replaced

#: Modules that change nothing by themselves, and that of families.
APART = {"__init__", "mlx_vlm_families", "replacing", "registry"}
PROBES = {}


def probe(module):
    """Registers a check whether the libraries still lack a change."""

    def noted(function):
        PROBES[module] = function
        return function

    return noted


@probe("seam")
def attention_asks_no_cache():
    """mlx-lm's attention computes over arrays that a cache returns, without calling it."""
    seam.install()
    cache, rows = Noting(), mx.ones((2, 4, 1, 16))
    own = inspect.unwrap(base.scaled_dot_product_attention)
    own(rows, rows, rows, cache=cache, scale=0.5, mask=None)
    return not hasattr(cache, "seen")


@probe("encoder_seam")
def attention_of_encoders_asks_no_mask():
    """mlx-vlm's encoder attention requires texts of one length and a dense mask."""
    module, given = mlx_vlm_families.family("bert", "this test").bert, Noting()
    rows = mx.ones((2, 4, 1, 16))
    own = inspect.unwrap(module.scaled_dot_product_attention)
    with pytest.raises(TypeError):
        own(rows, rows, rows, None, 0.5, given)
    return not hasattr(given, "seen")


@probe("mlx_vlm_text")
def a_rope_depends_on_other_texts():
    """mlx-vlm's LongRoPE chooses a row's factors by the positions of all rows."""
    mlx_vlm_families.family("klear", "this test")
    scaling = {
        "type": "longrope",
        "original_max_position_embeddings": 64,
        "short_factor": [1.0] * 4,
        "long_factor": [9.0] * 4,
    }
    own = inspect.unwrap(sys.modules["mlx_vlm.models.rope_utils"].initialize_rope)
    rope = own(8, 10_000.0, False, scaling, 128)
    rows = mx.ones((2, 1, 1, 8))
    one, other = (rope(rows, offset=mx.array([5, last])) for last in (6, 100))
    return not mx.allclose(one[0], other[0]).item()


@probe("multi_linear")
def rows_are_multiplied_one_by_one():
    """mlx-lm multiplies rows of length 1 with a head's matrix separately."""
    layer = mla.MultiLinear(64, 32, 3)
    for each in (layer, layer.to_quantized(32, 4)):
        own = inspect.unwrap(type(each).__call__)
        graph = record(lambda x, of=each, own=own: [own(of, x)], [mx.ones((5, 3, 1, 64))])
        found = [step for step in graph.operations if step.kind in ("Matmul", "QuantizedMatmul")]
        if [graph.arrays[step.inputs[0]][0][-2] for step in found] != [1]:
            return False
    return True


@probe("adapted_linears")
def a_layer_has_one_adapter():
    """mlx-lm's adapter layers have one adapter for all rows."""
    layers = LoRALinear, LoRASwitchLinear
    names = [list(inspect.signature(layer.__call__).parameters) for layer in layers]
    return names == [["self", "x"], ["self", "x", "indices", "sorted_indices"]]


@probe("module_calls")
def modules_have_no_hooks():
    """MLX modules have no call hooks."""
    return not [name for name in dir(nn.Module) if "_hook" in name]


@probe("recurrences")
def recurrences_are_of_whole_sequences():
    """mlx-lm's functions take whole sequences of one length, and cannot continue others."""
    functions = gated_delta.gated_delta_update, ssm.ssm_update
    names = [set(inspect.signature(function).parameters) for function in functions]
    return not any({"query_start_loc", "cu_seqlens"} & each for each in names)


@probe("rotations")
def rows_are_rotated_before_a_cache_sees_them():
    """mlx-lm's caches get rotated keys, and queries are rotated separately."""
    seen, rotations = [], []

    class Cache(KVCache):
        def update_and_fetch(self, keys, values):
            seen.append(len(rotations))
            return super().update_and_fetch(keys, values)

    args = llama.ModelArgs("llama", 64, 1, 96, 4, 1e-5, 128)
    rope = mx.fast.rope
    with replaced(
        mx.fast, "rope", lambda x, *rest, **of: rotations.append(x) or rope(x, *rest, **of)
    ):
        llama.Model(args)(mx.array([[1]]), cache=[Cache()])
    return seen == [2]


@probe("traced_layers")
def layers_repeat_what_is_the_same():
    """On the CPU, each layer computes its own angles, and each step its views of weights."""
    layers = [(nn.RoPE(8), nn.Linear(8, 8)) for _ in range(2)]

    def forward(x, offset):
        return [linear(rope(x, offset=offset)) for rope, linear in layers]

    found = operations(*mx.compile(forward)(mx.zeros((2, 1, 1, 8)), mx.array([3, 5])))
    return found["Cos"] == 2 and found["Transpose"] == 2


@probe("library_kernels")
def kernels_are_launched():
    """mlx-lm launches its own kernels on a GPU."""
    for entry in library_kernels.ENTRIES:
        module = importlib.import_module(f"mlx_lm.models.{entry.module}")
        calls = re.findall(rf"(?<!def )\b{entry.kernel}\(", inspect.getsource(module))
        if not calls:
            return False
    return True


@pytest.mark.parametrize("module", PROBES)
def test_the_libraries_still_need_the_change(module):
    assert PROBES[module](), (
        f"no longer so: {PROBES[module].__doc__} Delete the module {module} and its "
        "probe, or correct the probe"
    )


def test_every_change_has_a_probe_and_is_for_what_is_installed():
    modules = {path.stem for path in Path(mlx_patches.__file__).parent.glob("*.py")} - APART
    assert modules == PROBES.keys()
    for name in modules | {"registry"}:
        module = importlib.import_module(f"vllm_metal.patches.mlx_patches.{name}")
        package = module.RELEASES[0].partition(" ")[0]
        assert f"{package} {'.'.join(version(package).split('.')[:2])}" in module.RELEASES, name
