# SPDX-License-Identifier: Apache-2.0
"""Measures memory for budget.py, and sets MLX's memory limits from the resulting budget.

`vllm_metal.engine.memory.wiring` decides what is wired. Metal also limits the number of buffers
(`resource_limit` of `mx.device_info`, 499000 on every known Mac); the pool has two arrays per
layer, or four if quantized, and the limit of MLX's cache bounds the number of other buffers.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import mlx.core as mx
from vllm.logger import init_logger

from metal_kernels.op_common import QUANTIZED_DTYPES
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

#: Freed buffers that MLX may keep for reuse. Its own limits are 1.5 times the working set on Metal,
#: which would crowd out the pool, and 32 MiB on a CPU. A 64th of the working set (171 MiB on a Mac
#: with 16 GB) holds what decode steps reuse. On Metal MLX may also keep what is reserved for a full
#: step: it returns it before the budget would be exceeded.
METAL_CACHE_SHARE = 1 / 64
CPU_CACHE = 32 * 2**20
#: Peaks are rounded up to a multiple of this: how far MLX runs ahead of the device depends on
#: timing, and the same model should get the same pool at every start.
ROUNDING = 16 * 2**20
#: Sampled tokens that are measured; more are extrapolated linearly.
SAMPLED_ROWS = 8
#: Tokens per block, for ratios of bytes that do not depend on it: vLLM's default.
_BLOCK = 16
#: int32 count of a token of a request, for penalties (sample.penalties).
COUNT_BYTES = 4

SOURCES: dict[Device, str] = {
    "metal": "working set that Metal recommends",
    "cpu": "memory of this machine",
}


@dataclass(frozen=True)
class AdapterBytes:
    """Maximum bytes of LoRA adapters."""

    slots: int  # allocated with the weights
    cached: int  # adapters cached besides the slots, not allocated yet


class MemoryPlanner:
    """Plans a process's memory on a device, from before its model is loaded until it ends."""

    # `share`: this process's part if other engines use the device, too; None: all of it.
    def __init__(self, kind: Device, share: Share | None = None) -> None:
        self._kind = kind
        self._source = SOURCES[kind] + (share.words if share else "")
        # Read before loading: once the model is loaded, macOS counts its pages as wired or not
        # depending on the GPU's work, so other programs' memory can no longer be told apart.
        before = mlx_device.memory(kind)
        self._before = share.part(before) if share else before
        self._cache = cache_limit(kind, self._before.total)
        self._other_engines = self._before.active  # held by other engines of this process
        self._cache_before = mx.set_cache_limit(self._cache)
        self._limit_before: int | None = None
        self.limit: int | None = None  # MLX's memory limit in bytes once the pool's size is known
        self.most_drafts: int | None = None  # drafts per step; None: unlimited

    def pool_size(
        self,
        config: VllmConfig,
        needs: Needs,  # needs of this process's layers
        draft_weights: int,  # bytes of the loaded weights that belong to the draft network
        quantized: float | None,  # relative size of a quantized cache; None: it is one
        calls: LargestCalls,
        forward: Callable[[], None],  # runs the largest forward pass
        # Given a number of drafts, returns what runs steps of the requests of `profile.drafted`
        # once their pool exists; only called for models with recurrent layers.
        requests: Callable[[int], Callable[[], None]],
        transfer_bytes: int = 0,  # staging of K/V transfers, not allocated yet
        adapters: AdapterBytes | None = None,
        image_bytes: int = 0,  # cached image embeddings and the tower's peak
    ) -> int:
        """Returns the KV pool's size in bytes; call it while only the networks are loaded.

        Raises BudgetError: the pool would not hold one request of max_model_len.
        """
        settings = settings_of(config, self._kind, needs, self._before.total)
        request = Request(needs, quantized)
        measured = replace(
            self._at_rest(draft_weights, adapters),
            transfers=transfer_bytes,
            images=_round_up(image_bytes),
        )
        if settings.asked is not None:
            advice.check(measured, settings, request)
            self._warn_if_large(measured, settings)
            self._limit_mlx(measured.total - budget.margin(measured.total))
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
        self._limit_mlx(self._other_engines + budget.room(measured, settings))
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
        # On a CPU, waiting doubles a step's time, and MLX runs only a few operations ahead.
        waiting = self._kind == "metal"
        peaks = Peaks(peak_of(forward, waiting))
        if calls.keeps_states:
            _, most = calls.drafted
            undrafted, drafted = (peak_of(requests(drafts), waiting) for drafts in (0, most))
            peaks = replace(peaks, requests=undrafted, drafts=drafted)
        return peaks

    def without_pool(self, config: VllmConfig, forward: Callable[[], None]) -> None:
        """Logs the budget of an engine without K/V and limits MLX's memory accordingly.

        `forward` runs the largest forward pass. Raises BudgetError if steps do not fit.
        """
        scheduler, model = config.scheduler_config, config.model_config
        settings = Settings(
            utilization=config.cache_config.gpu_memory_utilization,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            max_num_seqs=scheduler.max_num_seqs,
            max_model_len=model.max_model_len,
        )
        peak = _round_up(peak_of(forward, waiting=self._kind == "metal"))
        measured = replace(self._at_rest(0, None), forward=peak)
        found = replace(budget.budget_of(measured, settings), result="left: there is no KV pool")
        if found.left < 0:
            raise advice.BudgetError(
                f"a step of {settings.max_num_batched_tokens} tokens does not "
                f"fit:\n{found.table()}\nLower --max-num-batched-tokens (or --max-model-len, "
                "if it sets the former), or close other programs"
            )
        logger.info("Memory:\n%s", found.table())
        self._limit_mlx(self._other_engines + budget.room(measured, settings))
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
            adapters=slots + (adapters.cached if adapters else 0),
            cache=self._cache,
        )

    def _limit_mlx(self, nbytes: int) -> None:
        # At this limit MLX waits for the device and frees cached buffers instead of allocating.
        self.limit = nbytes
        before = mx.set_memory_limit(nbytes)
        if self._limit_before is None:
            self._limit_before = before

    def _warn_if_large(self, measured: Measured, settings: Settings) -> None:
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
        """Raises RuntimeError if memory that was released before is no longer available.

        On a CPU, over-allocation is only noticed by the system, which kills the process.
        """
        available = mlx_device.memory(self._kind).available
        if nbytes > available:
            raise RuntimeError(
                f"waking up takes {nbytes / budget.GIB:.2f} GiB, but only "
                f"{available / budget.GIB:.2f} GiB are free: close other programs, then try "
                "again"
            )

    def release(self) -> None:
        """Restores MLX's limits and returns its cached buffers to the system."""
        mx.set_cache_limit(self._cache_before)
        if self._limit_before is not None:
            mx.set_memory_limit(self._limit_before)
        mx.clear_cache()


def cache_limit(kind: Device, total: int) -> int:
    """Bytes of freed buffers that MLX may keep on a device with `total` usable bytes."""
    return CPU_CACHE if kind == "cpu" else int(total * METAL_CACHE_SHARE)


def at_work(
    measured: Measured, settings: Settings, request: Request, calls: LargestCalls, peaks: Peaks
) -> Measured:
    """Adds the peaks of steps to `measured`; runs `calls` for those that `peaks` lacks."""
    measured = replace(
        measured,
        forward=_round_up(peaks.forward),
        sampling=_sampling(calls),
        logits=calls.most_sampled * calls.vocab_size * calls.logit_bytes,
        counts=settings.max_num_seqs * calls.vocab_size * COUNT_BYTES,
        states=calls.step_states(peaks, settings.max_num_batched_tokens),
    )
    if (attention := calls.attention) is None:
        return measured
    # Longest context that fits into the pool at all; if none does, `check` rejects it afterwards.
    context = max(budget.longest(measured, settings, request), 1)
    return replace(measured, attention=_round_up(peak_of(lambda: attention(context))))


def _sampling(calls: LargestCalls) -> int:
    """Extrapolates the peak of sampling from a few rows."""
    if (sampling := calls.sampling) is None:
        return 0
    at_once = min(rows_at_once(calls.vocab_size), calls.most_sampled)
    rows = min(SAMPLED_ROWS, at_once)
    return _round_up(-(-peak_of(lambda: sampling(rows)) * at_once // rows))


def peak_of(run: Callable[[], None], waiting: bool = True) -> int:
    """Peak bytes of `run` above the current memory, excluding cached buffers.

    With `waiting`, MLX waits for each operation, which gives the smallest peak. Otherwise it may be
    hundreds of operations ahead of the device, holding all their outputs, and waits only at its
    memory limit (`MemoryPlanner._limit_mlx`); so the smallest peak is what a step needs.
    """
    mx.synchronize()
    collects = gc.isenabled()
    gc.disable()  # memory that older objects free meanwhile would hide as much of the peak
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


def _round_up(nbytes: int) -> int:
    return -(-nbytes // ROUNDING) * ROUNDING


def quantized_share(layers: Sequence[StatefulLayer], dtype: mx.Dtype) -> float | None:
    """Ratio of a quantized KV cache's bytes to one of `dtype`; None if `dtype` is quantized.

    Blocks of layers with other state than K/V have the same size in both caches.
    """
    if dtype in QUANTIZED_DTYPES:
        return None
    now, then = (
        sum(layer.spec(_BLOCK, elements).page_size_bytes for layer in layers)
        for elements in (dtype, mx.int8)
    )
    return then / now
