# SPDX-License-Identifier: Apache-2.0
"""Reports whether MLX still sees its device in a process with all the imports of an engine's."""

import importlib

from vllm_metal.device.child import say
from vllm_metal.settings import envs


def main() -> None:
    say(stage="importing what an engine imports")
    import transformers
    import vllm.entrypoints.llm
    import vllm.v1.engine.core  # noqa: F401
    from vllm.platforms import current_platform

    import vllm_metal.worker.worker  # noqa: F401
    from vllm_metal.device import mlx_device

    mx = importlib.import_module("mlx.core")  # last, as in an engine

    chosen = type(current_platform)
    say(
        metal_inside=mx.metal.is_available(),
        platform=f"{chosen.__module__}.{chosen.__qualname__}",
        transformers=transformers.__version__,
    )
    say(stage="computing")
    mlx_device.select(envs.requested_device() or "metal")
    ones = mx.ones((64, 64))
    say(product=float((ones @ ones).sum().item()))


if __name__ == "__main__":
    main()
