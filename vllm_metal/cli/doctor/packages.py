# SPDX-License-Identifier: Apache-2.0
"""Checks the installed packages, vLLM's choice of platform, and MLX after vLLM's imports."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

import vllm_metal
from vllm_metal.cli.doctor.report import Finding
from vllm_metal.device.child import ChildResult, Progress, python, run
from vllm_metal.patches.vllm_patches import releases

_PACKAGES = ("vllm-metal", "mlx", "mlx-metal", "mlx-lm", "transformers", "torch", "numpy")
_PRODUCT = 64.0**3  # sum of the product of two matrices of 64 by 64 ones


def versions() -> dict[str, str]:
    """Returns the versions of the installed packages and of Python."""
    found = {}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    if vllm := releases.installed_vllm():
        found["vllm"] = vllm
    return found | {"python": platform.python_version()}


def check_versions() -> Finding:
    """Checks that the installed vLLM is the tested one."""
    seen = ", ".join(f"{name} {number}" for name, number in versions().items())
    try:
        releases.require_tested_vllm()
    except releases.UntestedVersionError as error:
        advice = f"Install vLLM {releases.TESTED_VLLM} as docs/install.md says."
        return Finding("versions", "failed", str(error), advice)
    except ValueError as error:
        return Finding("versions", "failed", str(error), "Correct the variable, or unset it.")
    if not releases.is_tested(releases.installed_vllm()):
        advice = (
            f"The plugin is tested with vLLM {releases.TESTED_VLLM}: if something below fails, "
            "install that one."
        )
        return Finding("versions", "warning", seen, advice)
    return Finding("versions", "ok", seen)


def probe_vllm(progress: Progress) -> ChildResult:
    """Asks vLLM for its platform in a child process, because the import may fail."""
    return run(python("vllm_metal.cli.doctor.children.facts", "platform"), progress)


def check_platform(asked: ChildResult) -> Finding:
    """Checks that vLLM chooses this plugin."""
    chosen = asked.reported.get("platform")
    if chosen is None:
        advice = (
            "The last lines say why. If several platform plugins are installed, choose this one: "
            "VLLM_PLUGINS=metal."
        )
        return Finding(
            "platform",
            "failed",
            f"the process that asks vLLM {asked.exit_reason}",
            advice,
            asked.lines,
        )
    if chosen == vllm_metal.PLATFORM:
        return Finding("platform", "ok", f"vLLM chooses {chosen}")
    found = ", ".join(asked.reported["plugins"]) or "none"
    seen = f"vLLM chooses {chosen}, not this plugin; platform plugins found: {found}"
    return Finding(
        "platform", "failed", seen, _advice_on_choice(asked.reported["plugins"]), asked.lines
    )


def _advice_on_choice(plugins: list[str]) -> str:
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "metal" not in allowed.split(","):
        return f"VLLM_PLUGINS={allowed} leaves this plugin out: unset it, or add metal."
    if target := os.environ.get("VLLM_TARGET_DEVICE"):
        return f"VLLM_TARGET_DEVICE={target} makes vLLM ignore plugins: unset it."
    if not any(plugin.endswith("(vllm_metal:register)") for plugin in plugins):
        return "Install vllm-metal into this environment (`pip install .` in a clone)."
    return "Set VLLM_PLUGINS=metal."


def advice_to_try() -> str:
    """Returns advice if vLLM does not choose the plugin."""
    if os.environ.get("VLLM_METAL_DEVICE", "").lower() == "off":
        return "VLLM_METAL_DEVICE=off turns the plugin off: unset it to use the plugin."
    return (
        "The plugin is for Apple silicon, and this machine has none. To try it on MLX's CPU "
        "backend: VLLM_METAL_DEVICE=cpu vllm-metal doctor"
    )


def try_in_vllm(progress: Progress, command: Sequence[str] | None = None) -> ChildResult:
    """Uses MLX in a child process that imports what an engine imports."""
    return run(command or python("vllm_metal.cli.doctor.children.facts", "engine"), progress)


def check_in_vllm(tried: ChildResult, metal: bool) -> Finding:
    """Checks that MLX sees its device in a process with all of vLLM's imports.

    `metal`: whether a process that imports only MLX sees a Metal device.
    """
    # mlx-lm 0.31.3 cannot be imported with transformers 5.13, and vLLM continues without a plugin
    # whose import fails. MLX then found no Metal device in a vLLM process, although it did after a
    # bare `import mlx.core` (https://github.com/vllm-project/vllm-metal/pull/471).
    name = "MLX within vLLM"
    reported, version = tried.reported, tried.reported.get("transformers", "of unknown version")
    advice = (
        "Install the transformers of the lock file: pip install --requirement "
        "requirements/macos.txt in the clone. If that does not help, attach the report to a bug "
        "report."
    )
    if metal and reported.get("metal_inside") is False:
        seen = f"MLX alone finds Metal, but not beside vLLM's imports (transformers {version})"
        return Finding(name, "failed", seen, advice, tried.lines)
    if not tried.ok:
        return Finding(name, "failed", f"the process {tried.exit_reason}", advice, tried.lines)
    if reported["platform"] != vllm_metal.PLATFORM:
        seen = f"vLLM takes {reported['platform']} once all is imported (transformers {version})"
        return Finding(name, "failed", seen, advice, tried.lines)
    if reported["product"] != _PRODUCT:
        seen = f"a product of matrices sums to {reported['product']:g}, not {_PRODUCT:g}"
        return Finding(name, "failed", seen, advice, tried.lines)
    where = "finds Metal and computes" if reported["metal_inside"] else "computes on the CPU"
    return Finding(name, "ok", f"{where} beside vLLM's imports (transformers {version})")
