# SPDX-License-Identifier: Apache-2.0
"""The dense check's tolerance."""

import mlx.core as mx
import numpy as np
import pytest

from vllm_metal.engine.models import dense_check
from vllm_metal.engine.models.dense_check import PagedLogits
from vllm_metal.identity.model_files import ModelLoadError


@pytest.mark.parametrize(
    ("device", "tf32", "difference", "refused"),
    [
        (mx.cpu, None, 0.03, True),
        (mx.gpu, "0", 0.03, True),
        (mx.gpu, None, 0.03, False),
        (mx.gpu, "1", 0.03, False),
        (mx.gpu, None, 0.2, True),
    ],
)
def test_float32_may_be_multiplied_as_tf32_on_a_gpu(device, tf32, difference, refused, monkeypatch):
    monkeypatch.setattr(dense_check, "make_prompt_cache", lambda model: None)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(device))
    monkeypatch.delenv("MLX_ENABLE_TF32", raising=False)
    if tf32 is not None:
        monkeypatch.setenv("MLX_ENABLE_TF32", tf32)
    told = PagedLogits([1, 2, 3], [-np.log(8) - difference] * 2)

    def check():
        dense_check.check(lambda ids, cache: mx.zeros((1, 3, 8)), told, mx.float32, "llama")

    if refused:
        with pytest.raises(ModelLoadError, match=r"by 0\.\d+ on average"):
            check()
    else:
        check()
