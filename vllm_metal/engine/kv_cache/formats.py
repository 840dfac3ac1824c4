# SPDX-License-Identifier: Apache-2.0
"""The supported values of --kv-cache-dtype, and the pool's dtype for each."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import torch

from vllm_metal.settings.cache_dtypes import canonical

#: For messages: the values that every model supports. The model's own dtype is accepted, too.
OFFERED = ("auto", "fp8", "int8")


@dataclass(frozen=True)
class PoolFormat:
    """Dtype of a pool's elements, for MLX and for vLLM."""

    elements: mx.Dtype
    torch_dtype: torch.dtype  # of vLLM's specs
    cache_dtype: str | None = None  # vLLM's name if quantized per token and head; None: floats

    @property
    def quant_mode(self) -> str:
        """Member name in vLLM's KVQuantMode."""
        return "NONE" if self.cache_dtype is None else self.cache_dtype.upper()


#: Dtypes of models, then of quantized values.
_FORMATS = (
    PoolFormat(mx.float32, torch.float32),
    PoolFormat(mx.float16, torch.float16),
    PoolFormat(mx.bfloat16, torch.bfloat16),
    PoolFormat(mx.uint8, torch.float8_e4m3fn, "fp8_per_token_head"),
    PoolFormat(mx.int8, torch.int8, "int8_per_token_head"),
)
#: Maps torch's dtypes of models to MLX's.
MLX_DTYPES = {each.torch_dtype: each.elements for each in _FORMATS if each.cache_dtype is None}
_QUANTIZED = {each.cache_dtype: each.elements for each in _FORMATS if each.cache_dtype is not None}
_BY_ELEMENTS = {each.elements: each for each in _FORMATS}


def offered(cache_dtype: str, model_dtype: torch.dtype) -> bool:
    """Whether `cache_dtype` is supported for a model of `model_dtype`.

    A pool that is not quantized must have the queries' dtype: the kernels load both the same way.
    """
    # The platform imports this module, and importing vLLM's module resolves the platform (0.33).
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE

    return (
        cache_dtype == "auto"
        or canonical(cache_dtype) in _QUANTIZED
        or STR_DTYPE_TO_TORCH_DTYPE.get(cache_dtype) == model_dtype
    )


def pool_dtype(cache_dtype: str, model_dtype: mx.Dtype) -> mx.Dtype:
    """Returns the dtype of the pool's elements: the model's, uint8 (fp8 e4m3) or int8.

    `cache_dtype` must be `offered`.
    """
    return _QUANTIZED.get(canonical(cache_dtype), model_dtype)


def pool_format(elements: mx.Dtype) -> PoolFormat:
    """Returns the format of a pool whose elements have a dtype from `pool_dtype`."""
    return _BY_ELEMENTS[elements]
