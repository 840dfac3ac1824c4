# SPDX-License-Identifier: Apache-2.0
"""Reports the device or platform that a process sees after certain imports.

python -m vllm_metal.cli.doctor.children.facts device|platform|engine
"""

import dataclasses
import importlib
import platform as machine
import sys
from importlib.metadata import entry_points

from vllm_metal.device.child import send_message
from vllm_metal.settings import envs


def device() -> None:
    """Reports MLX's device, in a process that imports only MLX."""
    send_message(stage="importing MLX")
    import mlx.core as mx

    from vllm_metal.device import mlx_device

    send_message(stage="asking for the device")
    metal = mx.metal.is_available()
    try:
        requested = envs.requested_device()
    except ValueError:
        requested = None  # the check of the settings reports it
    kind: envs.Device = "metal" if metal and requested != "cpu" else "cpu"
    mlx_device.select(kind)
    mx.eval(mx.ones(8) + 1)  # the first use of a GPU loads its library
    info = mx.device_info()
    send_message(
        metal=metal,
        device=kind,
        chip=str(info.get("device_name", machine.machine())),
        architecture=str(info.get("architecture", machine.machine())),
        ram_bytes=mlx_device.total_memory("cpu"),
        memory_bytes=dataclasses.asdict(mlx_device.memory(kind)),
    )


def platform() -> None:
    """Reports the platform that vLLM chooses."""
    send_message(stage="importing vLLM")
    send_message(
        plugins=[f"{p.name} ({p.value})" for p in entry_points(group="vllm.platform_plugins")]
    )
    send_message(platform=_chosen())


def engine() -> None:
    """Reports whether MLX still sees its device after an engine's imports."""
    send_message(stage="importing what an engine imports")
    import transformers
    import vllm.entrypoints.llm
    import vllm.v1.engine.core  # noqa: F401

    chosen = _chosen()
    import vllm_metal.engine.worker.worker  # noqa: F401
    from vllm_metal.device import mlx_device

    mx = importlib.import_module("mlx.core")  # last, as in an engine
    send_message(
        metal_inside=mx.metal.is_available(),
        platform=chosen,
        transformers=transformers.__version__,
    )
    send_message(stage="computing")
    mlx_device.select(envs.requested_device() or "metal")
    ones = mx.ones((64, 64))
    send_message(product=float((ones @ ones).sum().item()))


def _chosen() -> str:
    from vllm.platforms import current_platform

    chosen = type(current_platform)
    return f"{chosen.__module__}.{chosen.__qualname__}"


def main() -> None:
    {"device": device, "platform": platform, "engine": engine}[sys.argv[1]]()


if __name__ == "__main__":
    main()
