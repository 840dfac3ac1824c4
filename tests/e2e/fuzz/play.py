# SPDX-License-Identifier: Apache-2.0
"""Plays a run on the real engine step by step, and records the results."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from e2e.fuzz.models import NUM_STATE_GROUPS, WINDOW
from e2e.fuzz.traffic import KEPT_TENANT, NETWORKS, Event, Request, Run, Setting
from e2e.harness import counters, engine
from vllm import SamplingParams, TokensPrompt
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.engine.llm_engine import LLMEngine

from vllm_metal.settings import salts

#: Maximum steps without a token. The longest valid wait is a prompt of max_model_len in the
#: smallest chunks, restarted as often as preemption allows.
MOST_STEPS_WITHOUT_A_TOKEN = 400
#: Beside a disk, an engine keeps stepping while it waits.
MOST_SECONDS_WITHOUT_A_TOKEN = 60.0
#: Seconds until an engine in its own process must know of the last request's end.
_MOST_SECONDS_UNTIL_FREE = 60.0
_BYTES_OF_POOL = 8 << 20  # overridden by the number of blocks
#: Variables for an engine in its own process, which inherits none of this one's.
_APART = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}


@dataclass(frozen=True)
class Disk:
    """A disk prefix cache. `key`: key of the server's salts, see `Disk.salt`."""

    folder: Path
    max_bytes: int
    key: Path

    def options(self) -> dict[str, Any]:
        """Options of --additional-config."""
        return {
            "prefix_cache_dir": str(self.folder),
            "prefix_cache_bytes": self.max_bytes,
            "prefix_cache_salt_key": str(self.key),
        }

    def salt(self, tenant: str | None) -> str | None:
        """Returns a tenant's `cache_salt`."""
        return salts.derive(self.key.read_bytes().strip(), tenant) if keeps(tenant) else tenant


def keeps(tenant: str | None) -> bool:
    """Returns whether a tenant has a salt of the server, so that its blocks are stored on disk."""
    return tenant == KEPT_TENANT


class Stuck(AssertionError):
    """The engine keeps stepping without output."""


class Leak(AssertionError):
    """Resources of finished requests are still held."""


@dataclass
class Served:
    """A served request.

    prompt: as sent. samples: newest output by index among its n. cached: prompt tokens
    taken from the prefix cache, as the engine reports. added, ended: steps; ended is None for
    an unfinished request. aborted: by this player.
    """

    request: Request
    prompt: list[int]
    added: int
    samples: dict[int, CompletionOutput] = field(default_factory=dict)
    prompt_logprobs: Sequence[Any] | None = None
    cached: int | None = None
    ended: int | None = None
    aborted: bool = False

    @property
    def num_samples(self) -> int:
        return int(self.request.options.get("n", 1))

    def text(self) -> list[int]:
        """Prompt and text generated so far, for the first sample."""
        first = self.samples.get(0)
        return [*self.prompt, *(first.token_ids if first else ())]


@dataclass(frozen=True)
class Outcome:
    """The results of a run.

    served: in arrival order. resets: steps at which all prefixes were cleared. counters:
    see harness.counters.
    """

    served: tuple[Served, ...]
    resets: tuple[int, ...]
    counters: Mapping[str, float]


def play(run: Run, models: Path, disk: Disk | None = None) -> Outcome:
    """Serves the run's requests until the engine is idle.

    Args:
        run: the plan.
        models: parent folder of the models.
        disk: disk cache to keep prefixes for the next engine.

    Raises:
        Stuck: the engine makes no progress.
        Leak: it holds blocks or requests after all have ended.
        Exception: any exception of the engine.
    """
    options, model = _options(run, models), models / run.setting.model
    if disk is not None:
        options["additional_config"] |= disk.options()
    variables = {"VLLM_USE_V2_MODEL_RUNNER": str(int(run.setting.second))}
    variables |= _APART if run.setting.apart else {}
    with mock.patch.dict(os.environ, variables), engine(str(model), **options) as llm:
        assert llm.llm_engine.vllm_config.use_v2_model_runner == run.setting.second
        player = _Player(llm.llm_engine, run, disk)
        player.play()
        player.check_nothing_is_held()
        return Outcome(tuple(player.served.values()), tuple(player.resets), counters(llm))


def _options(run: Run, models: Path) -> dict[str, Any]:
    setting = run.setting
    options: dict[str, Any] = {
        "max_model_len": setting.max_len,
        "async_scheduling": setting.async_scheduling,
        # The worker decides it, so do not read the default.
        "block_size": None if setting.apart and setting.block_size == 16 else setting.block_size,
        "num_gpu_blocks_override": _blocks_of_one(setting) + setting.spare_blocks,
        "kv_cache_memory_bytes": _BYTES_OF_POOL,
        "max_num_seqs": setting.max_num_seqs,
        "max_num_batched_tokens": setting.max_num_batched_tokens,
        "scheduling_policy": setting.policy,
        "kv_cache_dtype": setting.kv_cache_dtype,
        "enable_sleep_mode": any(event.kind.startswith("sleep") for event in run.events),
        # A time bound would make a seed's steps irreproducible.
        "additional_config": {"fixed_draft_length": not setting.adaptive, "max_step_ms": None},
    }
    if setting.method is not None:
        speculation = {"method": setting.method, "num_speculative_tokens": setting.num_drafts}
        if setting.method == "ngram":
            speculation |= {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
        if (ending := NETWORKS.get(setting.method)) is not None:
            speculation["model"] = str(models / f"{setting.model}-{ending}")
            options["additional_config"]["prompt_lookup"] = setting.lookup
        options["speculative_config"] = speculation
    return options


def _blocks_of_one(setting: Setting) -> int:
    """Returns the blocks of a max_model_len request in all groups, and the null block."""
    rows = setting.max_len + (setting.num_drafts if setting.method else 0)
    blocks = -(-rows // setting.block_tokens) + 1
    if setting.model == "windowed":  # two more groups, which also hold what a step looks back on
        in_flight = setting.max_num_batched_tokens * (1 + setting.async_scheduling)
        lag = min(WINDOW - 1 + in_flight, rows)
        blocks += 2 * (-(-lag // setting.block_size) + 1)
    # For states: one before and one after the step; a hit adds the block that it is in.
    return blocks + 3 * NUM_STATE_GROUPS.get(setting.model, 0)


class _Core:
    """Scheduler and pool of an in-process engine."""

    def __init__(self, llm_engine: LLMEngine) -> None:
        self._core: Any = llm_engine.engine_core.engine_core
        self._pool = self._core.scheduler.kv_cache_manager.block_pool
        self._free_blocks = self._pool.get_num_free_blocks()

    def busy(self) -> bool:
        """Returns whether there is work besides unanswered requests."""
        return self._core.scheduler.has_requests() or bool(self._core.batch_queue)

    def check_nothing_is_held(self) -> None:
        """Raises Leak unless the pool is restored and no request is known."""
        free, expected = self._pool.get_num_free_blocks(), self._free_blocks
        if free != expected:
            raise Leak(f"{expected - free} of {expected} blocks were never freed")
        held = [b.block_id for b in self._pool.blocks if b.ref_cnt and not b.is_null]
        if held:
            raise Leak(f"free blocks {held} still count references")
        if remembered := list(self._core.scheduler.requests):
            raise Leak(f"the scheduler still knows requests {remembered}")


class _CoreApart:
    """The same for an engine in its own process, which steps by itself."""

    def __init__(self, llm_engine: LLMEngine) -> None:
        self._engine = llm_engine

    def busy(self) -> bool:
        return False

    def check_nothing_is_held(self) -> None:
        """Raises Leak if prefixes cannot be cleared, which requires that no block is held."""
        deadline = time.monotonic() + _MOST_SECONDS_UNTIL_FREE
        while not self._engine.reset_prefix_cache():
            if time.monotonic() > deadline:
                raise Leak("blocks were never freed")
            time.sleep(0.01)


class _Player:
    def __init__(self, llm_engine: LLMEngine, run: Run, disk: Disk | None) -> None:
        self.served: dict[int, Served] = {}
        self.resets: list[int] = []
        self._engine, self._run, self._disk = llm_engine, run, disk
        self._core = _CoreApart(llm_engine) if run.setting.apart else _Core(llm_engine)
        self._step = 0

    def play(self) -> None:
        """Plays until every request has ended."""
        arrivals = list(self._run.requests)
        events = list(self._run.events)
        idle_since, newest = 0, time.monotonic()
        while arrivals or events or self._busy():
            if not self._busy():  # idle: advance to the next event
                self._step = max(self._step, min(x.arrival for x in arrivals) if arrivals else 0)
                self._step = max(self._step, min(x.step for x in events)) if events else self._step
            while events and events[0].step <= self._step:
                self._happen(events.pop(0))
            while arrivals and arrivals[0].arrival <= self._step:
                self._add(arrivals.pop(0))
            self._abort()
            outputs = self._engine.step() if self._busy() else []  # otherwise it would wait forever
            self._step += 1
            if outputs or not self._busy():
                idle_since, newest = self._step, time.monotonic()
            waits = self._disk is None or time.monotonic() - newest > MOST_SECONDS_WITHOUT_A_TOKEN
            if waits and self._step - idle_since > MOST_STEPS_WITHOUT_A_TOKEN:
                raise Stuck(f"no token in {self._step - idle_since} steps")
            for output in outputs:
                self._take(output)

    def check_nothing_is_held(self) -> None:
        """Raises Leak unless the pool is restored and no request is known."""
        self._core.check_nothing_is_held()
        never = [s.request.index for s in self.served.values() if s.ended is None]
        if never:
            raise Leak(f"requests {never} are neither finished nor aborted")

    def _busy(self) -> bool:
        """Returns whether the engine has work, including messages to the worker."""
        return self._engine.has_unfinished_requests() or self._core.busy()

    def _happen(self, event: Event) -> None:
        if event.kind.startswith("reset"):
            if self._engine.reset_prefix_cache(event.kind == "reset_running"):
                self.resets.append(self._step)
            return
        self._engine.sleep(int(event.kind.removeprefix("sleep")), mode="keep")
        self._engine.wake_up()
        self.resets.append(self._step)

    def _add(self, request: Request) -> None:
        prompt = list(request.prompt)
        before = self.served.get(request.continues) if request.continues is not None else None
        if before is not None:
            room = self._run.setting.max_len - 2 - len(prompt)
            prompt = before.text()[: min(request.continued, max(room, 0))] + prompt
        served = self.served[request.index] = Served(request, prompt, self._step)
        salt = {"cache_salt": request.salt} if request.salt else {}
        if salt and self._disk is not None:
            salt["cache_salt"] = self._disk.salt(request.salt)
        self._engine.add_request(
            str(request.index),
            TokensPrompt(prompt_token_ids=served.prompt, **salt),
            SamplingParams(**request.options),
            priority=request.priority if self._run.setting.policy == "priority" else 0,
        )

    def _abort(self) -> None:
        for served in self.served.values():
            after = served.request.abort_after
            if served.ended is None and after is not None and self._step >= served.added + after:
                self._engine.abort_request([str(served.request.index)])
                served.ended, served.aborted = self._step, True

    def _take(self, output: RequestOutput) -> None:
        served = self.served[int(output.request_id)]
        served.cached = output.num_cached_tokens
        served.prompt_logprobs = output.prompt_logprobs or served.prompt_logprobs
        for sample in output.outputs:
            served.samples[sample.index] = sample
        finished = [s for s in served.samples.values() if s.finish_reason is not None]
        if len(finished) == served.num_samples and not served.aborted:
            served.ended = self._step
