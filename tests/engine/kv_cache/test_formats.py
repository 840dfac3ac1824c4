# SPDX-License-Identifier: Apache-2.0
"""Names of --kv-cache-dtype, for models of each dtype."""

import mlx.core as mx
import pytest
import torch

from vllm_metal.engine.kv_cache import formats
from vllm_metal.settings import cache_dtypes

CODES = {
    "fp8": mx.uint8,
    "fp8_e4m3": mx.uint8,
    "fp8_per_token_head": mx.uint8,
    "int8": mx.int8,
    "int8_per_token_head": mx.int8,
}
FLOATS = {
    "float16": (torch.float16, mx.float16),
    "bfloat16": (torch.bfloat16, mx.bfloat16),
    "float32": (torch.float32, mx.float32),
}


@pytest.mark.parametrize("model", FLOATS)
def test_codes_and_the_models_own_dtype_are_offered(model):
    in_torch, in_mlx = FLOATS[model]
    for name, dtype in (CODES | {"auto": in_mlx, model: in_mlx}).items():
        assert formats.offered(name, in_torch)
        assert formats.pool_dtype(name, in_mlx) == dtype
        assert formats.pool_dtype(cache_dtypes.canonical(name), in_mlx) == dtype
    for name in FLOATS.keys() - {model}:
        assert not formats.offered(name, in_torch)


@pytest.mark.parametrize("name", ["fp8_e5m2", "fp8_inc", "nvfp4", "int4_per_token_head", "int4"])
def test_other_formats_are_not(name):
    assert not formats.offered(name, torch.float32)
    assert cache_dtypes.canonical(name) == name
