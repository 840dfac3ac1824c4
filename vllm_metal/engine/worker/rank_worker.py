# SPDX-License-Identifier: Apache-2.0
"""RankWorker: the worker of one rank in a model distributed over several."""

from __future__ import annotations

from contextlib import contextmanager
from functools import cached_property, partial
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.v1.outputs import AsyncModelRunnerOutput

from vllm_metal.device import mlx_device
from vllm_metal.engine.distributed import (
    consistency,
    groups,
    heartbeat,
    machines,
    sharding,
    tensor_parallel,
    tokens,
)
from vllm_metal.engine.distributed.hidden_states import GroupLink, HiddenIn, HiddenOut
from vllm_metal.engine.memory.share import Share
from vllm_metal.engine.models import loader
from vllm_metal.engine.models.stage import Stage
from vllm_metal.engine.spec_decode.scheduled_drafts import ScheduledDrafts
from vllm_metal.engine.worker.networks import Networks
from vllm_metal.engine.worker.results import LateOutput
from vllm_metal.engine.worker.served_model import RunnerParts, ServedModel
from vllm_metal.engine.worker.worker import MetalWorker
from vllm_metal.identity import rank_facts
from vllm_metal.patches.vllm_patches import memory_shares
from vllm_metal.patches.vllm_patches.step_result import StepResult

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import mlx.core as mx
    import mlx.nn as nn
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput

    from vllm_metal.engine.batch.output_head import OutputHead
    from vllm_metal.engine.batch.per_request_state import PerRequestState
    from vllm_metal.engine.batch.requests import Requests
    from vllm_metal.engine.models.executor import ModelExecutor
    from vllm_metal.engine.spec_decode.proposer import Proposer
    from vllm_metal.engine.spec_decode.speculator import Speculator
    from vllm_metal.metrics.step_clock import StepTimes
    from vllm_metal.metrics.step_meter import StepRows
    from vllm_metal.settings import envs

logger = init_logger(__name__)

#: Seconds for a connection between two ranks that have both started.
_CONNECT_S = 30.0


class StageModel(ServedModel):
    """One rank's layers (pipeline parallel), or its heads of each layer (tensor parallel)."""

    def __init__(
        self,
        config: VllmConfig,
        device: envs.Device,
        rank: int,
        link: GroupLink,
        ring: mx.distributed.Group | None,
    ) -> None:
        """Takes the link to neighboring stages, and the ranks that share each layer's heads.

        `ring` is None if there is one rank per stage.
        """
        super().__init__(config, device)
        self._rank, self._link, self._ring = rank, link, ring
        self.samples = link.group.is_last_rank
        if ring is not None:
            self.agreed = partial(tokens.of_first_rank, group=ring)

    def load_networks(self) -> Networks:
        return Networks.load_stage(self._config, self._stage, self._share)

    def _stage(self, num_layers: int) -> Stage:
        group = self._link.group
        stage = Stage.of(num_layers, group.rank_in_group, group.world_size)
        logger.info(
            "Rank %d computes layers %d to %d of %d",
            self._rank,
            stage.start,
            stage.end - 1,
            num_layers,
        )
        return stage

    def _share(self, model: nn.Module) -> None:
        # Called before the weights are read, so that only this rank's heads ever are.
        if self._ring is not None:
            sharding.shard(model, self._ring, loader.model_type(self._config))

    def columns(self) -> Sequence[PerRequestState]:
        received = () if self._link.group.is_first_rank else (HiddenIn(self._link),)
        return (*super().columns(), *received)

    def make_head(self, executor: ModelExecutor, requests: Requests) -> OutputHead:
        if self._link.group.is_last_rank:
            return super().make_head(executor, requests)
        return HiddenOut(self._link, requests)

    def make_speculator(self, parts: RunnerParts, network: Proposer | None) -> Speculator | None:
        # Ranks that do not sample use the drafts that the scheduler sends.
        speculation = self._config.speculative_config
        if speculation is None or self._link.group.is_last_rank:
            return super().make_speculator(parts, network)
        num_drafts = speculation.num_speculative_tokens
        return ScheduledDrafts(parts.requests, num_drafts, parts.memory.most_drafts)


class RankWorker(MetalWorker):
    """Computes one rank's layers, or its heads of each layer.

    vLLM only takes results from the first tensor rank of the last stage. A step that fails anywhere
    fails the engine, since other ranks are in the middle of the same step.
    """

    _most_failures = 0
    _heartbeat: heartbeat.Heartbeat | None = None

    def init_device(self) -> None:
        parallel = self.parallel_config
        groups.join(parallel, self.rank, self.local_rank, self.distributed_init_method)
        from vllm.distributed.parallel_state import get_pp_group

        self._link = GroupLink(get_pp_group())
        # First, as ranks of another release may exchange other data, in another order.
        consistency.check(rank_facts.releases(), groups.share)
        machine = machines.find(parallel, self.rank, self.distributed_init_method)
        joined = self.rank, parallel.world_size, machine.host_of_first, groups.share, _CONNECT_S
        self._heartbeat = heartbeat.join(*joined)
        self._heartbeat.pids = machine.pids
        self._heartbeat.start()
        if parallel.use_ray and (workers := len(machine.pids)) > 1:  # known only now
            memory = mlx_device.memory(self.current_platform.mlx_device)
            memory_shares.give(parallel, Share.of(workers, memory))
        consistency.check(consistency.facts_of(self.vllm_config), groups.share)
        super().init_device()
        self._ring = tensor_parallel.join_ring(parallel)
        self._returns_results = self.rank == parallel.world_size - parallel.tensor_parallel_size

    @cached_property
    def served(self) -> StageModel:
        device = self.current_platform.mlx_device
        return StageModel(self.vllm_config, device, self.rank, self._link, self._ring)

    def determine_available_memory(self) -> int:
        available = super().determine_available_memory()
        # One rank's memory may allow fewer drafts than another's.
        limits = [each for each in groups.share(self._memory.most_drafts) if isinstance(each, int)]
        self._memory.most_drafts = min(limits, default=None)
        return available

    def _read(self, output: AsyncModelRunnerOutput, step: StepTimes, rows: StepRows) -> StepResult:
        # With stages, drafts arrive with the results: see `drafts_with_results`.
        result = super()._read(output, step, rows)
        if self._returns_results and self._link.group.world_size > 1:
            result.drafts = self.take_draft_token_ids()
        return result

    def _warm_up(self) -> None:
        # A single stage cannot be warmed up: the steps, and their dense check, need all layers.
        if self._link.group.world_size == 1:
            super()._warm_up()

    def execute_model(
        self, scheduler_output: SchedulerOutput
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        if self._returns_results:
            return super().execute_model(scheduler_output)
        with _ending_process_on_failure():
            result = super().execute_model(scheduler_output)
            if isinstance(result, AsyncModelRunnerOutput):
                result.get_output()
        return None

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> AsyncModelRunnerOutput:
        if self._returns_results:
            return super().sample_tokens(grammar_output)
        if self._link.group.is_last_rank:  # its state must follow that of the rank that answers
            with _ending_process_on_failure():
                super().sample_tokens(grammar_output).get_output()
        return LateOutput(partial(StepResult, [], {}))  # the step has ended; nobody reads this

    def shutdown(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.close()
        super().shutdown()


@contextmanager
def _ending_process_on_failure() -> Iterator[None]:
    # Nobody would receive the error of this rank's step while other ranks wait for it.
    try:
        yield
    except Exception as error:
        logger.exception("A step failed")
        heartbeat.end_process(f"a step failed: {error}")
