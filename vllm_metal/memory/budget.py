# SPDX-License-Identifier: Apache-2.0
"""How many bytes the KV pool may take: arithmetic on what was measured, and advice where it fails.

Nothing here asks the device; `vllm_metal.memory.planner` measures. All sizes are bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

GIB = 2**30
#: Kept from us whatever --gpu-memory-utilization says. Metal's recommended working set is a limit
#: for the GPU, not a share that is ours: Macs whose whole working set was wired have panicked, and
#: the window server and this process's own Python live in the same memory. A sixteenth lies below
#: what vLLM's default utilization of 0.92 leaves free, so it costs nothing there; half a GiB is
#: what that would be on a Mac of 8 GB, whose working set is 5.3.
MARGIN_SHARE = 1 / 16
MARGIN_FLOOR = GIB // 2
#: Smallest --max-num-batched-tokens to advise: below it, prompts take for ever.
FEWEST_TOKENS = 64
#: How many changes an error names.
NAMED_CHANGES = 3


class BudgetError(ValueError):
    """The KV pool does not fit; the message holds the sum and what would make it fit."""


@dataclass(frozen=True)
class Measured:
    """A device with a model on it."""

    source: str  # of `total`, in words
    total: int  # what the device may use at all
    other_engines: int  # of that, by other engines of this process
    in_use: int  # by them and by other programs
    weights: int
    draft_weights: int
    forward: int  # the most that a step of max_num_batched_tokens rows needs
    attention: int  # more of it where a long context is gathered
    sampling: int  # the most that sampling needs, at another time, for the rows it takes at once
    logits: int  # beside that, of all rows
    counts: int  # of each request's tokens, for penalties; at all times
    cache: int  # buffers that MLX may keep for reuse


@dataclass(frozen=True)
class Settings:
    """vLLM's settings that the sum depends on."""

    utilization: float  # --gpu-memory-utilization
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    fitted: bool = False  # max_model_len is to be what the pool has room for
    most: int | None = None  # the pool takes no more, unless asked to
    asked: AskedPool | None = None


@dataclass(frozen=True)
class AskedPool:
    """A pool whose size the user has settled."""

    setting: str
    count: int  # what it was set to
    unit: int  # bytes of one

    @property
    def nbytes(self) -> int:
        return self.count * self.unit


@dataclass(frozen=True)
class Request:
    """What a pool must hold at least: one request of max_model_len tokens."""

    needed: Callable[[int], int]  # bytes by tokens, never falling
    quantised: float | None = None  # a quantised cache takes so much of it; None: it is one


@dataclass(frozen=True)
class Budget:
    """A sum, line by line: what there is, less what is not for the pool."""

    lines: tuple[tuple[str, int], ...]
    result: str = "KV pool"

    @property
    def left(self) -> int:
        """What the lines come to; negative where they take more than there is."""
        return sum(nbytes for _, nbytes in self.lines)

    def table(self) -> str:
        """One line each, in GiB."""
        rows = [*self.lines, (f"= {self.result}", self.left)]
        return "\n".join(f"  {label:<56}{nbytes / GIB:>9.2f} GiB" for label, nbytes in rows)


@dataclass(frozen=True)
class Change:
    """Something that makes it fit, and how things stand then."""

    advice: str
    measured: Measured
    settings: Settings
    request: Request


def margin(total: int) -> int:
    """What of a device's memory is never ours."""
    return max(int(total * MARGIN_SHARE), MARGIN_FLOOR)


def plan(measured: Measured, settings: Settings) -> Budget:
    """The sum; where the user has settled the pool's size, it is of what steps are left with."""
    total = measured.total
    most_of_it = total - margin(total)
    networks = [
        ("- weights", -measured.weights),
        ("- weights of the draft network", -measured.draft_weights),
    ]
    if (asked := settings.asked) is not None:
        lines = [
            (measured.source, total),
            ("- margin for the system", most_of_it - total),
            ("- held by other engines of this process", -measured.other_engines),
            *networks,
            (f"- KV pool by {asked.setting} {asked.count}", -asked.nbytes),
        ]
        return Budget(_worth_showing(lines), "left for steps")
    share = int(total * settings.utilization)
    allowed = min(share, most_of_it)
    free = room(measured, settings)
    step = peak_of_a_step(measured)
    longest = max(step, measured.forward + measured.attention + measured.counts)
    lines = [
        (measured.source, total),
        (f"- left alone by --gpu-memory-utilization {settings.utilization:g}", share - total),
        ("- margin for the system, beyond that", allowed - share),
        ("- in use by others, beyond that", free - allowed),
        *networks,
        ("- peak of a full step", -step),
        ("- more of it where contexts are longest", step - longest),
        ("- buffers MLX keeps for reuse", -measured.cache),
    ]
    left = sum(nbytes for _, nbytes in lines)
    if settings.most is not None and left > settings.most:
        lines.append(("- left alone, on a CPU", settings.most - left))
    return Budget(_worth_showing(lines))


def peak_of_a_step(measured: Measured) -> int:
    """What a step needs at most over short contexts."""
    return max(measured.forward, measured.sampling + measured.logits) + measured.counts


def room(measured: Measured, settings: Settings) -> int:
    """What this engine may use in all."""
    share = int(measured.total * settings.utilization)
    beside = measured.total - margin(measured.total) - measured.other_engines
    return min(share, beside, measured.total - measured.in_use)


def _worth_showing(lines: list[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    return tuple((label, nbytes) for label, nbytes in lines if nbytes)


def pool_bytes(measured: Measured, settings: Settings) -> int:
    """Size of the pool; not positive where there is no memory for it."""
    left = plan(measured, settings).left
    if settings.asked is None:
        return left
    return settings.asked.nbytes if left > 0 else min(left, 0)


def fits(measured: Measured, settings: Settings, request: Request) -> bool:
    """Whether the pool holds a request of max_model_len tokens, or of one if that is fitted."""
    return _least(settings, request) <= pool_bytes(measured, settings)


def longest(measured: Measured, settings: Settings, request: Request) -> int:
    """Tokens of the longest request that the pool holds, up to max_model_len; at least 0."""
    pool = pool_bytes(measured, settings)
    shortest, longest = 0, settings.max_model_len  # fits; may fit
    while shortest < longest:
        middle = (shortest + longest + 1) // 2
        if request.needed(middle) <= pool:
            shortest = middle
        else:
            longest = middle - 1
    return shortest


def _least(settings: Settings, request: Request) -> int:
    return request.needed(1 if settings.fitted else settings.max_model_len)


def check(measured: Measured, settings: Settings, request: Request) -> Budget:
    """The sum, where the pool holds a request.

    Raises:
        BudgetError: it does not; or it was asked to be larger than the device allows.
    """
    budget = plan(measured, settings)
    if fits(measured, settings, request):
        return budget
    tokens = "a token" if settings.fitted else f"--max-model-len {settings.max_model_len}"
    problem = (
        f"one request of {tokens} needs {_least(settings, request) / GIB:.2f} GiB of KV cache, and "
        f"there are {pool_bytes(measured, settings) / GIB:.2f}"
    )
    if budget.left <= 0:
        problem = "no memory is left for " + ("steps" if settings.asked else "the KV cache")
    found = islice(changes(measured, settings, request), NAMED_CHANGES)
    advice = "\n".join(f"  * {change.advice}" for change in found)
    if advice:
        advice = f"Any one of these makes it fit:\n{advice}"
    else:
        taken = _taken_beyond_the_share(measured, settings)
        close = f"close other programs, which hold {_up(taken):.2f} GiB, and " if taken else ""
        advice = f"No one setting makes it fit: {close}take a smaller model, or more memory"
    raise BudgetError(f"{problem}:\n{budget.table()}\n{advice}")


def changes(measured: Measured, settings: Settings, request: Request) -> Iterator[Change]:
    """What would make it fit, each change by itself, first those that cost least."""
    kinds = (_higher_share, _other_pool, _less_elsewhere, _smaller_steps, _fewer_requests)
    several = (_less_elsewhere_and_shorter, _all_smaller)
    for kind in (*kinds, _shorter_requests, _quantised_cache, *several, _smaller_model):
        for change in kind(Change("", measured, settings, request)):
            if fits(change.measured, change.settings, change.request):
                yield change
                break


# Each kind of change from the least of it to the most; the first that fits is the one to advise.


def _higher_share(now: Change) -> Iterator[Change]:
    if now.settings.asked is not None:
        return
    for percent in range(int(now.settings.utilization * 100) + 1, 101):
        settings = replace(now.settings, utilization=percent / 100)
        advice = f"--gpu-memory-utilization {percent / 100} or more"
        yield replace(now, advice=advice, settings=settings)


def _other_pool(now: Change) -> Iterator[Change]:
    """The size that is needed, by the setting that says so; or the most that there is room for."""
    needed = _least(now.settings, now.request)
    asked = now.settings.asked
    if asked is None:
        if now.settings.most is not None and needed > now.settings.most:
            pool = AskedPool("--kv-cache-memory-bytes", needed, 1)
            if needed <= plan(now.measured, replace(now.settings, most=None)).left:
                settings = replace(now.settings, asked=pool)
                yield replace(now, advice=f"{pool.setting} {pool.count}", settings=settings)
        return
    enough = replace(asked, count=-(-needed // asked.unit))
    free = plan(now.measured, replace(now.settings, asked=replace(asked, count=0))).left
    # A byte at least is left for steps.
    largest = replace(asked, count=max(free - 1, 0) // asked.unit)
    for pool, bound in ((enough, "more"), (largest, "less")):
        if (pool.count > asked.count) == (bound == "more"):
            settings = replace(now.settings, asked=pool)
            yield replace(now, advice=f"{pool.setting} {pool.count} or {bound}", settings=settings)


def _less_elsewhere(now: Change) -> Iterator[Change]:
    taken = now.measured.in_use - now.measured.other_engines
    missing = _missing(now)
    if 0 < missing <= taken and now.settings.asked is None:
        yield replace(
            now,
            advice=f"close other programs: they hold {taken / GIB:.2f} GiB, and "
            f"{_up(missing):.2f} are missing",
            measured=replace(now.measured, in_use=now.measured.in_use - missing),
        )


def _smaller_steps(now: Change) -> Iterator[Change]:
    tokens = now.settings.max_num_batched_tokens
    forward = now.measured.forward
    fewer = tokens // 2
    while fewer >= FEWEST_TOKENS:
        yield replace(
            now,
            advice=f"--max-num-batched-tokens {fewer} or less (an estimate)",
            measured=replace(now.measured, forward=-(-forward * fewer // tokens)),
            settings=replace(now.settings, max_num_batched_tokens=fewer),
        )
        fewer //= 2


def _fewer_requests(now: Change) -> Iterator[Change]:
    requests = now.settings.max_num_seqs
    fewer = requests // 2
    while fewer:
        yield replace(
            now,
            advice=f"--max-num-seqs {fewer} or less",
            measured=_of_requests(now, fewer),
            settings=replace(now.settings, max_num_seqs=fewer),
        )
        fewer //= 2


def _of_requests(now: Change, requests: int) -> Measured:
    """The figures for so many requests; what does not depend on their number stays."""
    logits, counts = (
        -(-nbytes * requests // now.settings.max_num_seqs)
        for nbytes in (now.measured.logits, now.measured.counts)
    )
    return replace(now.measured, logits=logits, counts=counts)


def _shorter_requests(now: Change) -> Iterator[Change]:
    tokens = longest(now.measured, now.settings, now.request)
    if tokens and not now.settings.fitted:
        yield replace(
            now,
            advice=f"--max-model-len {tokens} or less",
            settings=replace(now.settings, max_model_len=tokens),
        )


def _quantised_cache(now: Change) -> Iterator[Change]:
    share, needed = now.request.quantised, now.request.needed
    if share is not None:
        yield replace(
            now,
            advice=f"--kv-cache-dtype fp8, or int8: the KV cache takes {share:.2f} of its bytes",
            request=Request(lambda tokens: math.ceil(needed(tokens) * share)),
        )


def _less_elsewhere_and_shorter(now: Change) -> Iterator[Change]:
    """Both, where others have taken so much that neither is enough."""
    taken = _taken_beyond_the_share(now.measured, now.settings)
    measured = replace(now.measured, in_use=now.measured.in_use - taken)
    tokens = longest(measured, now.settings, now.request)
    if taken and tokens and not now.settings.fitted:
        yield replace(
            now,
            advice=f"close other programs that hold {_up(taken):.2f} GiB, and "
            f"--max-model-len {tokens}, together",
            measured=measured,
            settings=replace(now.settings, max_model_len=tokens),
        )


def _all_smaller(now: Change) -> Iterator[Change]:
    """Several settings at once, for where none is enough."""
    for parts in (2, 4, 8):
        tokens = max(now.settings.max_num_batched_tokens // parts, 1)
        requests = max(now.settings.max_num_seqs // parts, 1)
        settings = replace(now.settings, max_num_batched_tokens=tokens, max_num_seqs=requests)
        measured = replace(_of_requests(now, requests), forward=-(-now.measured.forward // parts))
        length = longest(measured, settings, now.request)
        if tokens >= FEWEST_TOKENS and length:
            yield replace(
                now,
                advice=f"--max-num-batched-tokens {tokens} --max-num-seqs {requests} "
                f"--max-model-len {length} together (an estimate)",
                measured=measured,
                settings=replace(settings, max_model_len=length),
            )


def _smaller_model(now: Change) -> Iterator[Change]:
    less = _missing(now)
    if 0 < less < now.measured.weights:
        yield replace(
            now,
            advice=f"a model whose weights take {_up(less):.2f} GiB less",
            measured=replace(now.measured, weights=now.measured.weights - less),
        )


def _taken_beyond_the_share(measured: Measured, settings: Settings) -> int:
    """Bytes that would be this engine's, were they not in use by other programs."""
    if settings.asked is not None:
        return 0
    alone = replace(measured, in_use=measured.other_engines)
    return room(alone, settings) - room(measured, settings)


def _missing(now: Change) -> int:
    """Bytes that would have to be free as well."""
    if now.settings.asked is not None:
        return 1 - plan(now.measured, now.settings).left
    return _least(now.settings, now.request) - plan(now.measured, now.settings).left


def _up(nbytes: int) -> float:
    """GiB, rounded up to what a message shows."""
    return math.ceil(nbytes / GIB * 100) / 100
