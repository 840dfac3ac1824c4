# SPDX-License-Identifier: Apache-2.0
"""Computes the KV pool's size from measurements, margins and shares. All sizes are bytes.

Nothing here queries the device; `vllm_metal.engine.memory.planner` measures.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace

from metal_kernels.layout import stable

GIB = 2**30
#: Never used, regardless of --gpu-memory-utilization. Metal's recommended working set is a limit
#: for the GPU, not a share reserved for us: Macs with the whole working set wired have panicked,
#: and the window server and this process's own Python live in the same memory. One sixteenth is
#: less than vLLM's default utilization of 0.92 leaves free, so it costs nothing there; half a GiB
#: is that share on a Mac with 8 GB, whose working set is 5.3 GB.
MARGIN_SHARE = 1 / 16
MARGIN_FLOOR = GIB // 2
#: Smallest acceptable context if --max-model-len is fitted: a share of the model's own length, but
#: no more than this many tokens, enough for a question about a page and its answer.
LEAST_CONTEXT_SHARE = 1 / 8
LEAST_CONTEXT = 1024
#: Share of the memory for the pool and step states that drafts may use, but always enough for one
#: request's. It only matters where a draft has its own state of some 100 MiB: next to 24 GiB, some
#: 30 requests can verify one draft each. With more requests a step has enough tokens to keep the
#: device busy, and drafts gain least. Drafts that leave only inputs fit as a rule.
DRAFTS_SHARE = 1 / 8


@dataclass(frozen=True)
class Measured:
    """Bytes measured on a device with the networks loaded; a step's peaks are 0 until measured."""

    source: str  # describes `total`
    total: int  # bytes that the device may use in total
    in_use: int  # by other engines of this process and by other programs
    weights: int
    cache: int  # buffers that MLX may keep for reuse
    other_engines: int = 0  # the part of `in_use` held by other engines of this process
    draft_weights: int = 0
    adapters: int = 0  # LoRA slots, and other adapters kept in memory
    forward: int = 0  # peak of a step of max_num_batched_tokens tokens
    attention: int = 0  # additional peak where a long context is gathered
    sampling: int = 0  # peak of sampling one chunk of rows, after the forward pass
    logits: int = 0  # logits of all rows, held while sampling
    counts: int = 0  # token counts of all requests, for penalties; held at all times
    transfers: int = 0  # staging of K/V on their way to or from a prefix cache on disk
    images: int = 0  # cached embeddings and the tower's peak
    states: StepStates | None = None  # None: no layer is recurrent


@dataclass(frozen=True)
class StepStates:
    """Bytes that recurrent layers take in a step, in addition to its prompt tokens.

    Our kernels update states in place in the pool and keep nothing per request; with MLX's
    operations each request's newest state is held from one step to the next. A draft's inputs of
    convolutions and recurrences are held until the step after next begins. A layer whose module
    is called per sequence keeps one state per request and one per draft.
    """

    request: int  # bytes per request without drafts
    draft: int  # additional bytes per draft


@dataclass(frozen=True)
class Settings:
    """vLLM's settings that the budget depends on."""

    utilization: float  # --gpu-memory-utilization
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    fitted: bool = False  # --max-model-len -1: the longest context that fits into the pool
    most: Most | None = None
    asked: AskedPool | None = None
    num_drafts: int = 0  # per request and step, at most
    request_bytes: int = 1  # minimum pool bytes that each request of a step needs

    @property
    def most_bytes(self) -> int | None:
        """Bytes of the largest pool created by default; None if the default has no limit."""
        if self.most is None:
            return None
        fitted = self.most.fitted if self.fitted else None
        return self.most.nbytes if fitted is None else fitted

    @property
    def least_context(self) -> int:
        """Tokens that one request must have room for."""
        if not self.fitted:
            return self.max_model_len
        return max(min(int(self.max_model_len * LEAST_CONTEXT_SHARE), LEAST_CONTEXT), 1)


@dataclass(frozen=True)
class Most:
    """The limit of a pool created by default, in bytes, and the reason for it."""

    nbytes: int
    reason: str  # for the budget's line of unused memory
    fitted: int | None = None  # bytes if the context length is fitted; None: the same


@dataclass(frozen=True)
class AskedPool:
    """A pool size set by the user."""

    setting: str
    count: int  # value of the setting
    unit: int  # bytes of one

    @property
    def nbytes(self) -> int:
        return self.count * self.unit


@dataclass(frozen=True)
class Request:
    """Bytes that one request needs in the pool, by its number of tokens."""

    needed: Callable[[int], int]  # maps tokens to bytes, monotonically
    quantized: float | None = None  # ratio to `needed` with a quantized cache; None: it is one


@dataclass(frozen=True)
class Line:
    """A named term of a budget; negative if it reduces the available memory."""

    name: str  # for programs
    label: str  # for people
    nbytes: int  # negative if it takes memory away


@dataclass(frozen=True)
class Budget:
    """Available memory minus everything that is not the pool's, line by line."""

    lines: tuple[Line, ...]
    result: str = "KV pool"

    @property
    def left(self) -> int:
        """Sum of the lines; negative if they need more memory than is available."""
        return sum(line.nbytes for line in self.lines)

    def table(self) -> str:
        """Formats the non-zero lines, in GiB."""
        rows = [(line.label, line.nbytes) for line in self.lines if line.nbytes]
        rows.append((f"= {self.result}", self.left))
        return "\n".join(f"  {label:<56}{nbytes / GIB:>9.2f} GiB" for label, nbytes in rows)

    def as_json(self) -> dict[str, int]:
        """Bytes by line name; they sum to `left`."""
        return {line.name: line.nbytes for line in self.lines}


def margin(total: int) -> int:
    """Bytes of a device's memory that are never used."""
    return max(int(total * MARGIN_SHARE), MARGIN_FLOOR)


def budget_of(measured: Measured, settings: Settings) -> Budget:
    """Returns the pool's budget, or, if the user set the pool's size, the budget for steps."""
    total = measured.total
    most_of_it = total - margin(total)
    networks = [
        Line("weights", "- weights", -measured.weights),
        Line("draft_weights", "- weights of the draft network", -measured.draft_weights),
        Line("adapters", "- LoRA adapters", -measured.adapters),
    ]
    others = [
        Line("transfers", "- staging of K/V transfers", -measured.transfers),
        Line("images", "- images: embeddings, and the tower's largest", -measured.images),
    ]
    if (asked := settings.asked) is not None:
        lines = [
            Line("total", measured.source, total),
            Line("margin", "- margin for the system", most_of_it - total),
            Line(
                "other_engines",
                "- held by other engines of this process",
                -measured.other_engines,
            ),
            *networks,
            *others,
            Line("pool", f"- KV pool by {asked.setting} {asked.count}", -asked.nbytes),
        ]
        return Budget(tuple(lines), "left for steps")
    share = int(total * settings.utilization)
    allowed = min(share, most_of_it)
    free = room(measured, settings)
    step = peak_of_a_step(measured)
    longest = max(step, measured.forward + measured.attention + measured.counts)
    lines = [
        Line("total", measured.source, total),
        Line(
            "beyond_utilization",
            f"- left alone by --gpu-memory-utilization {settings.utilization:g}",
            share - total,
        ),
        Line("margin", "- margin for the system, beyond that", allowed - share),
        Line("in_use", "- in use by others, beyond that", free - allowed),
        *networks,
        Line("step_peak", "- peak of a full step", -step),
        Line("long_contexts", "- more of it where contexts are longest", step - longest),
        *others,
        Line("buffer_cache", "- buffers MLX keeps for reuse", -measured.cache),
    ]
    left = sum(line.nbytes for line in lines)
    requests = states = 0
    if measured.states is not None:
        pool, states = _pool_and_states(measured.states, settings, left)
        requests = at_once(settings, pool)
        left -= states
    lines.append(Line("states", f"- states and drafts of {requests} requests in a step", -states))
    unused, reason = 0, ""
    if settings.most is not None and settings.most_bytes is not None:
        unused, reason = max(left - settings.most_bytes, 0), settings.most.reason
    lines.append(Line("unused", f"- left alone, {reason}", -unused))
    return Budget(tuple(lines))


def peak_of_a_step(measured: Measured) -> int:
    """Peak bytes of a step over short contexts."""
    return max(measured.forward, measured.sampling + measured.logits) + measured.counts


def at_once(settings: Settings, pool: int) -> int:
    """Maximum number of requests in a step (at least 1) with a pool of `pool` bytes."""
    # Each request writes to blocks of its own, so the pool's size is a bound, too.
    most = min(settings.max_num_seqs, settings.max_num_batched_tokens)
    return max(min(most, pool // settings.request_bytes), 1)


def states_of_a_step(states: StepStates, settings: Settings, pool: int, drafts: int) -> int:
    """Peak bytes of a step's states and drafts; `drafts` bytes are reserved for all drafts."""
    requests = at_once(settings, pool)
    rows = min(requests * settings.num_drafts, settings.max_num_batched_tokens - requests)
    # Arrays of drafts' inputs are padded to stable shapes.
    rows = stable(rows) if rows else 0
    return requests * states.request + min(rows * states.draft, drafts)


def for_drafts(states: StepStates, settings: Settings, nbytes: int) -> int:
    """Bytes reserved for drafts: a share of `nbytes` (pool and states), at least one request's."""
    return max(int(nbytes * DRAFTS_SHARE), settings.num_drafts * states.draft)


def most_drafts(measured: Measured, settings: Settings) -> int | None:
    """Maximum number of drafts in a step; None if only its number of tokens limits it."""
    if measured.states is None or not measured.states.draft or not settings.num_drafts:
        return None
    left = _left_without_states(measured, settings)
    return for_drafts(measured.states, settings, left) // measured.states.draft


def set_aside_for_states(measured: Measured, settings: Settings, pool: int) -> int:
    """Bytes reserved for the states and drafts of steps, next to a pool of `pool` bytes."""
    if measured.states is None:
        return 0
    drafts = for_drafts(measured.states, settings, _left_without_states(measured, settings))
    return states_of_a_step(measured.states, settings, pool, drafts)


def _left_without_states(measured: Measured, settings: Settings) -> int:
    return budget_of(replace(measured, states=None), replace(settings, most=None)).left


def enough_for(states: StepStates, settings: Settings, pool: int) -> int:
    """Bytes that suffice for a pool of `pool` bytes plus the states of steps."""
    without = pool + at_once(settings, pool) * states.request
    # The reserve for drafts is a share of pool and states together.
    drafts = math.ceil(without * DRAFTS_SHARE / (1 - DRAFTS_SHARE)) + 1
    drafts = max(drafts, settings.num_drafts * states.draft)
    return pool + states_of_a_step(states, settings, pool, drafts)


def _pool_and_states(states: StepStates, settings: Settings, nbytes: int) -> tuple[int, int]:
    """Splits `nbytes` into the largest pool with room for its requests' states, and the states.

    The pool respects the default limit; it is not positive if one request's states do not fit.
    """
    most = nbytes if settings.most_bytes is None else min(nbytes, settings.most_bytes)
    drafts = for_drafts(states, settings, nbytes)

    def states_with(pool: int) -> int:
        return states_of_a_step(states, settings, pool, drafts)

    if nbytes <= states_with(0):
        return nbytes - states_with(0), states_with(0)
    if most + states_with(most) <= nbytes:
        return most, states_with(most)
    # A larger pool admits more requests and so more states: find where the sum exceeds nbytes.
    fits = bisect_right(range(1, most), nbytes, key=lambda pool: pool + states_with(pool))
    return fits, nbytes - fits


def room(measured: Measured, settings: Settings) -> int:
    """Bytes this engine may use in total."""
    share = int(measured.total * settings.utilization)
    usable = measured.total - margin(measured.total) - measured.other_engines
    return min(share, usable, measured.total - measured.in_use)


def pool_bytes(measured: Measured, settings: Settings) -> int:
    """Size of the pool; not positive if there is no memory for it."""
    left = budget_of(measured, settings).left
    if settings.asked is None:
        return left
    return settings.asked.nbytes if left > 0 else min(left, 0)


def fits(measured: Measured, settings: Settings, request: Request) -> bool:
    """Whether the pool holds one request of `Settings.least_context` tokens."""
    return least(settings, request) <= pool_bytes(measured, settings)


def longest(measured: Measured, settings: Settings, request: Request) -> int:
    """Tokens of the longest request that the pool holds, from 0 to max_model_len."""
    pool = pool_bytes(measured, settings)
    return bisect_right(range(1, settings.max_model_len + 1), pool, key=request.needed)


def least(settings: Settings, request: Request) -> int:
    """Bytes of the smallest pool that holds one request of `Settings.least_context` tokens."""
    return request.needed(settings.least_context)
