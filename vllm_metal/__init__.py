# SPDX-License-Identifier: Apache-2.0
"""vLLM platform plugin that serves mlx-lm models on Apple-silicon Macs."""

PLATFORM = "vllm_metal.platform.metal_platform.MetalPlatform"


def register() -> str | None:
    """Entry point of the group ``vllm.platform_plugins``.

    Returns the platform's qualified name where it applies: on Apple silicon, or on any machine
    where ``VLLM_METAL_DEVICE=cpu`` asks for MLX's CPU backend. None leaves vLLM to its own
    platforms. vLLM swallows what is raised here, so a bad setting or an untested vLLM is left to
    the platform's own module, whose errors reach the user.
    """
    import gc

    from metal_kernels import command_buffers
    from vllm_metal.settings.envs import requested_device

    try:
        device = requested_device()
    except ValueError:
        return PLATFORM
    if device is None:
        return None
    if device == "metal":
        command_buffers.raise_limit()  # before anything of this process makes an array
        from vllm_metal.device import tuned

        tuned.apply()
    # vLLM asks amid its imports, with torch's half a million objects made. Without them the
    # collector takes a tenth less of a start's time; they stay for as long as the process anyway.
    gc.freeze()
    return PLATFORM
