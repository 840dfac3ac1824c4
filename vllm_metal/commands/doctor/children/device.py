# SPDX-License-Identifier: Apache-2.0
"""Reports what MLX says about this machine."""

import dataclasses
import platform

from vllm_metal.device.child import say
from vllm_metal.settings import envs


def main() -> None:
    say(stage="importing MLX")
    import mlx.core as mx

    from vllm_metal.device import mlx_device

    say(stage="asking for the device")
    metal = mx.metal.is_available()
    try:
        requested = envs.requested_device()
    except ValueError:
        requested = None  # the check of the settings reports it
    kind: envs.Device = "metal" if metal and requested != "cpu" else "cpu"
    mlx_device.select(kind)
    mx.eval(mx.ones(8) + 1)  # the first use of a GPU is where its library is loaded
    info = mx.device_info()
    say(
        metal=metal,
        device=kind,
        chip=str(info.get("device_name", platform.machine())),
        architecture=str(info.get("architecture", platform.machine())),
        ram_bytes=mlx_device.total_memory("cpu"),
        memory_bytes=dataclasses.asdict(mlx_device.memory(kind)),
    )


if __name__ == "__main__":
    main()
