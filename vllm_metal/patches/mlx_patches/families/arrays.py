# SPDX-License-Identifier: Apache-2.0
"""Arrays that a family's files have under other names or in another shape than mlx-lm's module."""

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
    """Patches a module so that its model's `sanitize` gets what `convert` returns.

    Args:
        convert: takes the model and the arrays of its files.
    """

    def converting(before: Callable[..., Arrays]) -> Callable[..., Arrays]:
        return lambda self, weights: before(self, convert(self, weights))

    return lambda module: wrap(module.Model, "sanitize", converting)


def renamed(rename: Callable[[str], str]) -> Callable[[ModuleType], None]:
    """Patches a module whose arrays have other names in files.

    Args:
        rename: gives the name that the module knows, of one in files.
    """
    return converted(lambda model, weights: {rename(name): a for name, a in weights.items()})


def without_transformer(name: str) -> str:
    """GPT-2's name of an array that transformers 5 writes as a part of a `transformer`."""
    return name.removeprefix("transformer.")


def dense_of_kimi(name: str) -> str:
    """Kimi's name for layers without experts, which transformers writes as those with experts."""
    return _DENSE.sub(r".mlp.\1.", name)


def norms_of_olmo(name: str) -> str:
    """OLMo hybrid's names of norms; transformers' conversion_mapping.py has the same two."""
    return ".".join(_NORMS.get(part, part) for part in name.split("."))
