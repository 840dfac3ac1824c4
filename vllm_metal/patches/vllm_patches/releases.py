# SPDX-License-Identifier: Apache-2.0
"""Names the tested vLLM release; rejects any other with the reason, unless it is allowed."""

from __future__ import annotations

import functools
from importlib.metadata import PackageNotFoundError, version

from vllm_metal.settings import envs

#: The worker contract changes between minor releases, so the tested minor is the whole range.
TESTED_VLLM = "0.33"


class UntestedVersionError(SystemExit):
    """The installed vLLM is not one this plugin was tested with."""

    # vLLM imports the platform amid its own imports, so any other error would be the last line of
    # a long traceback. For a SystemExit Python prints only the message and exits with status 1, and
    # no `except Exception` in vLLM mistakes it for a missing package.


def installed_vllm() -> str | None:
    """Returns the version of the package ``vllm``, or None if it is not installed."""
    try:
        return version("vllm")
    except PackageNotFoundError:
        return None


def is_tested(found: str | None) -> bool:
    """Returns whether a version is of the tested minor release."""
    return found is not None and f"{found}.".startswith(f"{TESTED_VLLM}.")


def require_tested_vllm() -> None:
    """Raises UntestedVersionError for another vLLM, unless VLLM_METAL_ALLOW_UNTESTED=1."""
    found = installed_vllm()
    if is_tested(found) or (found is not None and envs.allow_untested()):
        return
    raise UntestedVersionError(
        f"vllm-metal is tested with vLLM {TESTED_VLLM}.x, but "
        f"{'no vLLM' if found is None else f'vLLM {found}'} is installed: install vLLM "
        f"{TESTED_VLLM}, or the vllm-metal release made for yours"
        + ("" if found is None else "; or try it with VLLM_METAL_ALLOW_UNTESTED=1")
    )


@functools.cache
def warn_if_untested() -> None:
    """Warns once per process if the installed vLLM is not the tested one."""
    from vllm.logger import init_logger

    found = installed_vllm()
    if not is_tested(found):
        init_logger(__name__).warning(
            "vllm-metal is tested with vLLM %s.x; vLLM %s is used, as "
            "VLLM_METAL_ALLOW_UNTESTED=1 asks",
            TESTED_VLLM,
            found,
        )
