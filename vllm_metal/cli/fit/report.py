# SPDX-License-Identifier: Apache-2.0
"""Formats what `vllm-metal fit` found, as text and as JSON."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm_metal.cli.fit.estimate import Estimate
from vllm_metal.cli.fit.layout import Layout
from vllm_metal.cli.fit.machine import Machine
from vllm_metal.engine.models.stage import Stage

_GIB, _MIB, _KIB = 2**30, 2**20, 2**10
_NAMES = {"fp8": "fp8 or int8"}  # the two take the same bytes
#: Placeholder in commands for the address of the first machine.
ADDRESS = "ADDRESS"


@dataclass(frozen=True)
class Part:
    """The estimates for the ranks of one pipeline stage."""

    ranks: range
    stage: Stage | None  # None: it has all layers
    estimates: Mapping[str, Estimate]  # by --kv-cache-dtype

    def of_length(self, tokens: int) -> Part:
        """Returns the estimates for requests of `tokens` tokens."""
        found = {name: estimate.of_length(tokens) for name, estimate in self.estimates.items()}
        return replace(self, estimates=found)

    @property
    def name(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        return f"rank {ranks}" if len(self.ranks) == 1 else f"ranks {ranks}"


def narrowest(parts: Sequence[Part], cache_dtype: str) -> Part:
    """Returns the part with the least room for tokens, with this --kv-cache-dtype."""

    def room(part: Part) -> tuple[int, int]:
        found = part.estimates[cache_dtype]
        return found.tokens, found.pool

    return min(parts, key=room)


@dataclass(frozen=True)
class FitResult:
    """The estimates for a model, and whether the requests fit."""

    model: str
    model_type: str
    dtype: str
    machine: Machine  # or a rank's share of one
    layout: Layout
    parts: Sequence[Part]  # one per stage of layers
    cache_dtype: str  # the requested --kv-cache-dtype
    num_requests: int  # requests at once
    fits: bool  # with the requested settings
    changes: tuple[str, ...]  # changes that would make it fit on the rank with the least room
    commands: tuple[str, ...]  # commands to serve the model, if it fits

    @property
    def estimates(self) -> Mapping[str, Estimate]:
        """Estimates of the rank with the least room, which limits all ranks, by cache dtype."""
        return {name: self.narrowest(name).estimates[name] for name in self.parts[0].estimates}

    def narrowest(self, cache_dtype: str) -> Part:
        """Returns the part with the least room for tokens, with this --kv-cache-dtype."""
        return narrowest(self.parts, cache_dtype)


def serve_command(model: str, options: Mapping[str, object], switches: Sequence[str] = ()) -> str:
    """Returns the command that serves a model.

    `options`: values by name without dashes; None and empty values are left out. `switches`:
    options without a value.
    """
    flags = [part for name, value in options.items() if value for part in (f"--{name}", str(value))]
    return shlex.join(["vllm", "serve", model, *switches, *flags])


def as_text(answer: FitResult) -> str:
    """Formats the answer as short tables and a verdict, for people."""
    asked = answer.estimates[answer.cache_dtype]
    length = asked.settings.max_model_len
    lines = [
        f"{answer.model} ({answer.model_type}, {answer.dtype}) on {answer.machine.name}"
        f"{answer.layout.description}",
        "",
        *_part_rows(answer),
        f"  {'weights':<40}{asked.measured.weights / _GIB:>12.2f} GiB",
        *_tables(asked),
        *_draft_weights(asked),
        "",
        _row("KV cache (--kv-cache-dtype)", answer, lambda name, _: _NAMES.get(name, name)),
        _row("K and V of a token", answer, lambda _, e: f"{e.token_bytes / _KIB:,.1f} KiB"),
        *_draft_rows(answer),
        *_state_rows(answer),
        _row("pool", answer, lambda _, e: f"{max(e.pool, 0) / _GIB:.2f} GiB"),
        _row("tokens in it", answer, lambda _, e: f"{e.tokens:,}"),
        _row(f"requests of {length:,} tokens", answer, lambda _, e: f"{e.requests:,}"),
        "",
        f"Memory with --kv-cache-dtype {answer.cache_dtype}; the peak of a step is an estimate:",
        asked.budget.table(),
        "",
        *_verdict(answer, asked),
    ]
    return "\n".join(lines)


def _part_rows(answer: FitResult) -> list[str]:
    if len(answer.parts) == 1:
        return []
    cells = ("layers", "weights", "K/V of a token", "step", "pool", "tokens in it")
    rows = [f"  {'rank':<10}" + "".join(f"{cell:>15}" for cell in cells)]
    for part in answer.parts:
        found, stage = part.estimates[answer.cache_dtype], part.stage
        assert stage is not None
        cells = (
            f"{stage.start} to {stage.end - 1}",
            f"{found.measured.weights / _GIB:.2f} GiB",
            f"{found.token_bytes / _KIB:,.1f} KiB",
            f"{found.measured.forward / _GIB:.2f} GiB",
            f"{max(found.pool, 0) / _GIB:.2f} GiB",
            f"{found.tokens:,}",
        )
        ranks = part.name.partition(" ")[2]
        rows.append(f"  {ranks:<10}" + "".join(f"{cell:>15}" for cell in cells))
    least = answer.narrowest(answer.cache_dtype).name
    return [
        *rows,
        "",
        f"{least} has room for the fewest tokens; the rest of the output is about it:",
        "",
    ]


def _tables(asked: Estimate) -> list[str]:
    if not asked.tables:
        return []
    return [f"  {'embedding tables that stay on disk':<40}{asked.tables / _GIB:>12.2f} GiB"]


def _draft_weights(asked: Estimate) -> list[str]:
    weights = asked.measured.draft_weights
    return [f"  {'weights of the drafter':<40}{weights / _GIB:>12.2f} GiB"] if weights else []


def _draft_rows(answer: FitResult) -> list[str]:
    if not any(estimate.draft_token_bytes for estimate in answer.estimates.values()):
        return []
    cell = "  of the drafter"
    return [_row(cell, answer, lambda _, e: f"{e.draft_token_bytes / _KIB:,.1f} KiB")]


def _state_rows(answer: FitResult) -> list[str]:
    if not any(estimate.state_bytes for estimate in answer.estimates.values()):
        return []
    return [
        _row("states of a request", answer, lambda _, e: f"{e.state_bytes / _MIB:,.1f} MiB"),
        _row("tokens of a block", answer, lambda _, e: f"{e.block_size:,}"),
    ]


def _row(label: str, answer: FitResult, cell: Callable[[str, Estimate], str]) -> str:
    cells = (cell(name, estimate) for name, estimate in answer.estimates.items())
    return f"  {label:<40}" + "".join(f"{text:>16}" for text in cells)


def _verdict(answer: FitResult, asked: Estimate) -> list[str]:
    requests = (
        "1 request" if answer.num_requests == 1 else f"{answer.num_requests} requests at once"
    )
    length = asked.settings.max_model_len
    needed = asked.request(answer.num_requests).needed(length)
    need = f"{requests} of {length:,} tokens: {needed / _GIB:.2f} GiB of KV cache"
    lines = [f"Fits: {need}."]
    of_ranks = len(answer.parts) > 1
    where = f"it fit on {answer.narrowest(answer.cache_dtype).name}" if of_ranks else "it fit"
    if not answer.fits:
        there = f"{asked.pool / _GIB:.2f} GiB are left" if asked.pool > 0 else "no memory is left"
        lines = [f"Does not fit: {need}, and {there}."]
        lines += [f"Any one of these makes {where}:"] if answer.changes else []
        lines += [f"  * {change}" for change in answer.changes]
        if not answer.changes:
            lines += ["No single setting makes it fit: use a smaller model, or more memory."]
    if answer.commands:
        lines += ["", "To serve it with these settings:"]
        if (machines := answer.layout.machines) > 1:
            others = "1" if machines == 2 else f"1 to {machines - 1}"
            lines[-1] = (
                f"To serve it with these settings, on the first machine, whose address is {ADDRESS}"
                f"; on the others with --node-rank {others}, and --headless:"
            )
    return [*lines, *(f"  {command}" for command in answer.commands)]


def as_json(answer: FitResult) -> dict[str, Any]:
    """Returns the answer as JSON values; sizes in bytes."""
    asked = answer.estimates[answer.cache_dtype]
    return {
        "model": answer.model,
        "model_type": answer.model_type,
        "dtype": answer.dtype,
        "machine": answer.machine.name,
        "weights": asked.measured.weights,
        "tables_on_disk": asked.tables,
        "draft_weights": asked.measured.draft_weights,
        "context": asked.settings.max_model_len,
        "requests": answer.num_requests,
        "fits": answer.fits,
        "kv_cache": _by_dtype(answer.estimates),
        "ranks": [rank for part in answer.parts for rank in _ranks_of(part, answer.cache_dtype)],
        "changes": list(answer.changes),
        "commands": list(answer.commands),
    }


def _ranks_of(part: Part, asked: str) -> list[dict[str, Any]]:
    layers = None if part.stage is None else [part.stage.start, part.stage.end]
    weights = part.estimates[asked].measured.weights
    found = {"layers": layers, "weights": weights, "kv_cache": _by_dtype(part.estimates)}
    return [{"rank": rank} | found for rank in part.ranks]


def _by_dtype(estimates: Mapping[str, Estimate]) -> dict[str, dict[str, Any]]:
    return {name: _as_json(estimate) for name, estimate in estimates.items()}


def _as_json(estimate: Estimate) -> dict[str, Any]:
    return {
        "token_bytes": estimate.token_bytes,
        "draft_token_bytes": estimate.draft_token_bytes,
        "state_bytes": estimate.state_bytes,
        "block_size": estimate.block_size,
        "block_bytes": estimate.needs.block_bytes,
        "pool": estimate.pool,
        "tokens": estimate.tokens,
        "requests": estimate.requests,
        "step_peak": estimate.measured.forward,
        "memory": estimate.budget.as_json(),
    }
