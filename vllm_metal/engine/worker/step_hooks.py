# SPDX-License-Identifier: Apache-2.0
"""Hooks around each step, which do nothing unless K/V moves to other memory or machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import mlx.core as mx
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput

    from vllm_metal.engine.models.paged_layers import PagedLayers
    from vllm_metal.patches.vllm_patches.step_result import Metrics


class HookedRunner(Protocol):
    """The runner's methods that hooks may call."""

    @property
    def layers(self) -> PagedLayers:
        """The target's layers over the pool."""
        ...

    def join_step(self, arrays: Sequence[mx.array]) -> None:
        """Adds arrays for the device to compute with the step that is being built."""
        ...

    def complete_draft_kv(self, ends: Mapping[str, int]) -> None:
        """Writes missing draft K/V and recurrent states; `ends`: request id to number of tokens."""
        ...


class StepHooks:
    """Hooks around each step that do nothing; K/V transfers override those they need.

    They run on the engine's thread. None may hold an array of the pool beyond the call, since MLX
    copies a whole pool that is written while something else holds it. If a call raises, or an
    array it made cannot be computed, the step fails.
    """

    def pool_made(self, runner: HookedRunner) -> None:
        """Called when there is a new, empty pool.

        Args:
            runner: uses that pool. Release it in `before_pool_goes`, or the pool stays in memory
                beside the next one.
        """

    def before_pool_goes(self, lost: bool) -> None:
        """Called before the pool is dropped; must not raise.

        Transfers that read or write the pool must have ended when this returns.

        Args:
            lost: a step failed, and the pool's content is undefined. Otherwise the engine sleeps,
                loads other weights or ends, and the device has finished all steps.
        """

    def before_step(self, scheduler_output: SchedulerOutput, pool_valid: bool) -> None:
        """Called with a new scheduler output, before it changes any requests or blocks.

        This is the last moment to copy out blocks that the step clears or gives to other requests.
        With speculation, the host has read the tokens of the step before.

        Args:
            scheduler_output: the step's, which may have nothing scheduled.
            pool_valid: whether the pool holds what the scheduler assumes. False until a failed
                step is reported to the scheduler; the step is then skipped.
        """

    def before_forward(self) -> None:
        """Called after requests are updated, and the step's blocks are cleared and copied.

        This is the moment to copy blocks in. Not called if the pool was lost before.
        """

    def before_submit(self) -> None:
        """Called when the step's forward is built, just before it is submitted.

        This is the moment to copy out blocks that earlier steps completed, by the runner's
        `join_step`. Not called if nothing is scheduled, nor after a failure.
        """

    def after_step(self, computed: bool) -> KVConnectorOutput | None:
        """Called when the step was submitted, has failed, or had nothing scheduled.

        A submitted step may still fail, see `steps_computed`.

        Args:
            computed: whether the pool holds what the scheduler assumes, this step included. False
                if the step failed, or is skipped until a failed one is reported to the scheduler.

        Returns:
            The transfers to report to the scheduler, with this step's result even if the step
            fails. If this call raises they are lost: report them after the next step.
        """
        return None

    def metrics(self) -> Metrics:
        """Metrics of transfers since the last call; called after `after_step`."""
        return {}

    def steps_computed(self, num_left: int) -> None:
        """Called when the device has computed submitted steps without an error.

        Copies that a step made of pool blocks may be stored only after this call. If the pool is
        lost, `before_pool_goes` is called instead.

        Args:
            num_left: number of newest submitted steps that may still fail; all before them are
                computed.
        """


#: Hooks that do nothing.
NO_HOOKS = StepHooks()


class Transfers(Protocol):
    """Moves K/V between the pool and other memory or machines. The platform hands it to workers."""

    @property
    def hooks(self) -> StepHooks:
        """The hooks to call around each step."""
        ...

    @property
    def memory_bytes(self) -> int:
        """Maximum bytes that the transfers take."""
        ...

    def weights_loaded(self) -> None:
        """Records digests of the weights that were just read, as the files may change later."""
        ...

    def open(self, kv_cache_config: KVCacheConfig, pool: str) -> None:
        """Opens the configured stores; `pool`: MLX's "scatter" or our "kernels" write to it."""
        ...

    def handshake(self) -> dict[tuple[int, int], Any] | None:
        """Data for the scheduler's connector at its start, by (pipeline rank, tensor rank)."""
        ...

    def close(self) -> None:
        """Ends the transfers' threads; the pool is already dropped."""
        ...
