# SPDX-License-Identifier: Apache-2.0
"""Checks that MLX sees its device inside a process with all of vLLM's imports.

mlx-lm 0.31.3 cannot be imported beside transformers 5.13, and vLLM goes on without a plugin whose
import fails: MLX then found no Metal device in a process of vLLM's, though a bare `import mlx.core`
did (https://github.com/vllm-project/vllm-metal/pull/471).
"""

from __future__ import annotations

from collections.abc import Sequence

import vllm_metal
from vllm_metal.commands.doctor.child import Ended, Progress, python, run
from vllm_metal.commands.doctor.finding import Finding

_NAME = "MLX within vLLM"
_PRODUCT = 64.0**3  # sum of the product of two matrices of 64 by 64 ones


def try_in_vllm(progress: Progress, command: Sequence[str] | None = None) -> Ended:
    """Asks MLX in a child process that imports what an engine imports."""
    return run(command or python("vllm_metal.commands.doctor.children.in_vllm"), progress)


def check(tried: Ended, metal: bool) -> Finding:
    """
    Args:
        tried: the messages of children.in_vllm.
        metal: whether a process that imports MLX alone sees a Metal device.
    """
    told, version = tried.told, tried.told.get("transformers", "of unknown version")
    advice = (
        "Install the transformers of the lock file: pip install --requirement "
        "requirements/macos.txt in the clone. If that does not help, attach the report to a bug "
        "report."
    )
    if metal and told.get("metal_inside") is False:
        seen = f"MLX alone finds Metal, but not beside vLLM's imports (transformers {version})"
        return Finding(_NAME, "failed", seen, advice, tried.lines)
    if not tried.ok:
        return Finding(_NAME, "failed", f"the process {tried.how}", advice, tried.lines)
    if told["platform"] != vllm_metal.PLATFORM:
        seen = f"vLLM takes {told['platform']} once all is imported (transformers {version})"
        return Finding(_NAME, "failed", seen, advice, tried.lines)
    if told["product"] != _PRODUCT:
        seen = f"a product of matrices sums to {told['product']:g}, not {_PRODUCT:g}"
        return Finding(_NAME, "failed", seen, advice, tried.lines)
    where = "finds Metal and computes" if told["metal_inside"] else "computes on the CPU"
    return Finding(_NAME, "ok", f"{where} beside vLLM's imports (transformers {version})")
