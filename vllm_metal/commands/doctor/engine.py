# SPDX-License-Identifier: Apache-2.0
"""Checks of an engine in one process: it answers, rightly, and ends."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from vllm_metal.commands.doctor.child import LIMITS, Ended, Progress, python, run
from vllm_metal.commands.doctor.finding import Finding
from vllm_metal.commands.doctor.model import Model

NUM_TOKENS = 10
#: Any model goes on with it, and a vocabulary of letters and numbers has it.
PROMPT = "1 2 3 4 5 6 7 8"
#: Of the pool where the check is not of memory: 500 tokens of the largest models known here
#: (512 KiB a token), thousands of most.
KV_CACHE_BYTES = 2**28
#: How far a chosen token may be behind mlx-lm's, as a share of what the likeliest is above the
#: mean. A rounding to bfloat16 is 0.4 %, and a few dozen layers add up to some 2 %; attention over
#: wrong K/V gives tokens that are behind by a quarter and more.
ALLOWED_BEHIND = 0.05
_ADVICE = {
    "starting": "vLLM itself does not start. Install anew as the README says, into a new "
    "environment; if that does not help, attach the report to a bug report.",
    "loading the model": "The error says what the model or a setting lacks. With a model of your "
    "own, try without --model; if that fails too, attach the report to a bug report.",
}
_REPORT_IT = "This is a bug: attach the report to a bug report."


def environment(model: Model) -> dict[str, str | None]:
    """For processes that run the engine."""
    return {"HF_HUB_OFFLINE": "1"} if model.local else {}


def try_in_process(
    model: Model,
    progress: Progress,
    command: Sequence[str] | None = None,
    limits: Mapping[str, float] = LIMITS,
) -> Ended:
    """Ten tokens of `LLM()` in a process of its own, shutdown included.

    Args:
        model: to load.
        progress: told of each stage.
        command: of the process; it says what children.ten_tokens says.
        limits: seconds by stage.
    """
    command = command or python("vllm_metal.commands.doctor.children.ten_tokens", model.argument)
    return run(command, progress, environment(model), limits)


def check_in_process(tried: Ended) -> Finding:
    """It gave ten tokens, and its process ended well."""
    name = "engine, in one process"
    if not tried.ok:
        advice = _ADVICE.get(tried.told.get("stage", "starting"), _REPORT_IT)
        return Finding(name, "failed", tried.how, advice, tried.lines)
    tokens = tried.told.get("tokens", [])
    if len(tokens) != NUM_TOKENS:
        seen = f"gave {len(tokens)} tokens, not {NUM_TOKENS}"
        return Finding(name, "failed", seen, _REPORT_IT, tried.lines)
    seen = (
        f"{NUM_TOKENS} tokens in {tried.told['answer_seconds']:.1f} s; started, shut down and left "
        f"without an error, {tried.seconds:.0f} s in all"
    )
    return Finding(name, "ok", seen, log=tried.lines)


def compare(model: Model, tried: Ended, progress: Progress) -> Finding:
    """The tokens are those that mlx-lm by itself would choose, up to rounding."""
    name = "engine's tokens"
    prompt, tokens = (json.dumps(tried.told[key]) for key in ("prompt", "tokens"))
    command = python(
        "vllm_metal.commands.doctor.children.reference", model.argument, prompt, tokens
    )
    judged = run(command, progress, environment(model))
    if not judged.ok:
        seen = f"not compared: mlx-lm's own forward {judged.how}"
        return Finding(name, "warning", seen, "Attach the report to a bug report.", judged.lines)
    return judge(tried, judged)


def judge(tried: Ended, judged: Ended) -> Finding:
    """Compares what was chosen with what mlx-lm says of it; see children.reference."""
    name, told = "engine's tokens", judged.told
    shares = [
        behind / max(spread, 1e-6)
        for behind, spread in zip(told["behind"], told["spread"], strict=True)
    ]
    text = f"{tried.told['text']!r} after {PROMPT!r}"
    if max(shares) <= ALLOWED_BEHIND:
        same = sum(share == 0 for share in shares)
        seen = f"{text}: {same} of {len(shares)} are mlx-lm's own choice"
        return Finding(name, "ok", seen + ("" if same == len(shares) else ", the others nearly"))
    first = next(index for index, share in enumerate(shares) if share > ALLOWED_BEHIND)
    seen = (
        f"{text}: token {first + 1} is {tried.told['tokens'][first]} where mlx-lm chooses "
        f"{told['choices'][first]}, likelier by {told['behind'][first]:.1f} in log-probability"
    )
    advice = "If it passes with VLLM_METAL_KERNELS=mlx, serve with that. " + _REPORT_IT
    return Finding(name, "failed", seen, advice)
