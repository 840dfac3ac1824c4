# SPDX-License-Identifier: Apache-2.0
"""vLLM platform plugin that serves mlx-lm models on Apple-silicon Macs."""

PLATFORM = "vllm_metal.platform.metal_platform.MetalPlatform"


def register() -> str | None:
    """Entry point of the group ``vllm.platform_plugins``: the platform's qualified name.

    Returns None, which leaves the choice to vLLM, unless this is Apple silicon or
    ``VLLM_METAL_DEVICE=cpu`` requests MLX's CPU backend.
    """
    import gc
    import multiprocessing
    import sys

    from metal_kernels import command_buffers
    from vllm_metal.settings.envs import requested_device

    serves = sys.argv[1:2] == ["serve"] and multiprocessing.parent_process() is None
    if serves:
        from vllm_metal.patches.vllm_patches import start_failures

        start_failures.print_causes()
    try:
        device = requested_device()
    except ValueError:
        return PLATFORM  # vLLM swallows errors raised here; importing the platform raises it again
    if device is None:
        if serves:
            _report_unused_plugin()
        return None
    if device == "metal":
        command_buffers.raise_limit()  # before this process creates its first array
        from vllm_metal.device import tuned

        tuned.apply()
    # vLLM calls this in the middle of its imports, when torch has created half a million objects
    # that live as long as the process. Excluding them from garbage collection cuts a tenth of the
    # start-up time.
    gc.freeze()
    return PLATFORM


def _report_unused_plugin() -> None:
    import os
    import sys

    from vllm_metal.settings.envs import is_cpu_only_linux

    # Only if the user has not chosen a device and vLLM finds no accelerator of its own.
    if "VLLM_METAL_DEVICE" not in os.environ and is_cpu_only_linux():
        print(
            "vllm-metal: this machine is not a Mac, so vLLM uses its own CPU platform: set "
            "VLLM_METAL_DEVICE=cpu to use MLX",
            file=sys.stderr,
        )


def change_vllm() -> None:
    """Entry point of the group ``vllm.general_plugins``: changes vLLM before its platform loads."""
    import sys

    from vllm_metal.settings.envs import requested_device

    try:
        if requested_device() is None:
            return
    except ValueError:  # the platform reports it
        return
    # vLLM calls this where an engine starts. An engine in its own process checks its configuration
    # after it has created its executor and scheduler, which must be changed before.
    if "vllm.v1.engine.core" in sys.modules:
        from vllm_metal.patches.vllm_patches import processes

        if processes.is_engine_process():
            from vllm_metal.patches.vllm_patches import model_info, shutdown
            from vllm_metal.platform.metal_platform import MetalPlatform

            shutdown.end_with_sigterm()
            MetalPlatform.change_schedulers()
            model_info.register_models()  # the check inspects them
    # vLLM also calls this within `EngineArgs()`, before it looks a model up in the Hugging Face
    # cache, where GGUF files have other names. Other processes take no model names.
    if "vllm.engine.arg_utils" in sys.modules:
        from vllm_metal.identity import gguf_names
        from vllm_metal.patches.vllm_patches import engine_args, start_failures
        from vllm_metal.platform import start_checks

        engine_args.keep_names_of_files(gguf_names.file_of)
        engine_args.check_first(start_checks.check_engine)
        start_failures.name_causes()
