# SPDX-License-Identifier: Apache-2.0
"""The same prompt with parts turned off, one at a time: what a difference is due to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vllm_metal.commands.doctor import engine
from vllm_metal.commands.doctor.child import Ended, Progress
from vllm_metal.commands.doctor.finding import Finding
from vllm_metal.commands.doctor.model import Model

#: Our kernels, MLX's compiled graphs, and its limit on what a command buffer binds.
VARIANTS = (
    ("VLLM_METAL_KERNELS", "mlx"),
    ("MLX_DISABLE_COMPILE", "1"),
    ("MLX_MAX_MB_PER_BUFFER", str(2**20)),
)


def try_all(
    model: Model, progress: Progress, command: Sequence[str] | None = None
) -> dict[str, Ended]:
    """Runs an engine for each; by variable and value, such as ``VLLM_METAL_KERNELS=mlx``."""
    return {
        f"{name}={value}": engine.try_in_process(model, progress, command, variables={name: value})
        for name, value in VARIANTS
    }


def check(usual: Ended, tried: Mapping[str, Ended]) -> Finding:
    """Compares their texts with the usual engine's, and says what each took."""
    name = "engine, with parts turned off"
    said, log, differ = [_answer("as usual", usual)], [], False
    for setting, ended in tried.items():
        if not ended.ok:
            said.append(f"{setting}: {ended.how}")
            log += [f"{setting}: {line}" for line in ended.lines]
            differ = True
            continue
        same = ended.told["tokens"] == usual.told["tokens"]
        differ |= not same
        said.append(_answer(setting, ended) + ("" if same else f", other text: {_text(ended)}"))
    seen = "; ".join(said)
    if differ:
        advice = (
            "Serve with a setting that helps, exported. A text may differ by rounding alone; if "
            "one is nonsense, attach the report to a bug report."
        )
        return Finding(name, "warning", seen, advice, tuple(log))
    return Finding(name, "ok", f"{seen}; the same text each time")


def _answer(setting: str, ended: Ended) -> str:
    return f"{setting}: {ended.told['answer_seconds']:.2f} s"


def _text(ended: Ended) -> str:
    return repr(ended.told["text"])
