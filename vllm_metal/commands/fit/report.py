# SPDX-License-Identifier: Apache-2.0
"""What `vllm-metal fit` found, as text and as JSON."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_metal.commands.fit.estimate import Estimate
from vllm_metal.commands.fit.machine import Machine

_GIB, _MIB, _KIB = 2**30, 2**20, 2**10
_NAMES = {"fp8": "fp8 or int8"}  # the two take the same bytes


@dataclass(frozen=True)
class Answer:
    """Whether a model and the wanted requests fit."""

    model: str
    model_type: str
    dtype: str
    machine: Machine
    estimates: Mapping[str, Estimate]  # by --kv-cache-dtype
    asked: str  # which of them was asked for
    wanted: int  # requests at once
    fits: bool  # with what was asked for
    changes: tuple[str, ...]  # that would make it fit
    commands: tuple[str, ...]  # that serve the model where it fits


def serve_command(model: str, options: Mapping[str, object], switches: Sequence[str] = ()) -> str:
    """The command that serves a model.

    Args:
        model: as its user named it.
        options: by name, without dashes; those that are None, or empty, are left out.
        switches: options without a value.
    """
    flags = [part for name, value in options.items() if value for part in (f"--{name}", str(value))]
    return shlex.join(["vllm", "serve", model, *switches, *flags])


def as_text(answer: Answer) -> str:
    """The answer as short tables and a verdict, for people."""
    asked = answer.estimates[answer.asked]
    length = asked.settings.max_model_len
    lines = [
        f"{answer.model} ({answer.model_type}, {answer.dtype}) on {answer.machine.name}",
        "",
        f"  {'weights':<40}{asked.measured.weights / _GIB:>12.2f} GiB",
        "",
        _row("KV cache (--kv-cache-dtype)", answer, lambda name, _: _NAMES.get(name, name)),
        _row("K and V of a token", answer, lambda _, e: f"{e.token_bytes / _KIB:,.1f} KiB"),
        *_of_states(answer),
        _row("pool", answer, lambda _, e: f"{max(e.pool, 0) / _GIB:.2f} GiB"),
        _row("tokens in it", answer, lambda _, e: f"{e.tokens:,}"),
        _row(f"requests of {length:,} tokens", answer, lambda _, e: f"{e.requests:,}"),
        "",
        f"Memory with --kv-cache-dtype {answer.asked}; the peak of a step is an estimate:",
        asked.budget.table(),
        "",
        *_verdict(answer, asked),
    ]
    return "\n".join(lines)


def _of_states(answer: Answer) -> list[str]:
    """Rows on states, for a model whose layers keep some: what they take, and a block's tokens."""
    if not any(estimate.state_bytes for estimate in answer.estimates.values()):
        return []
    return [
        _row("states of a request", answer, lambda _, e: f"{e.state_bytes / _MIB:,.1f} MiB"),
        _row("tokens of a block", answer, lambda _, e: f"{e.block_size:,}"),
    ]


def _row(label: str, answer: Answer, cell: Callable[[str, Estimate], str]) -> str:
    cells = (cell(name, estimate) for name, estimate in answer.estimates.items())
    return f"  {label:<40}" + "".join(f"{text:>16}" for text in cells)


def _verdict(answer: Answer, asked: Estimate) -> list[str]:
    requests = "1 request" if answer.wanted == 1 else f"{answer.wanted} requests at once"
    length = asked.settings.max_model_len
    needed = asked.request(answer.wanted).needed(length)
    need = f"{requests} of {length:,} tokens: {needed / _GIB:.2f} GiB of KV cache"
    lines = [f"Fits: {need}."]
    if not answer.fits:
        there = f"{asked.pool / _GIB:.2f} GiB are left" if asked.pool > 0 else "no memory is left"
        lines = [f"Does not fit: {need}, and {there}."]
        lines += ["Any one of these makes it fit:"] if answer.changes else []
        lines += [f"  * {change}" for change in answer.changes]
        if not answer.changes:
            lines += ["No one setting makes it fit: take a smaller model, or more memory."]
    if answer.commands:
        lines += ["", "To serve it with these settings:"]
    return [*lines, *(f"  {command}" for command in answer.commands)]


def as_json(answer: Answer) -> dict[str, Any]:
    """The answer as JSON, for programs; sizes in bytes."""
    asked = answer.estimates[answer.asked]
    return {
        "model": answer.model,
        "model_type": answer.model_type,
        "dtype": answer.dtype,
        "machine": answer.machine.name,
        "weights": asked.measured.weights,
        "context": asked.settings.max_model_len,
        "requests": answer.wanted,
        "fits": answer.fits,
        "kv_cache": {name: _as_json(estimate) for name, estimate in answer.estimates.items()},
        "changes": list(answer.changes),
        "commands": list(answer.commands),
    }


def _as_json(estimate: Estimate) -> dict[str, Any]:
    return {
        "token_bytes": estimate.token_bytes,
        "state_bytes": estimate.state_bytes,
        "block_size": estimate.block_size,
        "pool": estimate.pool,
        "tokens": estimate.tokens,
        "requests": estimate.requests,
        "step_peak": estimate.measured.forward,
        "memory": dict(estimate.budget.lines),
    }
