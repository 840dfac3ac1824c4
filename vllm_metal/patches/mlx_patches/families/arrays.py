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
    """Returns a patch that passes arrays through `convert` before the model's `sanitize`."""

    def converting(before: Callable[..., Arrays]) -> Callable[..., Arrays]:
        return lambda self, weights: before(self, convert(self, weights))

    return lambda module: wrap(module.Model, "sanitize", converting)


def renamed(rename: Callable[[str], str]) -> Callable[[ModuleType], None]:
    """Returns a patch that maps array names in files to the module's names by `rename`."""
    return converted(lambda model, weights: {rename(name): a for name, a in weights.items()})


def without_transformer(name: str) -> str:
    """Drops the prefix `transformer.`, which transformers 5 writes, from GPT-2's names."""
    return name.removeprefix("transformer.")


def dense_of_kimi(name: str) -> str:
    """Renames the MLPs of Kimi's dense layers, which transformers names like those of experts."""
    return _DENSE.sub(r".mlp.\1.", name)


def norms_of_olmo(name: str) -> str:
    """Renames OLMo hybrid's norms, as transformers' conversion_mapping.py does."""
    return ".".join(_NORMS.get(part, part) for part in name.split("."))
