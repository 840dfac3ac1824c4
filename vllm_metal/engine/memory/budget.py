# SPDX-License-Identifier: Apache-2.0
"""Decides the KV pool's size: arithmetic on what was measured, with its margins and shares.

Nothing here asks the device; `vllm_metal.engine.memory.planner` measures. All sizes are bytes.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace

from metal_kernels.layout import stable

GIB = 2**30
#: Never used, whatever --gpu-memory-utilization says. Metal's recommended working set is a limit
#: for the GPU, not a share that is ours: Macs whose whole working set was wired have panicked, and
#: the window server and this process's own Python live in the same memory. A sixteenth lies below
#: what vLLM's default utilization of 0.92 leaves free, so it costs nothing there; half a GiB is
#: what that would be on a Mac of 8 GB, whose working set is 5.3.
MARGIN_SHARE = 1 / 16
MARGIN_FLOOR = GIB // 2
#: Where the length of a context is what fits, the least that will do: a share of what the model is
#: made for, and so many tokens at most, a question of a page and its answer.
LEAST_CONTEXT_SHARE = 1 / 8
LEAST_CONTEXT = 1024
#: Of what the pool and the states of steps have, the most that is set aside for drafts, unless one
#: request's take more. It is a bound where a draft has a state of its own, some 100 MiB: beside 24
#: GiB some 30 requests verify one each. Where more run at once, a step has rows enough to keep the
#: device busy, and drafts gain least. Drafts that leave only inputs all have room, as a rule.
DRAFTS_SHARE = 1 / 8


@dataclass(frozen=True)
class Measured:
    """What was measured on a device with the networks loaded; bytes. At rest, steps take none."""

    source: str  # of `total`, in words
    total: int  # what the device may use at all
    in_use: int  # by other engines of this process and by other programs
    weights: int
    cache: int  # buffers that MLX may keep for reuse
    other_engines: int = 0  # of `in_use`, by other engines of this process
    draft_weights: int = 0
    adapters: int = 0  # slots of LoRA adapters, and those that are kept beside them
    forward: int = 0  # the most that a step of max_num_batched_tokens rows needs
    attention: int = 0  # what it needs besides where a long context is gathered
    sampling: int = 0  # the most that sampling one chunk of rows needs, after the forward pass
    logits: int = 0  # of all rows, held while sampling
    counts: int = 0  # token counts of all requests, for penalties; held at all times
    transfers: int = 0  # staging of K/V on their way to a prefix cache on disk, or from it
    images: int = 0  # embeddings of images that are kept, and what a tower needs to make them
    states: StepStates | None = None  # None: no layer keeps states


@dataclass(frozen=True)
class StepStates:
    """What layers that go from token to token take of a step beside its rows of prompts; bytes.

    Our kernels bring states on where they lie in the pool, and nothing is kept of a request;
    where MLX's operations do, its newest state is, from one step to the next. A draft leaves the
    inputs of the convolutions and recurrences until the step after the next one begins. A layer
    whose module is called by runs keeps a state a request and one a draft.
    """

    request: int  # of one without drafts
    draft: int  # of each draft besides


@dataclass(frozen=True)
class Settings:
    """vLLM's settings that the sum depends on."""

    utilization: float  # --gpu-memory-utilization
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    fitted: bool = False  # --max-model-len -1: the longest that the pool has room for
    most: Most | None = None
    asked: AskedPool | None = None
    num_drafts: int = 0  # of a request in a step, at most
    request_bytes: int = 1  # of the pool, that every request of a step has for itself at least

    @property
    def most_bytes(self) -> int | None:
        """Bytes of the largest pool that is made unasked; None: all that is left."""
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
    """The largest pool that is made unasked."""

    nbytes: int
    reason: str  # for the line of what it leaves
    fitted: int | None = None  # where the length of a context is what fits; None: as much


@dataclass(frozen=True)
class AskedPool:
    """A pool whose size the user has set."""

    setting: str
    count: int  # what it was set to
    unit: int  # bytes of one

    @property
    def nbytes(self) -> int:
        return self.count * self.unit


@dataclass(frozen=True)
class Request:
    """The smallest need: one request of max_model_len tokens."""

    needed: Callable[[int], int]  # bytes by tokens, never falling
    quantized: float | None = None  # the share of `needed` with a quantized cache; None: it is one


@dataclass(frozen=True)
class Line:
    """A summand of a budget."""

    name: str  # for programs
    label: str  # for people
    nbytes: int  # negative: what it takes away


@dataclass(frozen=True)
class Budget:
    """A sum, line by line: the memory there is, less all that is not the pool's."""

    lines: tuple[Line, ...]
    result: str = "KV pool"

    @property
    def left(self) -> int:
        """What the lines come to; negative where they take more than there is."""
        return sum(line.nbytes for line in self.lines)

    def table(self) -> str:
        """One line each, in GiB; not those that take nothing."""
        rows = [(line.label, line.nbytes) for line in self.lines if line.nbytes]
        rows.append((f"= {self.result}", self.left))
        return "\n".join(f"  {label:<56}{nbytes / GIB:>9.2f} GiB" for label, nbytes in rows)

    def as_json(self) -> dict[str, int]:
        """Bytes of each line by its name; together, what is left."""
        return {line.name: line.nbytes for line in self.lines}


def margin(total: int) -> int:
    """Bytes of a device's memory that are never used."""
    return max(int(total * MARGIN_SHARE), MARGIN_FLOOR)


def budget_of(measured: Measured, settings: Settings) -> Budget:
    """The sum for the pool; if the user set the pool's size, the sum of what is left for steps."""
    total = measured.total
    most_of_it = total - margin(total)
    networks = [
        Line("weights", "- weights", -measured.weights),
        Line("draft_weights", "- weights of the draft network", -measured.draft_weights),
        Line("adapters", "- LoRA adapters", -measured.adapters),
    ]
    beside = [
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
            *beside,
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
        *beside,
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
    """What a step needs at most over short contexts."""
    return max(measured.forward, measured.sampling + measured.logits) + measured.counts


def at_once(settings: Settings, pool: int) -> int:
    """Requests of a step at most, one at least, where the pool has so many bytes.

    Each writes to blocks that no other one has, so there are no more than the pool has room for.
    """
    most = min(settings.max_num_seqs, settings.max_num_batched_tokens)
    return max(min(most, pool // settings.request_bytes), 1)


def states_of_a_step(states: StepStates, settings: Settings, pool: int, drafts: int) -> int:
    """What the states and drafts of a step take at most, beside a pool of so many bytes.

    Args:
        states: what one request takes.
        settings: of the engine.
        pool: its bytes.
        drafts: bytes that are set aside for those of all requests.
    """
    requests = at_once(settings, pool)
    rows = min(requests * settings.num_drafts, settings.max_num_batched_tokens - requests)
    # Arrays of drafts' inputs have room for more.
    rows = stable(rows) if rows else 0
    return requests * states.request + min(rows * states.draft, drafts)


def for_drafts(states: StepStates, settings: Settings, nbytes: int) -> int:
    """Bytes to set aside for drafts, of `nbytes` for the pool and the states of steps.

    At least those of one request, whatever there is.
    """
    return max(int(nbytes * DRAFTS_SHARE), settings.num_drafts * states.draft)


def most_drafts(measured: Measured, settings: Settings) -> int | None:
    """Drafts of a step, at most; None: as many as it has rows for."""
    if measured.states is None or not measured.states.draft or not settings.num_drafts:
        return None
    left = _left_without_states(measured, settings)
    return for_drafts(measured.states, settings, left) // measured.states.draft


def set_aside_for_states(measured: Measured, settings: Settings, pool: int) -> int:
    """What the states and drafts of steps take of the sum, beside a pool of so many bytes."""
    if measured.states is None:
        return 0
    drafts = for_drafts(measured.states, settings, _left_without_states(measured, settings))
    return states_of_a_step(measured.states, settings, pool, drafts)


def _left_without_states(measured: Measured, settings: Settings) -> int:
    return budget_of(replace(measured, states=None), replace(settings, most=None)).left


def enough_for(states: StepStates, settings: Settings, pool: int) -> int:
    """Bytes that are enough for a pool of so many and for the states of steps."""
    without = pool + at_once(settings, pool) * states.request
    # What is set aside for drafts is a share of the sum of both.
    drafts = math.ceil(without * DRAFTS_SHARE / (1 - DRAFTS_SHARE)) + 1
    drafts = max(drafts, settings.num_drafts * states.draft)
    return pool + states_of_a_step(states, settings, pool, drafts)


def _pool_and_states(states: StepStates, settings: Settings, nbytes: int) -> tuple[int, int]:
    """Bytes of the largest pool within `nbytes` that leaves room for its requests' states.

    Returns:
        Its size, no more than the most that is made, and not positive where there is no room for
        the states of one request; and what of `nbytes` is theirs.
    """
    most = nbytes if settings.most_bytes is None else min(nbytes, settings.most_bytes)
    drafts = for_drafts(states, settings, nbytes)

    def beside(pool: int) -> int:
        return states_of_a_step(states, settings, pool, drafts)

    if nbytes <= beside(0):
        return nbytes - beside(0), beside(0)
    if most + beside(most) <= nbytes:
        return most, beside(most)
    fits = bisect_right(range(1, most), nbytes, key=lambda pool: pool + beside(pool))
    return fits, nbytes - fits


def room(measured: Measured, settings: Settings) -> int:
    """What this engine may use in all."""
    share = int(measured.total * settings.utilization)
    beside = measured.total - margin(measured.total) - measured.other_engines
    return min(share, beside, measured.total - measured.in_use)


def pool_bytes(measured: Measured, settings: Settings) -> int:
    """Size of the pool; not positive where there is no memory for it."""
    left = budget_of(measured, settings).left
    if settings.asked is None:
        return left
    return settings.asked.nbytes if left > 0 else min(left, 0)


def fits(measured: Measured, settings: Settings, request: Request) -> bool:
    """Whether the pool holds a request of max_model_len tokens, or the least, if that is fitted."""
    return least(settings, request) <= pool_bytes(measured, settings)


def longest(measured: Measured, settings: Settings, request: Request) -> int:
    """Tokens of the longest request that the pool holds, up to max_model_len; at least 0."""
    pool = pool_bytes(measured, settings)
    return bisect_right(range(1, settings.max_model_len + 1), pool, key=request.needed)


def least(settings: Settings, request: Request) -> int:
    """Bytes of the smallest pool that will do."""
    return request.needed(settings.least_context)
