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
        return PLATFORM
    if device is None:
        if serves:
            _tell_who_serves()
        return None
    if device == "metal":
        command_buffers.raise_limit()  # before anything of this process makes an array
        from vllm_metal.device import tuned

        tuned.apply()
    # vLLM asks amid its imports, with torch's half a million objects made. Without them the
    # collector takes a tenth less of a start's time; they stay for as long as the process anyway.
    gc.freeze()
    return PLATFORM


def _tell_who_serves() -> None:
    """Says that this plugin does not serve, where nobody has decided that."""
    import os
    import sys

    from vllm_metal.settings.envs import is_left_to_cpus

    if "VLLM_METAL_DEVICE" not in os.environ and is_left_to_cpus():
        print(
            "vllm-metal: this is no Mac, so vLLM's own CPU platform serves: set "
            "VLLM_METAL_DEVICE=cpu to serve with MLX",
            file=sys.stderr,
        )


def change_vllm() -> None:
    """Entry point of the group ``vllm.general_plugins``: what the platform is too late for.

    vLLM calls it within `EngineArgs()`, before it looks a model up in the hub's cache, where GGUF
    files have other names; and where an engine begins. An engine in a process of its own checks its
    configuration after it has made its executor and its scheduler, which must be changed before.
    """
    import sys

    from vllm_metal.settings.envs import requested_device

    try:
        if requested_device() is None:
            return
    except ValueError:  # the platform says so
        return
    if "vllm.v1.engine.core" in sys.modules:
        from vllm_metal.patches.vllm_patches import processes

        if processes.is_engine_process():
            from vllm_metal.patches.vllm_patches import model_info, shutdown
            from vllm_metal.platform.metal_platform import MetalPlatform

            shutdown.end_with_sigterm()
            MetalPlatform.change_schedulers()
            model_info.answer_for_models()  # which that check asks about
    if "vllm.engine.arg_utils" in sys.modules:  # else a process that takes no names
        from vllm_metal.identity import gguf_names
        from vllm_metal.patches.vllm_patches import engine_args, start_failures
        from vllm_metal.platform import start_checks

        engine_args.keep_names_of_files(gguf_names.file_of)
        engine_args.check_first(start_checks.check_engine)
        start_failures.name_causes()
