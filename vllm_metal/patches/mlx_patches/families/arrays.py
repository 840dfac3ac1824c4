# SPDX-License-Identifier: Apache-2.0
"""Renames or converts arrays whose published form differs from mlx-lm's."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import mlx.core as mx

from vllm_metal.patches.mlx_patches.replacing import wrap

Arrays = dict[str, mx.array]
_NORMS = {
    "attention_layer_norm": "input_layernorm",
    "feedforward_layer_norm": "post_attention_layernorm",
}
_DENSE = re.compile(r"\.block_sparse_moe\.((?:gate|up|down)_proj)\.")


def converted(convert: Callable[[Any, Arrays], Arrays]) -> Callable[[ModuleType], None]:
    """Patches a module so that its model's `sanitize` gets `convert(model, arrays)`."""

    def converting(before: Callable[..., Arrays]) -> Callable[..., Arrays]:
        return lambda self, weights: before(self, convert(self, weights))

    return lambda module: wrap(module.Model, "sanitize", converting)


def renamed(rename: Callable[[str], str]) -> Callable[[ModuleType], None]:
    """Patches a module so that `rename` maps names in files to the module's names."""
    return converted(lambda model, weights: {rename(name): a for name, a in weights.items()})


def without_transformer(name: str) -> str:
    """Maps GPT-2's names, which transformers 5 writes as parts of a `transformer`."""
    return name.removeprefix("transformer.")


def dense_of_kimi(name: str) -> str:
    """Maps Kimi's layers without experts, which transformers names like those with experts."""
    return _DENSE.sub(r".mlp.\1.", name)


def norms_of_olmo(name: str) -> str:
    """Maps OLMo hybrid's names of norms; transformers' conversion_mapping.py has the same two."""
    return ".".join(_NORMS.get(part, part) for part in name.split("."))
