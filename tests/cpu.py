# SPDX-License-Identifier: Apache-2.0
"""What comes first in a process that tests: MLX on the CPU, at full precision."""

import os


def use_cpu() -> None:
    """MLX's CPU device with a fast BLAS, on a Mac too; call it before anything imports MLX.

    The processes that this one starts inherit it. With VLLM_METAL_DEVICE=metal the device stays as
    MLX chose it.
    """
    os.environ.setdefault("VLLM_METAL_DEVICE", "cpu")
    # The GPUs of M5 and later multiply float32 as TF32 otherwise, ten bits instead of 23, and MLX
    # reads the variable once (ml-explore/mlx#3860).
    os.environ["MLX_ENABLE_TF32"] = "0"
    if os.environ["VLLM_METAL_DEVICE"] == "cpu":
        from vllm_metal.device import blas

        blas.load()
        import mlx.core as mx

        mx.set_default_device(mx.cpu)  # on a Mac it is the GPU
