# SPDX-License-Identifier: Apache-2.0
"""Checks an engine in one process: it generates the right tokens, and shuts down."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from vllm_metal.cli.doctor.model import Model
from vllm_metal.cli.doctor.report import REPORT_BUG, REPORT_IT, Finding
from vllm_metal.device.child import LIMITS, ChildResult, Progress, python, run

NUM_TOKENS = 10
#: Any model can continue it, and the tiny model's vocabulary contains its words.
PROMPT = "1 2 3 4 5 6 7 8"
#: Size of the KV pool in checks that do not concern memory: 500 tokens for the largest models we
#: know (512 KiB per token), thousands for most.
KV_CACHE_BYTES = 2**28
#: How far a chosen token's logit may be below mlx-lm's largest, as a share of the distance from the
#: largest logit to the mean. One rounding to bfloat16 is 0.4 %, and a few dozen layers add up to
#: some 2 %; attention over wrong K/V gives tokens that are a quarter or more below.
ALLOWED_BEHIND = 0.05
_ADVICE = {
    "starting": "vLLM itself does not start. Make a new environment and install as "
    "docs/install.md says; if that does not help, attach the report to a bug report.",
    "loading the model": "The error says what is wrong with the model or a setting. If you gave "
    "--model, try without it; if that fails too, attach the report to a bug report.",
}
#: Parts that can be turned off, to find the cause of wrong tokens: our kernels, MLX's compiled
#: graphs, and its limit on the memory that a command buffer binds.
VARIANTS = (
    ("VLLM_METAL_KERNELS", "mlx"),
    ("MLX_DISABLE_COMPILE", "1"),
    ("MLX_MAX_MB_PER_BUFFER", str(2**20)),
)


def environment(model: Model) -> dict[str, str | None]:
    """Returns environment variables for processes that run the engine."""
    return {"HF_HUB_OFFLINE": "1"} if model.local else {}


def run_child(
    model: Model,
    progress: Progress,
    child: str,
    *arguments: str,
    command: Sequence[str] | None = None,
    limits: Mapping[str, float] = LIMITS,
    variables: Mapping[str, str] | None = None,
) -> ChildResult:
    """Runs a child process that loads a model.

    Args:
        child: module of `children`.
        arguments: arguments after the model's.
        command: another process that sends the same messages; None for that module.
        limits: seconds by stage.
        variables: added to the environment.
    """
    module = f"vllm_metal.cli.doctor.children.{child}"
    command = command or python(module, model.argument, *arguments)
    return run(command, progress, environment(model) | dict(variables or {}), limits)


def check_in_process(tried: ChildResult) -> Finding:
    """Checks that the engine generated all tokens and ended without an error."""
    name = "engine, in one process"
    if not tried.ok:
        advice = _ADVICE.get(tried.reported.get("stage", "starting"), REPORT_BUG)
        return Finding(name, "failed", tried.exit_reason, advice, tried.lines)
    tokens = tried.reported.get("tokens", [])
    if len(tokens) != NUM_TOKENS:
        seen = f"gave {len(tokens)} tokens, not {NUM_TOKENS}"
        return Finding(name, "failed", seen, REPORT_BUG, tried.lines)
    seen = (
        f"{NUM_TOKENS} tokens in {tried.reported['answer_seconds']:.1f} s; started and shut down "
        f"without an error, {tried.seconds:.0f} s in all"
    )
    return Finding(name, "ok", seen, log=tried.lines)


def compare(model: Model, tried: ChildResult, progress: Progress) -> Finding:
    """Runs mlx-lm alone, and checks that it would choose the same tokens, up to rounding."""
    name = "engine's tokens"
    prompt, tokens = (json.dumps(tried.reported[key]) for key in ("prompt", "tokens"))
    judged = run_child(model, progress, "mlx_lm_alone", "judge", prompt, tokens)
    if not judged.ok:
        seen = f"not compared: the process that runs mlx-lm alone {judged.exit_reason}"
        return Finding(name, "warning", seen, REPORT_IT, judged.lines)
    return judge(tried, judged)


def judge(tried: ChildResult, judged: ChildResult) -> Finding:
    """Compares the chosen tokens with mlx-lm's logits; see children.mlx_lm_alone."""
    name, result = "engine's tokens", judged.reported
    shares = [
        behind / max(spread, 1e-6)  # avoids division by zero if all logits are equal
        for behind, spread in zip(result["behind"], result["spread"], strict=True)
    ]
    text = f"{tried.reported['text']!r} after {PROMPT!r}"
    if max(shares) <= ALLOWED_BEHIND:
        same = sum(share == 0 for share in shares)
        seen = f"{text}: {same} of {len(shares)} are mlx-lm's own choice"
        near = "" if same == len(shares) else ", the others as likely up to rounding"
        return Finding(name, "ok", seen + near)
    first = next(index for index, share in enumerate(shares) if share > ALLOWED_BEHIND)
    seen = (
        f"{text}: token {first + 1} is {tried.reported['tokens'][first]} where mlx-lm chooses "
        f"{result['choices'][first]}, likelier by {result['behind'][first]:.1f} in log-probability"
    )
    advice = "If VLLM_METAL_KERNELS=mlx makes it pass, serve with that. " + REPORT_BUG
    return Finding(name, "failed", seen, advice)


def try_variants(
    model: Model, progress: Progress, command: Sequence[str] | None = None
) -> dict[str, ChildResult]:
    """Runs an engine with each of VARIANTS, settings such as ``VLLM_METAL_KERNELS=mlx``."""
    return {
        f"{name}={value}": run_child(
            model, progress, "engine", command=command, variables={name: value}
        )
        for name, value in VARIANTS
    }


def check_variants(usual: ChildResult, tried: Mapping[str, ChildResult]) -> Finding:
    """Compares the variants' texts with the usual engine's, and reports their times."""
    name = "engine, with parts turned off"
    parts, log, differ = [_answer("as usual", usual)], [], False
    for setting, ended in tried.items():
        if not ended.ok:
            parts.append(f"{setting}: {ended.exit_reason}")
            log += [f"{setting}: {line}" for line in ended.lines]
            differ = True
            continue
        same = ended.reported["tokens"] == usual.reported["tokens"]
        differ |= not same
        parts.append(
            _answer(setting, ended) + ("" if same else f", other text: {ended.reported['text']!r}")
        )
    seen = "; ".join(parts)
    if differ:
        advice = (
            "Serve with a setting that helps, exported. A text may differ by rounding alone; if "
            "one is nonsense, attach the report to a bug report."
        )
        return Finding(name, "warning", seen, advice, tuple(log))
    return Finding(name, "ok", f"{seen}; the same text each time")


def _answer(setting: str, ended: ChildResult) -> str:
    return f"{setting}: {ended.reported['answer_seconds']:.2f} s"
