# SPDX-License-Identifier: Apache-2.0
"""Suggests settings with which the pool fits, for the engine's error and `vllm-metal fit`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

from vllm_metal.engine.memory.budget import (
    GIB,
    AskedPool,
    Budget,
    Measured,
    Request,
    Settings,
    budget_of,
    enough_for,
    fits,
    least,
    longest,
    pool_bytes,
    room,
)

#: Smallest --max-num-batched-tokens to suggest: below it, prefill is too slow.
FEWEST_TOKENS = 64
#: How many changes an error lists.
NAMED_CHANGES = 3


class BudgetError(ValueError):
    """The KV pool does not fit; the message has the budget and what would make it fit."""


@dataclass(frozen=True)
class Change:
    """A change that may make the pool fit, with the measurements and settings it results in."""

    advice: str
    measured: Measured
    settings: Settings
    request: Request


def check(measured: Measured, settings: Settings, request: Request) -> Budget:
    """Returns the budget if the pool holds one request of max_model_len.

    Raises BudgetError: the pool is too small, or the requested pool exceeds what the device allows.
    """
    budget = budget_of(measured, settings)
    if fits(measured, settings, request):
        return budget
    tokens = f"--max-model-len {settings.max_model_len}"
    if settings.fitted:
        tokens = (
            f"{settings.least_context} tokens, the smallest context that is chosen automatically,"
        )
    problem = (
        f"one request of {tokens} needs {least(settings, request) / GIB:.2f} GiB of KV "
        f"cache, but only {pool_bytes(measured, settings) / GIB:.2f} are available"
    )
    if budget.left <= 0:
        problem = "no memory is left for " + ("steps" if settings.asked else "the KV cache")
    found = islice(changes(measured, settings, request), NAMED_CHANGES)
    advice = "\n".join(f"  * {change.advice}" for change in found)
    if advice:
        advice = f"Any one of these makes it fit:\n{advice}"
    else:
        in_use = _excess_in_use(measured, settings)
        close = (
            f"close other programs, which hold {_ceil_gib(in_use):.2f} GiB, and " if in_use else ""
        )
        advice = f"No single setting makes it fit: {close}use a smaller model, or more memory"
    raise BudgetError(f"{problem}:\n{budget.table()}\n{advice}")


def changes(measured: Measured, settings: Settings, request: Request) -> Iterator[Change]:
    """Yields single changes that make the pool fit, the least costly first."""
    kinds = (_higher_share, _other_pool, _close_programs, _smaller_steps, _fewer_requests)
    smaller = (_fewer_drafts, _shorter_requests, _quantized_cache, _no_images)
    several = (_close_programs_and_shorten, _all_smaller)
    for kind in (*kinds, *smaller, *several, _smaller_model):
        for change in kind(Change("", measured, settings, request)):
            if fits(change.measured, change.settings, change.request):
                yield change
                break


# Each function yields variants of one change, the smallest first; the first that fits is suggested.


def _higher_share(now: Change) -> Iterator[Change]:
    if now.settings.asked is not None:
        return
    for percent in range(int(now.settings.utilization * 100) + 1, 101):
        settings = replace(now.settings, utilization=percent / 100)
        advice = f"--gpu-memory-utilization {percent / 100} or more"
        yield replace(now, advice=advice, settings=settings)


def _other_pool(now: Change) -> Iterator[Change]:
    """Suggests another pool size: the needed one, or the largest that fits."""
    needed = least(now.settings, now.request)
    asked = now.settings.asked
    if asked is None:
        most = now.settings.most_bytes
        if most is not None and needed > most:
            pool = AskedPool("--kv-cache-memory-bytes", needed, 1)
            if needed <= budget_of(now.measured, replace(now.settings, most=None)).left:
                settings = replace(now.settings, asked=pool)
                yield replace(now, advice=f"{pool.setting} {pool.count}", settings=settings)
        return
    enough = replace(asked, count=-(-needed // asked.unit))
    free = budget_of(now.measured, replace(now.settings, asked=replace(asked, count=0))).left
    # Leaves at least one byte for steps: a budget with nothing left counts as not fitting.
    largest = replace(asked, count=max(free - 1, 0) // asked.unit)
    for pool, bound in ((enough, "more"), (largest, "less")):
        if (pool.count > asked.count) == (bound == "more"):
            settings = replace(now.settings, asked=pool)
            yield replace(now, advice=f"{pool.setting} {pool.count} or {bound}", settings=settings)


def _close_programs(now: Change) -> Iterator[Change]:
    in_use = now.measured.in_use - now.measured.other_engines
    missing = _shortfall(now)
    if 0 < missing <= in_use and now.settings.asked is None:
        yield replace(
            now,
            advice=f"close other programs: they hold {in_use / GIB:.2f} GiB, and "
            f"{_ceil_gib(missing):.2f} are missing",
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
            measured=_with_max_num_seqs(now, fewer),
            settings=replace(now.settings, max_num_seqs=fewer),
        )
        fewer //= 2


def _fewer_drafts(now: Change) -> Iterator[Change]:
    # Drafts only take step memory in models with recurrent layers.
    if now.measured.states is not None:
        for drafts in range(now.settings.num_drafts - 1, 0, -1):
            yield replace(
                now,
                advice=f"num_speculative_tokens {drafts} or less in --speculative-config",
                settings=replace(now.settings, num_drafts=drafts),
            )


def _with_max_num_seqs(now: Change, requests: int) -> Measured:
    """Scales the measurements that depend on the number of requests to `requests`."""
    logits, counts = (
        -(-nbytes * requests // now.settings.max_num_seqs)
        for nbytes in (now.measured.logits, now.measured.counts)
    )
    return replace(now.measured, logits=logits, counts=counts)


def _shorter_requests(now: Change) -> Iterator[Change]:
    tokens = longest(now.measured, now.settings, now.request)
    if 0 < tokens < now.settings.least_context:
        yield replace(
            now,
            advice=f"--max-model-len {tokens} or less",
            settings=replace(now.settings, max_model_len=tokens, fitted=False),
        )


def _quantized_cache(now: Change) -> Iterator[Change]:
    share, needed = now.request.quantized, now.request.needed
    if share is not None:
        request_bytes = max(math.floor(now.settings.request_bytes * share), 1)
        yield replace(
            now,
            advice=f"--kv-cache-dtype fp8, or int8: the KV cache takes {share:.2f} of its bytes",
            settings=replace(now.settings, request_bytes=request_bytes),
            request=Request(lambda tokens: math.ceil(needed(tokens) * share)),
        )


def _no_images(now: Change) -> Iterator[Change]:
    if now.measured.images:
        advice = "--language-model-only, if no images are needed"
        yield replace(now, advice=advice, measured=replace(now.measured, images=0))


def _close_programs_and_shorten(now: Change) -> Iterator[Change]:
    """Suggests to close programs and to shorten the context, if neither alone is enough."""
    in_use = _excess_in_use(now.measured, now.settings)
    measured = replace(now.measured, in_use=now.measured.in_use - in_use)
    tokens = longest(measured, now.settings, now.request)
    if in_use and 0 < tokens < now.settings.least_context:
        yield replace(
            now,
            advice=f"close other programs that hold {_ceil_gib(in_use):.2f} GiB, and "
            f"--max-model-len {tokens}, together",
            measured=measured,
            settings=replace(now.settings, max_model_len=tokens, fitted=False),
        )


def _all_smaller(now: Change) -> Iterator[Change]:
    for parts in (2, 4, 8):
        tokens = max(now.settings.max_num_batched_tokens // parts, 1)
        requests = max(now.settings.max_num_seqs // parts, 1)
        settings = replace(now.settings, max_num_batched_tokens=tokens, max_num_seqs=requests)
        measured = replace(
            _with_max_num_seqs(now, requests), forward=-(-now.measured.forward // parts)
        )
        length = longest(measured, settings, now.request)
        if tokens >= FEWEST_TOKENS and length:
            yield replace(
                now,
                advice=f"--max-num-batched-tokens {tokens} --max-num-seqs {requests} "
                f"--max-model-len {length} together (an estimate)",
                measured=measured,
                settings=replace(settings, max_model_len=length, fitted=False),
            )


def _smaller_model(now: Change) -> Iterator[Change]:
    less = _shortfall(now)
    if 0 < less < now.measured.weights:
        yield replace(
            now,
            advice=f"a model whose weights take {_ceil_gib(less):.2f} GiB less",
            measured=replace(now.measured, weights=now.measured.weights - less),
        )


def _excess_in_use(measured: Measured, settings: Settings) -> int:
    """Bytes this engine could use if other programs did not hold them."""
    if settings.asked is not None:
        return 0
    alone = replace(measured, in_use=measured.other_engines)
    return room(alone, settings) - room(measured, settings)


def _shortfall(now: Change) -> int:
    """Additional bytes that would have to be free for the pool to fit."""
    if now.settings.asked is not None:
        return 1 - budget_of(now.measured, now.settings).left
    pool, states = least(now.settings, now.request), now.measured.states
    if states is not None:
        pool = enough_for(states, now.settings, pool)
    return pool - budget_of(replace(now.measured, states=None), now.settings).left


def _ceil_gib(nbytes: int) -> float:
    """GiB, rounded up to the two decimals that messages show."""
    return math.ceil(nbytes / GIB * 100) / 100
