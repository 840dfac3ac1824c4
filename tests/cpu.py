# SPDX-License-Identifier: Apache-2.0
"""Sets MLX to the CPU at full precision in a test process."""

import os


def use_cpu() -> None:
    """Selects MLX's CPU device with a fast BLAS, on a Mac too; call it before MLX is imported.

    Child processes inherit it. With VLLM_METAL_DEVICE=metal the device stays
    MLX's choice.
    """
    os.environ.setdefault("VLLM_METAL_DEVICE", "cpu")
    # Otherwise GPUs of M5 and later multiply float32 as TF32, with ten bits instead of 23. MLX
    # reads the variable once (ml-explore/mlx#3860).
    os.environ["MLX_ENABLE_TF32"] = "0"
    if os.environ["VLLM_METAL_DEVICE"] == "cpu":
        from vllm_metal.device import blas

        blas.load()
        import mlx.core as mx

        mx.set_default_device(mx.cpu)  # the default on a Mac is the GPU
