# SPDX-License-Identifier: Apache-2.0
"""What else happens around a step: nothing, until K/V moves to other memory or machines."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput

    from vllm_metal.models.paged_layers import PagedLayers


class StepHooks:
    """Calls around each step that do nothing. What moves K/V overrides those it needs.

    The engine's thread makes them; the thread that asks for a step's results does so where that
    step turns out to have failed. None may hold an array of the pool beyond the call: MLX copies a
    whole pool that is written while something else holds it. A call that raises fails the step, as
    an array does that cannot be computed: blocks that leave the pool wait for the device.
    """

    def pool_made(self, layers: PagedLayers) -> None:
        """There is a pool, and it is empty.

        Args:
            layers: the target's layers over it, and the storage of all networks. To be let go in
                `before_pool_goes`, or the pool stays beside the next one.
        """

    def before_pool_goes(self) -> None:
        """The pool is about to go: the engine sleeps, ends, or has lost a step.

        Transfers that read or write it must be over when this returns; it must not raise.
        """

    def before_step(self, scheduler_output: SchedulerOutput) -> None:
        """The scheduler's word has come; requests and blocks are as the step before left them.

        The last moment to copy blocks out that the step clears or gives to other requests.

        Args:
            scheduler_output: of the step, which may have nothing scheduled.
        """

    def before_forward(self) -> None:
        """Requests are up to date, and blocks cleared and copied as the scheduler wants.

        The moment to copy blocks in. Not called where the step's pool is lost by then.
        """

    def after_step(self, computed: bool) -> KVConnectorOutput | None:
        """The step is with the device, or has failed, or had nothing scheduled.

        Args:
            computed: whether the device has it, and the pool will hold its K/V. False also for
                steps that are skipped until the scheduler hears of one that failed.

        Returns:
            What the scheduler is to hear of transfers. It goes with this step's result whatever
            becomes of the step. Where the call raises it is lost: tell it after the next step.
        """
        return None


#: Hooks that do nothing.
NO_HOOKS = StepHooks()
