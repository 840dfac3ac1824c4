# SPDX-License-Identifier: Apache-2.0
"""What --kv-cache-dtype may say, and the elements of a pool that each name stands for."""

from __future__ import annotations

import mlx.core as mx
import torch

#: For messages: what serves every model. A model's own dtype may also be given by its name.
OFFERED = ("auto", "fp8", "int8")
#: vLLM's names of our two formats of codes: one scale for each head of each token.
_CODES = {"fp8_per_token_head": mx.uint8, "int8_per_token_head": mx.int8}
_ALIASES = {
    "fp8": "fp8_per_token_head",
    "fp8_e4m3": "fp8_per_token_head",
    "int8": "int8_per_token_head",
}


def canonical(cache_dtype: str) -> str:
    """vLLM's name of what we make of `cache_dtype`; unknown ones pass."""
    return _ALIASES.get(cache_dtype, cache_dtype)


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
