# SPDX-License-Identifier: Apache-2.0
"""Decides what --kv-cache-dtype may say, fp8 and int8 among it, and a pool's dtype by it."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import torch

from vllm_metal.settings.cache_dtypes import canonical

#: For messages: what serves every model. A model's own dtype may also be given by its name.
OFFERED = ("auto", "fp8", "int8")


@dataclass(frozen=True)
class PoolFormat:
    """Elements of a pool."""

    elements: mx.Dtype
    torch_dtype: torch.dtype  # of vLLM's specs
    cache_dtype: str | None = None  # vLLM's name of codes with a scale for each head of each token

    @property
    def quant_mode(self) -> str:
        """Name in vLLM's KVQuantMode."""
        return "NONE" if self.cache_dtype is None else self.cache_dtype.upper()


#: The one table of dtypes: those of values, which models come in, and of codes.
_FORMATS = (
    PoolFormat(mx.float32, torch.float32),
    PoolFormat(mx.float16, torch.float16),
    PoolFormat(mx.bfloat16, torch.bfloat16),
    PoolFormat(mx.uint8, torch.float8_e4m3fn, "fp8_per_token_head"),
    PoolFormat(mx.int8, torch.int8, "int8_per_token_head"),
)
#: Dtypes of models, by torch's.
MLX_DTYPES = {each.torch_dtype: each.elements for each in _FORMATS if each.cache_dtype is None}
_CODES = {each.cache_dtype: each.elements for each in _FORMATS if each.cache_dtype is not None}
_BY_ELEMENTS = {each.elements: each for each in _FORMATS}


def offered(cache_dtype: str, model_dtype: torch.dtype) -> bool:
    """Whether pools of that name serve models of that dtype.

    A pool of values has the dtype of the queries, as the kernels load both alike.
    """
    # The platform imports this module; vLLM's asks for the platform as it is imported (0.33).
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE

    return (
        cache_dtype == "auto"
        or canonical(cache_dtype) in _CODES
        or STR_DTYPE_TO_TORCH_DTYPE.get(cache_dtype) == model_dtype
    )


def pool_dtype(cache_dtype: str, model_dtype: mx.Dtype) -> mx.Dtype:
    """Dtype of a pool's elements: the model's, uint8 (fp8 e4m3 codes) or int8.

    Args:
        cache_dtype: a name that is `offered`.
        model_dtype: of the model's queries.
    """
    return _CODES.get(canonical(cache_dtype), model_dtype)


def pool_format(elements: mx.Dtype) -> PoolFormat:
    """Returns the format of a pool with such elements, as `pool_dtype` gives them."""
    return _BY_ELEMENTS[elements]
