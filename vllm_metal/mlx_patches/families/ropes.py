# SPDX-License-Identifier: Apache-2.0
"""YaRN and LongRoPE as transformers computes them, of files that say more than mlx-lm reads.

mlx-lm rounds YaRN's range of rotated pairs outwards, always; gpt-oss was trained without
(`truncate`). It drops `attention_factor` (transformers' `_compute_yarn_parameters`). Of LongRoPE it
reads the factors of long contexts alone.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.rope_utils import DynamicNTKScalingRoPE, SuScaledRoPE

from vllm_metal.mlx_patches.patch import replace_method
from vllm_metal.models.weight_files import ModelLoadError

_NAME = "initialize_rope"
_YARN = ("yarn", "deepseek_yarn")
_LONG = ("longrope", "su")


def rope_utils(module: ModuleType) -> None:
    """Patches the function in the module, which `spread` puts where it was imported, the class of
    LongRoPE, which keeps what `fit_context` needs, and that of dynamic ropes."""
    replace_method(module.SuScaledRoPE, "__init__", _keeping_short_factors)
    replace_method(module.DynamicNTKScalingRoPE, "__call__", _of_rows)
    before = getattr(module, _NAME)

    @functools.wraps(before)
    def initialize_rope(
        dims: int,
        base: float,
        traditional: bool,
        scaling_config: Mapping[str, Any] | None = None,
        max_position_embeddings: int | None = None,
    ) -> Any:
        scaling = scaling_config or {}
        rope_type = scaling.get("type") or scaling.get("rope_type")
        if traditional and rope_type in _LONG:
            raise ValueError(
                f"a rope of type {rope_type!r} of neighbouring pairs, which mlx-lm does not compute"
            )
        rope = before(dims, base, traditional, scaling_config, max_position_embeddings)
        if rope_type in _YARN:
            if scaling.get("truncate") is False:
                rope._freqs = _frequencies(dims, base, scaling)
            if scaling.get("attention_factor") is not None:
                rope.mscale = scaling["attention_factor"]
        return rope

    initialize_rope._vllm_metal_original = before  # type: ignore[attr-defined]
    setattr(module, _NAME, initialize_rope)


def _keeping_short_factors(before: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(before)

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        before(self, *args, **kwargs)
        given = signature.bind(None, *args, **kwargs)
        given.apply_defaults()
        # In no container: the module would take it for modules of its own.
        self._given = SimpleNamespace(**given.arguments)

    return init


def _of_rows(before: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Rotates rows of many texts, each by its position, none behind the trained context."""

    def call(self: Any, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        if not isinstance(offset, mx.array):
            return before(self, x, offset)
        return mx.fast.rope(
            x,
            self.dims,
            traditional=self.traditional,
            base=self.base,
            scale=1.0,
            offset=offset,
        )

    return call


def fit_context(model: nn.Module, max_model_len: int) -> None:
    """Has LongRoPE rotate by its factors for short contexts, where none longer will come.

    transformers chooses by each text's length; K in a cache cannot change, so vLLM chooses by the
    longest that is allowed, as this does (Ding et al. 2024, arXiv:2402.13753).

    A rope of type "dynamic" has a base for each text's length behind the trained one, of the keys
    that were computed before as well: those in a cache cannot change.

    Args:
        model: as mlx-lm makes it, with factors for long contexts.
        max_model_len: tokens of the longest text.

    Raises:
        ModelLoadError: a dynamic rope would meet texts longer than the trained ones.
    """
    for _, rope in model.named_modules():
        if isinstance(rope, DynamicNTKScalingRoPE):
            trained = rope.max_position_embeddings
            if max_model_len > trained:
                raise ModelLoadError(
                    f"a rope of type 'dynamic' turns the keys of a text by its length behind "
                    f"{trained} tokens (max_position_embeddings): set --max-model-len to "
                    f"{trained} or less"
                )
        if not isinstance(rope, SuScaledRoPE):
            continue
        given: Any = rope._given
        if max_model_len <= given.original_max_position_embeddings:
            exponents = mx.arange(0, given.dims, 2, dtype=mx.float32) / given.dims
            short = mx.array(given.short_factor, dtype=mx.float32)
            rope._freqs = short * given.base**exponents
            rope._scale = given.short_mscale or rope._scale


def spread(module: ModuleType) -> None:
    """Puts the patched function under the name that modules imported; idempotent.

    Args:
        module: `rope_utils`, patched.
    """
    patched = getattr(module, _NAME)
    original = patched._vllm_metal_original
    for name, other in list(sys.modules.items()):
        if name.startswith("mlx_lm.models.") and getattr(other, _NAME, None) is original:
            setattr(other, _NAME, patched)


def _frequencies(dims: int, base: float, scaling: Mapping[str, Any]) -> mx.array:
    """[dims / 2] wavelengths / 2 pi, between those of the trained context and those of the longer.

    Peng et al. 2023, arXiv:2309.00071, section 3.2, with an unrounded range.
    """
    trained = scaling.get("original_max_position_embeddings", 4096)

    def pair(rotations: float) -> float:
        return dims * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = max(pair(scaling.get("beta_fast") or 32), 0)
    high = min(pair(scaling.get("beta_slow") or 1), dims - 1)
    ramp = (mx.arange(dims // 2, dtype=mx.float32) - low) / ((high - low) or 0.001)
    longer = mx.clip(ramp, 0, 1)
    freqs = base ** (mx.arange(0, dims, 2, dtype=mx.float32) / dims)
    return freqs / (longer / scaling["factor"] + 1 - longer)
