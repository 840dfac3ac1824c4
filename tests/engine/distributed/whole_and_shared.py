# SPDX-License-Identifier: Apache-2.0
"""A rank of a ring that compares small models computed whole and sharded."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
import numpy as np
import pytest
from cpu import use_cpu
from engine.models import doubles, matrix, plain
from engine.models.recurrent import config_of
from mlx.utils import tree_flatten, tree_unflatten

from vllm_metal.engine.distributed import sharding, tokens
from vllm_metal.engine.distributed.sharding import ShardingError
from vllm_metal.engine.models.loader import weight_bytes
from vllm_metal.engine.sample import SamplerOutput

TOKENS = [[1, 5, 9, 2, 7, 3, 3, 8]]
QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "vocab_size": 64,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
QUANTIZED = {"qwen3, 4 bits": 128, "qwen3, 4 bits, a group in two": 96}  # its intermediate_size


def shardable() -> list[str]:
    """Returns mlx-lm's modules that support sharding."""
    folder = Path(mlx_lm.models.__path__[0])
    return [
        module
        for module in matrix.modules()
        if "def shard(" in (folder / f"{module}.py").read_text()
    ]


def models() -> Iterator[tuple[str, Any]]:
    """Yields small models by name."""
    for module in shardable():
        yield module, matrix.small_model(module)
    family = plain.with_those_of_states()["step3p5"]
    heads = {"attention_other_setting": {"num_attention_heads": 4, "num_attention_groups": 2}}
    code = import_module("mlx_lm.models.step3p5")
    config = config_of(replace(family, config=family.config | heads))
    yield "step3p5, 2 groups", code.Model(code.ModelArgs.from_dict(config))
    code = import_module("mlx_lm.models.qwen3")
    for name, width in QUANTIZED.items():
        config = QWEN3 | {"intermediate_size": width}
        yield name, code.Model(code.ModelArgs.from_dict(config))


def draw(model: nn.Module) -> None:
    """Gives all parameters the same random values on every rank; norms about 1."""
    rng = np.random.default_rng(1)
    drawn = []
    for name, array in tree_flatten(model.parameters()):
        if mx.issubdtype(array.dtype, mx.floating):
            values = rng.standard_normal(array.shape).astype(np.float32)
            values = values * 0.1 if array.ndim > 1 else 1 + values * 0.3
            array = mx.array(values).astype(array.dtype)
        drawn.append((name, array))
    model.update(tree_unflatten(drawn))


def compare(name: str, model: Any, group: mx.distributed.Group) -> dict[str, Any]:
    """Returns the logit difference, and the share of the weights on this rank."""
    model.eval()
    draw(model)
    if name in QUANTIZED:
        nn.quantize(model, group_size=32, bits=4)
    text = mx.array(TOKENS)
    whole = model(text)
    mx.eval(whole)
    before = weight_bytes(model)
    try:
        sharding.shard(model, group, name)
    except ShardingError as error:
        return {"refused": str(error)}
    shared = model(text)
    return {
        "apart": float(mx.abs(whole - shared).max()),
        "largest": float(mx.abs(whole).max()),
        "share": weight_bytes(model) / before,
    }


def told_tokens(group: mx.distributed.Group) -> list[list[int]]:
    """Returns the tokens that ranks agree on after sampling different ones."""
    sums = mx.distributed.all_sum(mx.arange(8), group=group)
    drawn = mx.argmax(sums).astype(mx.int32) + 10 * group.rank() + mx.arange(3)
    accepted = mx.array([group.rank()])
    sampled = SamplerOutput(drawn, drawn == 9 + 10 * group.rank(), None, drawn[-1:], accepted)
    told = tokens.of_first_rank(sampled, group)
    assert told.num_accepted is not None
    found = (told.token_ids, told.broken, told.last_token_ids, told.num_accepted)
    return [array.tolist() for array in found]


def main() -> None:
    use_cpu()
    group = mx.distributed.init(strict=True, backend="ring")
    with pytest.MonkeyPatch.context() as patched:
        doubles.install(patched)
        found = {name: compare(name, model, group) for name, model in models()}
    json.dump({"models": found, "tokens": told_tokens(group)}, sys.stdout)


if __name__ == "__main__":
    main()
