# SPDX-License-Identifier: Apache-2.0
"""What else happens around a step: nothing, until K/V moves to other memory or machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import mlx.core as mx
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput

    from vllm_metal.engine.models.paged_layers import PagedLayers
    from vllm_metal.patches.vllm_patches.step_result import Figures


class HookedRunner(Protocol):
    """What hooks may ask of the runner on a pool."""

    @property
    def layers(self) -> PagedLayers:
        """The target's layers over the pool."""
        ...

    def join_step(self, arrays: Sequence[mx.array]) -> None:
        """Has the device compute these, too, when it is given the step that is being built."""
        ...

    def complete_draft_kv(self, ends: Mapping[str, int]) -> None:
        """Completes what blocks hold of requests' first tokens, by request id."""
        ...


class StepHooks:
    """Calls around each step that do nothing. What moves K/V overrides those it needs.

    The engine's thread makes them. None may hold an array of the pool beyond the call: MLX copies a
    whole pool that is written while something else holds it. A call that raises fails the step, as
    an array does that cannot be computed: blocks that leave the pool wait for the device.
    """

    def pool_made(self, runner: HookedRunner) -> None:
        """There is a pool, and it is empty.

        Args:
            runner: on that pool. To be let go in `before_pool_goes`, or the pool stays beside the
                next one.
        """

    def before_pool_goes(self, lost: bool) -> None:
        """The pool is about to go.

        Transfers that read or write it must be over when this returns; it must not raise.

        Args:
            lost: a step failed, and nothing in the pool can be trusted. Else the engine sleeps,
                loads other weights or ends, and the device has finished all steps.
        """

    def before_step(self, scheduler_output: SchedulerOutput, sound: bool) -> None:
        """The scheduler's word has come; requests and blocks are as the step before left them.

        The last moment to copy blocks out that the step clears or gives to other requests. The host
        knows the tokens of the step before where drafts follow them.

        Args:
            scheduler_output: of the step, which may have nothing scheduled.
            sound: whether the pool holds what the scheduler believes. False until it has heard of a
                step that failed; the step is skipped then.
        """

    def before_forward(self) -> None:
        """Requests are up to date, and blocks cleared and copied as the scheduler wants.

        The moment to copy blocks in. Not called where the step's pool is lost by then.
        """

    def before_submit(self) -> None:
        """The step's forward is built, and the device will be given it next.

        The moment to have the device copy blocks out that earlier steps completed: `join_step` of
        the runner takes the copies. Not called where nothing is scheduled, nor after a failure.
        """

    def after_step(self, computed: bool) -> KVConnectorOutput | None:
        """The step is with the device, or has failed, or had nothing scheduled.

        What the device was given may still fail, see `steps_computed`.

        Args:
            computed: whether the pool holds what the scheduler believes, this step included. False
                where the step failed, or is skipped until the scheduler hears of one that did.

        Returns:
            What the scheduler is to hear of transfers. It goes with this step's result whatever
            becomes of the step. Where the call raises it is lost: tell it after the next step.
        """
        return None

    def figures(self) -> Figures:
        """Figures of transfers that are new since the last call; made after `after_step`."""
        return {}

    def steps_computed(self, num_left: int) -> None:
        """Called when the device has computed submitted steps without an error.

        Copies that a step made of pool blocks may be stored only after this call. If the pool is
        lost, `before_pool_goes` is called instead.

        Args:
            num_left: how many of the newest submitted steps may still fail; all before them are
                computed.
        """


#: Hooks that do nothing.
NO_HOOKS = StepHooks()


class Transfers(Protocol):
    """Moves K/V between the pool and other memory or machines. The platform hands it to workers."""

    @property
    def hooks(self) -> StepHooks:
        """To be called around each step."""
        ...

    @property
    def memory_bytes(self) -> int:
        """Memory that it takes at most."""
        ...

    def weights_loaded(self) -> None:
        """Notes which weights were just read. Later, the files may be others."""
        ...

    def open(self, kv_cache_config: KVCacheConfig, pool: str) -> None:
        """Opens the stores that were asked for.

        Args:
            kv_cache_config: of the pool.
            pool: who computes on it, "scatter" or "kernels".
        """
        ...

    def handshake(self) -> dict[tuple[int, int], Any] | None:
        """What the scheduler's connector gets at its start, by (pipeline rank, tensor rank)."""
        ...

    def close(self) -> None:
        """Ends its threads; there is no pool any more."""
        ...
