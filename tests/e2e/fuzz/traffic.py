# SPDX-License-Identifier: Apache-2.0
"""Draws an engine's settings, requests and events from a seed.

Time is counted in engine steps, so a run is the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from e2e.fuzz.models import (
    EOS,
    LARGE_STATES,
    LEAST_BLOCKS,
    MAX_LEN,
    MODELS,
    NUM_STATE_GROUPS,
    SPARSE,
    VOCAB,
    word,
)

from vllm_metal.engine.spec_decode.registry import BY_NAME

NUM_REQUESTS = 42  # per run: 4 to 5 s of one core
SALTS = (None, None, None, "tenant-1", "tenant-2")
KEPT_TENANT = "tenant-2"  # beside a disk, its salt comes from the server
METHODS = (None, None, "ngram", "suffix", "draft_model")
#: --kv-cache-dtype, by seed in turn.
CACHES = ("auto", "auto", "auto", "fp8", "auto", "int8")
#: One in this many seeds runs the engine in its own process, if its model keeps states: vLLM
#: completes the configuration again there, after a worker has enlarged the blocks.
APART_OF = 5
#: One in this many seeds of models with K/V only has sparse attention.
SPARSE_OF = 10
#: One in this many seeds uses vLLM's second model runner contract.
SECOND_OF = 4
#: Methods with a network in a folder with the model's name and this suffix.
NETWORKS = {"draft_model": "draft", "dflash": "dflash"}
#: One in this many seeds with a draft model has a block drafter instead.
BLOCKS_OF = 2
#: All but one in this many seeds with a draft network also copy text.
WITHOUT_LOOKUP_OF = 3
#: Methods with which vLLM does not schedule ahead under its first model runner's contract.
SYNCHRONOUS_ONLY = tuple(name for name in METHODS if name and not BY_NAME[name].schedules_ahead)


@dataclass(frozen=True)
class Space:
    """Limits for the requests to a model. Lengths are in tokens."""

    vocab: int
    max_len: int
    longest_output: int


TINY = Space(VOCAB, MAX_LEN, 24)


@dataclass(frozen=True)
class Setting:
    """Settings of an engine.

    spare_blocks: pool blocks beyond those of one max_model_len request. num_drafts: for the
    speculative `method`; the maximum with `adaptive`. kv_cache_dtype: as --kv-cache-dtype. apart:
    whether the engine has its own process. second: whether scheduler and worker use the
    contract of vLLM's second model runner. lookup: whether repetitive requests copy their text
    beside a draft network.
    """

    model: str
    max_len: int
    async_scheduling: bool
    block_size: int
    spare_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    policy: str
    method: str | None
    num_drafts: int
    adaptive: bool
    kv_cache_dtype: str
    apart: bool = False
    second: bool = False
    lookup: bool = False

    @property
    def block_tokens(self) -> int:
        """Tokens per block, which has room for a state."""
        return max(self.block_size, LEAST_BLOCKS.get(self.model, 0))


@dataclass(frozen=True)
class Request:
    """A request.

    arrival: step before which it is added. prompt: token ids, after the first `continued` tokens
    of the text of request `continues`, if that was served. abort_after: steps from arrival;
    None: never. options: SamplingParams options.
    """

    index: int
    arrival: int
    prompt: tuple[int, ...]
    continues: int | None
    continued: int
    salt: str | None
    priority: int
    abort_after: int | None
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Event:
    """An event before `step`.

    `reset` clears prefixes if no request runs, `reset_running` preempts running ones first, and
    `sleep1` and `sleep2` free memory and wake up.
    """

    step: int
    kind: str


@dataclass(frozen=True)
class Run:
    """A seed's settings, requests and events."""

    seed: int
    setting: Setting
    requests: tuple[Request, ...]
    events: tuple[Event, ...]


def draw(
    seed: int,
    *,
    num_requests: int = NUM_REQUESTS,
    model: str | None = None,
    space: Space = TINY,
    sleeping: bool = False,
) -> Run:
    """Draws the run of a seed.

    Args:
        seed: any non-negative integer.
        num_requests: number of requests; also affects the draw.
        model: a model's folder name; None draws a tiny one.
        space: that model's limits.
        sleeping: whether the platform can sleep.
    """
    rng = np.random.default_rng(seed)
    setting = _setting(rng, model or str(rng.choice(MODELS)), space)
    # Over many layers, quantization errors grow too large to judge tokens. If states share blocks
    # with quantized K/V, blocks are larger than the setting.
    if model is None and setting.model not in NUM_STATE_GROUPS:
        setting = replace(setting, kv_cache_dtype=CACHES[seed % len(CACHES)])
    if model is None and setting.model == "full" and seed % SPARSE_OF == SPARSE_OF - 3:
        # Quantized index keys change the selected positions, and so the text.
        setting = replace(setting, model=SPARSE, kv_cache_dtype="auto")
    if model is None and setting.model in NUM_STATE_GROUPS and seed % APART_OF == 2:
        setting = replace(setting, model=LARGE_STATES, apart=True)
    if seed % SECOND_OF == SECOND_OF - 1:  # there vLLM schedules ahead with all methods
        ahead = setting.async_scheduling or setting.method in SYNCHRONOUS_ONLY
        setting = replace(setting, second=True, async_scheduling=ahead)
    if model is None and setting.method == "draft_model" and seed % BLOCKS_OF == 0:
        setting = replace(setting, method="dflash")
    if setting.method in NETWORKS:
        setting = replace(setting, lookup=seed % WITHOUT_LOOKUP_OF != 0)
    requests: list[Request] = []
    arrival = 0
    for index in range(num_requests):
        requests.append(_request(rng, index, arrival, requests, setting, space))
        arrival += int(rng.choice([0, 0, 0, 0, 1, 2, 8]))
    kinds = ["reset", "reset_running", *(["sleep1", "sleep2"] if sleeping else [])]
    events = [
        Event(int(rng.integers(1, arrival + 30)), str(rng.choice(kinds)))
        for _ in range(int(rng.choice([0, 1, 2, 4])))
    ]
    return Run(seed, setting, tuple(requests), tuple(sorted(events, key=lambda e: e.step)))


def _setting(rng: np.random.Generator, model: str, space: Space) -> Setting:
    method = METHODS[int(rng.integers(len(METHODS)))]
    block_size = int(rng.choice([16, 32]))
    max_num_seqs = int(rng.choice([1, 4, 8, 8, 16, 16]))
    return Setting(
        model=model,
        max_len=space.max_len,
        async_scheduling=method not in SYNCHRONOUS_ONLY and bool(rng.random() < 0.6),
        block_size=block_size,
        spare_blocks=int(rng.choice([0, 1, 3, 8, 400])),
        max_num_seqs=max_num_seqs,
        # vLLM requires room for the drafts of every request.
        max_num_batched_tokens=int(rng.choice([24, 48, 100, 256])) + 8 * max_num_seqs,
        policy=str(rng.choice(["fcfs", "fcfs", "priority"])),
        method=method,
        num_drafts=int(rng.integers(1, 7)),
        adaptive=bool(rng.random() < 0.4),
        kv_cache_dtype="auto",
    )


def _request(
    rng: np.random.Generator,
    index: int,
    arrival: int,
    earlier: Sequence[Request],
    setting: Setting,
    space: Space,
) -> Request:
    length = _length(rng, setting.block_size, space.max_len - 2)
    options = _options(rng, space)
    continues, continued, shared = None, 0, ()
    if earlier and rng.random() < 0.8:
        other = earlier[int(rng.integers(len(earlier)))]
        if rng.random() < 0.35:
            continues, continued = other.index, length
            length = int(rng.integers(1, 20))
        else:
            whole = rng.random() < 0.3
            shared = other.prompt
            if not whole:
                shared = shared[: _length(rng, setting.block_size, len(shared))]
    fresh = rng.integers(1, int(rng.choice([6, space.vocab])), max(length - len(shared), 0))
    return Request(
        index=index,
        arrival=arrival,
        prompt=(*shared, *fresh.tolist()) or (1,),
        continues=continues,
        continued=continued,
        salt=SALTS[int(rng.integers(len(SALTS)))],
        priority=int(rng.integers(0, 3)),
        abort_after=int(rng.integers(0, 40)) if rng.random() < 0.12 else None,
        options=options,
    )


def _length(rng: np.random.Generator, block_size: int, longest: int) -> int:
    """Draws 1 to `longest`; often a block's end or one token beside it."""
    if rng.random() < 0.6:
        length = block_size * int(rng.integers(1, longest // block_size + 2))
        length += int(rng.integers(-1, 2))
    else:
        length = int(longest ** rng.random())
    return min(max(length, 1), longest)


def _options(rng: np.random.Generator, space: Space) -> dict[str, Any]:
    """Draws SamplingParams options: greedy or seeded, so that exactly one text is right."""
    options: dict[str, Any] = {
        "temperature": 0.0,
        "max_tokens": int(rng.integers(1, space.longest_output + 1)),
        "ignore_eos": bool(rng.random() < 0.7),
    }
    if rng.random() < 0.5:
        options["temperature"] = float(rng.choice([0.3, 0.7, 1.0, 1.5]))
        options["seed"] = int(rng.integers(0, 2**32))
        if rng.random() < 0.15:
            options["n"] = int(rng.integers(2, 4))
    for chance, draw_some in ((0.25, _shapes), (0.2, _penalties), (0.25, _constraints)):
        if rng.random() < chance:
            options |= draw_some(rng, space)
    if rng.random() < 0.15:
        options["logprobs"] = int(rng.integers(0, 6))
    if rng.random() < 0.08:
        options["prompt_logprobs"] = int(rng.integers(0, 4))
    return options


def _shapes(rng: np.random.Generator, space: Space) -> dict[str, Any]:
    return {
        "top_k": int(rng.choice([0, 1, 5, 50])),
        "top_p": float(rng.choice([0.5, 0.9, 1.0])),
        "min_p": float(rng.choice([0.0, 0.05])),
    }


def _penalties(rng: np.random.Generator, space: Space) -> dict[str, Any]:
    """Draws penalties; negative ones cause repetition, which lookup drafts predict."""
    return {
        "repetition_penalty": float(rng.choice([0.7, 1.0, 1.3])),
        "frequency_penalty": float(rng.choice([-1.0, 0.0, 0.5])),
        "presence_penalty": float(rng.choice([-1.0, 0.0, 0.5])),
    }


def _constraints(rng: np.random.Generator, space: Space) -> dict[str, Any]:
    some = rng.integers(1, space.vocab, 12).tolist()
    stops = [EOS, *some[:4]]
    drawn: list[dict[str, Any]] = [
        {"logit_bias": {token: float(rng.choice([-3, 5, 12])) for token in some[:5]}},
        {"bad_words": [word(some[0]), f"{word(some[1])} {word(some[2])}"]},
        {"stop_token_ids": stops, "min_tokens": int(rng.integers(0, 2))},
        {"stop": [f" {word(token)} " for token in some]},
        {"allowed_token_ids": some},
    ]
    return drawn[int(rng.integers(len(drawn)))]


#: Named simplifications of a run, for the search for a small failing one.
SIMPLER: dict[str, Callable[[Run], Run]] = {}


def _simpler(name: str) -> Callable[[Callable[[Run], Run]], Callable[[Run], Run]]:
    def keep(change: Callable[[Run], Run]) -> Callable[[Run], Run]:
        SIMPLER[name] = change
        return change

    return keep


def _every_request(run: Run, change: Callable[[Request], Request]) -> Run:
    return replace(run, requests=tuple(change(request) for request in run.requests))


def _drop_options(run: Run, *names: str) -> Run:
    def change(request: Request) -> Request:
        kept = {name: value for name, value in request.options.items() if name not in names}
        return replace(request, options=kept)

    return _every_request(run, change)


@_simpler("events")
def _no_events(run: Run) -> Run:
    return replace(run, events=())


@_simpler("aborts")
def _no_aborts(run: Run) -> Run:
    return _every_request(run, lambda request: replace(request, abort_after=None))


@_simpler("sampling")
def _no_sampling(run: Run) -> Run:
    kept = ("max_tokens", "logprobs", "prompt_logprobs")

    def change(request: Request) -> Request:
        options = {name: request.options[name] for name in kept if name in request.options}
        plain = {"temperature": 0.0, "ignore_eos": True}
        return replace(request, options=plain | options)

    return _every_request(run, change)


@_simpler("logprobs")
def _no_logprobs(run: Run) -> Run:
    return _drop_options(run, "logprobs", "prompt_logprobs")


@_simpler("speculation")
def _no_speculation(run: Run) -> Run:
    return replace(run, setting=replace(run.setting, method=None, lookup=False))


@_simpler("lookup")
def _no_lookup(run: Run) -> Run:
    return replace(run, setting=replace(run.setting, lookup=False))


@_simpler("async")
def _no_async(run: Run) -> Run:
    return replace(run, setting=replace(run.setting, async_scheduling=False))


@_simpler("process")
def _no_process(run: Run) -> Run:
    return replace(run, setting=replace(run.setting, apart=False))


@_simpler("second")
def _no_second(run: Run) -> Run:
    return replace(run, setting=replace(run.setting, second=False))


@_simpler("codes")
def _no_codes(run: Run) -> Run:
    return replace(run, setting=replace(run.setting, kv_cache_dtype="auto"))


@_simpler("pressure")
def _no_pressure(run: Run) -> Run:
    return replace(run, setting=replace(run.setting, spare_blocks=400, policy="fcfs"))


@_simpler("chunks")
def _no_chunks(run: Run) -> Run:
    return replace(run, setting=replace(run.setting, max_num_batched_tokens=2048))


@_simpler("salts")
def _no_salts(run: Run) -> Run:
    return _every_request(run, lambda request: replace(request, salt=None))


@_simpler("continuations")
def _no_continuations(run: Run) -> Run:
    return _every_request(run, lambda request: replace(request, continues=None))


def cut(run: Run, only: Sequence[int] | None, without: Sequence[str]) -> Run:
    """Returns `run` with the requests `only` (None: all), without the SIMPLER features."""
    for name in without:
        run = SIMPLER[name](run)
    if only is None:
        return run
    return replace(run, requests=tuple(r for r in run.requests if r.index in only))
