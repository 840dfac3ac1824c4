# SPDX-License-Identifier: Apache-2.0
"""Measures what a model needs for budget.py's sum, and holds MLX to it.

`vllm_metal.engine.memory.wiring` says what is wired. Metal also limits the number of buffers
(`resource_limit` of `mx.device_info`, 499000 on every Mac known); the pool is two arrays a layer,
four if quantized, and the rest of a step is bounded with the bytes of MLX's cache.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import mlx.core as mx
from vllm.logger import init_logger

from metal_kernels.op_common import CODE_DTYPES
from vllm_metal.device import mlx_device
from vllm_metal.engine.memory import advice, budget
from vllm_metal.engine.memory.budget import Measured, Request, Settings
from vllm_metal.engine.memory.needs import Needs
from vllm_metal.engine.memory.pool_limits import settings_of
from vllm_metal.engine.memory.profile import LargestCalls, Peaks
from vllm_metal.engine.memory.share import Share
from vllm_metal.engine.sample import rows_at_once
from vllm_metal.settings.envs import Device

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_metal.engine.kv_cache.stateful_layer import StatefulLayer

logger = init_logger(__name__)

#: Freed buffers that MLX may keep to use again. Its own limits are 1.5 times the working set on
#: Metal, where they would crowd out the pool, and 32 MiB on a CPU. A 64th of the working set (171
#: MiB on a Mac of 16 GB) holds what a decode step uses, again and again. On Metal what is set aside
#: for a full step may stay with MLX as well: it is given back where the sum would be exceeded.
METAL_CACHE_SHARE = 1 / 64
CPU_CACHE = 32 * 2**20
#: Peaks are rounded up to a multiple of this: MLX runs ahead of the device by as much as timing
#: allows, and the same model should get the same pool at every start.
ROUNDING = 16 * 2**20
#: Rows of sampling that are measured; the rest is in proportion.
SAMPLED_ROWS = 8
#: Tokens of a block, for ratios of bytes in which it has no part: vLLM's default.
_BLOCK = 16
#: A request's count of a token, for penalties (sample.penalties): int32.
COUNT_BYTES = 4

SOURCES: dict[Device, str] = {
    "metal": "working set that Metal recommends",
    "cpu": "memory of this machine",
}


@dataclass(frozen=True)
class AdapterBytes:
    """What LoRA adapters take at most."""

    slots: int  # allocated with the weights
    kept: int  # of adapters beside them, not allocated yet


class MemoryPlanner:
    """A process's share of a device, from before its model is loaded until it is gone."""

    def __init__(self, kind: Device, share: Share | None = None) -> None:
        """Looks at the device.

        Args:
            kind: of it.
            share: which the process has of it, with other engines; None: all.
        """
        self._kind = kind
        self._source = SOURCES[kind] + (share.words if share else "")
        # Others have what they have now: once the model is loaded, macOS counts its pages as wired
        # or not as the GPU's work goes, and no figure says which.
        before = mlx_device.memory(kind)
        self._before = share.part(before) if share else before
        self._cache = cache_limit(kind, self._before.total)
        self._other_engines = self._before.active  # by other engines of this process
        self._cache_before = mx.set_cache_limit(self._cache)
        self._limit_before: int | None = None
        self.limit: int | None = None  # bytes that MLX is held to, once the pool's size is known
        self.most_drafts: int | None = None  # of a step, where layers keep states

    def pool_size(
        self,
        config: VllmConfig,
        needs: Needs,
        draft_weights: int,
        quantized: float | None,
        calls: LargestCalls,
        forward: Callable[[], None],
        requests: Callable[[int], Callable[[], None]],
        transfer_bytes: int = 0,
        adapters: AdapterBytes | None = None,
        image_bytes: int = 0,
    ) -> int:
        """Bytes for the KV pool; measures with the networks loaded and nothing else.

        Args:
            config: vLLM's.
            needs: of a pool for the layers of this process.
            draft_weights: bytes of what is loaded that are the draft network's.
            quantized: share of its bytes that a quantized cache would take; None: it is one.
            calls: of the model.
            forward: runs its largest forward pass.
            requests: gives what runs steps of the requests of `profile.drafted` with so many
                drafts, once their pool is there; asked where layers keep states.
            transfer_bytes: of staging for K/V transfers, not allocated yet; 0: there are none.
            adapters: of LoRA; None: none are served.
            image_bytes: of embeddings of images and of their tower at work; 0: there is none.

        Raises:
            BudgetError: it would not hold one request of max_model_len.
        """
        settings = settings_of(config, self._kind, needs, self._before.total)
        request = Request(needs, quantized)
        measured = replace(
            self._at_rest(draft_weights, adapters),
            transfers=transfer_bytes,
            images=_rounded(image_bytes),
        )
        if settings.asked is not None:
            advice.check(measured, settings, request)
            self._warn_of_much(measured, settings)
            self._hold_to(measured.total - budget.margin(measured.total))
            return settings.asked.nbytes
        peaks = self._peaks(calls, forward, requests)
        measured = at_work(measured, settings, request, calls, peaks)
        found = advice.check(measured, settings, request)
        logger.info("Memory for the KV cache:\n%s", found.table())
        length = budget.longest(measured, settings, request)
        if settings.fitted and length < settings.max_model_len:
            logger.info(
                "The context is limited to %d tokens, the most that fit; the model supports "
                "%d. docs/memory.md lists the flags that raise it",
                length,
                settings.max_model_len,
            )
        self._hold_to(self._other_engines + budget.room(measured, settings))
        self.most_drafts = budget.most_drafts(measured, settings)
        if self._kind == "metal":
            states = budget.set_aside_for_states(measured, settings, found.left)
            mx.set_cache_limit(self._cache + budget.peak_of_a_step(measured) + states)
        return found.left

    def _peaks(
        self,
        calls: LargestCalls,
        forward: Callable[[], None],
        requests: Callable[[int], Callable[[], None]],
    ) -> Peaks:
        """Runs the largest steps; see `pool_size`."""
        # On a CPU, waiting makes a step twice as slow, and MLX is few operations ahead.
        waiting = self._kind == "metal"
        peaks = Peaks(peak_of(forward, waiting))
        if calls.keeps_states:
            _, most = calls.drafted
            without, drafting = (peak_of(requests(drafts), waiting) for drafts in (0, most))
            peaks = replace(peaks, requests=without, drafts=drafting)
        return peaks

    def without_pool(self, config: VllmConfig, forward: Callable[[], None]) -> None:
        """Logs the sum of an engine that keeps no K/V, and holds MLX to it.

        Args:
            config: vLLM's.
            forward: runs its largest forward pass.

        Raises:
            BudgetError: steps do not fit.
        """
        scheduler, model = config.scheduler_config, config.model_config
        settings = Settings(
            utilization=config.cache_config.gpu_memory_utilization,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            max_num_seqs=scheduler.max_num_seqs,
            max_model_len=model.max_model_len,
        )
        peak = _rounded(peak_of(forward, waiting=self._kind == "metal"))
        measured = replace(self._at_rest(0, None), forward=peak)
        found = replace(budget.budget_of(measured, settings), result="left: there is no KV pool")
        if found.left < 0:
            raise advice.BudgetError(
                f"a step of {settings.max_num_batched_tokens} tokens does not "
                f"fit:\n{found.table()}\nLower --max-num-batched-tokens (or --max-model-len, "
                "if it sets the former), or close other programs"
            )
        logger.info("Memory:\n%s", found.table())
        self._hold_to(self._other_engines + budget.room(measured, settings))
        if self._kind == "metal":
            mx.set_cache_limit(self._cache + peak)

    def _at_rest(self, draft_weights: int, adapters: AdapterBytes | None) -> Measured:
        mx.clear_cache()
        total = self._before.total
        slots = adapters.slots if adapters else 0
        return Measured(
            source=self._source,
            total=total,
            other_engines=self._other_engines,
            in_use=max(total - self._before.available, 0),
            weights=mx.get_active_memory() - self._other_engines - draft_weights - slots,
            draft_weights=draft_weights,
            adapters=slots + (adapters.kept if adapters else 0),
            cache=self._cache,
        )

    def _hold_to(self, nbytes: int) -> None:
        """Has MLX wait for the device, and give buffers back, rather than hold more than this."""
        self.limit = nbytes
        before = mx.set_memory_limit(nbytes)
        if self._limit_before is None:
            self._limit_before = before

    def _warn_of_much(self, measured: Measured, settings: Settings) -> None:
        share = budget.budget_of(measured, replace(settings, asked=None, most=None))
        assert settings.asked is not None
        if settings.asked.nbytes > share.left:
            logger.warning(
                "%s=%d is used as given, but it exceeds the free memory:\n%s",
                settings.asked.setting,
                settings.asked.count,
                share.table(),
            )

    def check_room(self, nbytes: int) -> None:
        """Checks that so much can be had that was given back before.

        On a CPU, memory that is not there is found out by the system, which ends a process for it.

        Raises:
            RuntimeError: it cannot.
        """
        available = mlx_device.memory(self._kind).available
        if nbytes > available:
            raise RuntimeError(
                f"waking up takes {nbytes / budget.GIB:.2f} GiB, but only "
                f"{available / budget.GIB:.2f} GiB are free: close other programs, then try "
                "again"
            )

    def release(self) -> None:
        """Puts MLX's limits back, and gives its spare buffers to the system."""
        mx.set_cache_limit(self._cache_before)
        if self._limit_before is not None:
            mx.set_memory_limit(self._limit_before)
        mx.clear_cache()


def cache_limit(kind: Device, total: int) -> int:
    """Bytes of freed buffers that MLX may keep, of `total` that the device may use."""
    return CPU_CACHE if kind == "cpu" else int(total * METAL_CACHE_SHARE)


def at_work(
    measured: Measured, settings: Settings, request: Request, calls: LargestCalls, peaks: Peaks
) -> Measured:
    """`measured` at rest, and what steps take.

    Args:
        measured: a device with the networks on it, at rest.
        settings, request: of the engine.
        calls: are run and measured here.
        peaks: of the largest forward passes.
    """
    measured = replace(
        measured,
        forward=_rounded(peaks.forward),
        sampling=_sampling(calls),
        logits=calls.most_sampled * calls.vocab_size * calls.logit_bytes,
        counts=settings.max_num_seqs * calls.vocab_size * COUNT_BYTES,
        states=calls.step_states(peaks, settings.max_num_batched_tokens),
    )
    if (attention := calls.attention) is None:
        return measured
    # Of contexts that the pool has room for at all; where there is none, all is lost anyway.
    context = max(budget.longest(measured, settings, request), 1)
    return replace(measured, attention=_rounded(peak_of(lambda: attention(context))))


def _sampling(calls: LargestCalls) -> int:
    """What sampling takes at most; it is measured of a few rows."""
    if (sampling := calls.sampling) is None:
        return 0
    at_once = min(rows_at_once(calls.vocab_size), calls.most_sampled)
    rows = min(SAMPLED_ROWS, at_once)
    return _rounded(-(-peak_of(lambda: sampling(rows)) * at_once // rows))


def peak_of(run: Callable[[], None], waiting: bool = True) -> int:
    """What `run` takes above what there is, in bytes, cached buffers aside.

    Args:
        run: to be measured.
        waiting: whether MLX waits for each operation. It may be hundreds of them ahead of the
            device, with the memory of all their outputs, and waits only where its limit is
            reached (`MemoryPlanner._hold_to`). So the least it can do with is what counts.
    """
    mx.synchronize()
    collects = gc.isenabled()
    gc.disable()  # what earlier objects give back meanwhile would hide as much of the peak
    before = mx.get_active_memory()
    limit = mx.set_memory_limit(0) if waiting else None
    mx.reset_peak_memory()
    try:
        run()
    finally:
        if limit is not None:
            mx.set_memory_limit(limit)
        if collects:
            gc.enable()
    mx.clear_cache()
    return max(mx.get_peak_memory() - before, 0)


def _rounded(nbytes: int) -> int:
    return -(-nbytes // ROUNDING) * ROUNDING


def quantized_share(layers: Sequence[StatefulLayer], dtype: mx.Dtype) -> float | None:
    """What a quantized cache would take of a pool with elements of `dtype`; None: it is one.

    Of layers that keep other state than K/V, a block takes as much in either.
    """
    if dtype in CODE_DTYPES:
        return None
    now, then = (
        sum(layer.spec(_BLOCK, elements).page_size_bytes for layer in layers)
        for elements in (dtype, mx.int8)
    )
    return then / now
