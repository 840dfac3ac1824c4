# SPDX-License-Identifier: Apache-2.0
"""RankWorker: the worker of an engine whose ranks have a part of the model each."""

from __future__ import annotations

import os
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.v1.outputs import AsyncModelRunnerOutput

from vllm_metal.distributed import alike, groups, heartbeat, sharding, tensor_parallel, tokens
from vllm_metal.distributed.hidden_states import GroupLink, HiddenIn, HiddenOut
from vllm_metal.models import loader
from vllm_metal.models.stage import Stage
from vllm_metal.vllm_patches.step_result import StepResult
from vllm_metal.worker.networks import Networks
from vllm_metal.worker.results import LateOutput
from vllm_metal.worker.worker import MetalWorker

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import mlx.nn as nn
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput

    from vllm_metal.batch.columns import RequestColumn
    from vllm_metal.batch.step_end import StepEnd
    from vllm_metal.models.executor import ModelExecutor

logger = init_logger(__name__)

#: Seconds for a connection between two ranks, once both are there.
_CONNECT_S = 30.0


class RankWorker(MetalWorker):
    """Computes one rank's layers, or its heads of them; vLLM asks one rank alone for results: the
    first tensor rank of the last stage.

    A step that fails anywhere fails the engine: other ranks are in the midst of the same step.
    """

    _most_failures = 0
    _heartbeat: heartbeat.Heartbeat | None = None

    def init_device(self) -> None:
        parallel = self.parallel_config
        groups.join(parallel, self.rank, self.local_rank, self.distributed_init_method)
        from vllm.distributed.parallel_state import get_pp_group

        self._link = GroupLink(get_pp_group())
        self._samples = self._link.group.is_last_rank
        host = parallel.master_addr if parallel.nnodes > 1 else "127.0.0.1"
        joined = self.rank, parallel.world_size, host, groups.share, _CONNECT_S
        self._heartbeat = heartbeat.join(*joined)
        self._heartbeat.pids = self._processes_here()
        self._heartbeat.start()
        alike.check(alike.facts_of(self.vllm_config), groups.share)
        super().init_device()
        self._ring = tensor_parallel.join_ring(parallel)
        if self._ring is not None:
            self._agreed = partial(tokens.of_first_rank, group=self._ring)
        self._answers = self.rank == parallel.world_size - parallel.tensor_parallel_size

    def _stage(self, num_layers: int) -> Stage:
        group = self._link.group
        stage = Stage.of(num_layers, group.rank_in_group, group.world_size)
        logger.info(
            "Rank %d computes layers %d to %d of %d",
            self.rank,
            stage.start,
            stage.end - 1,
            num_layers,
        )
        return stage

    def _load_networks(self) -> Networks:
        return Networks.load_stage(self.vllm_config, self._stage, self._share)

    def _share(self, model: nn.Module) -> None:
        """Leaves of each layer, before its weights are read, the heads that this rank computes."""
        if self._ring is not None:
            sharding.shard(model, self._ring, loader.model_type(self.vllm_config))

    def determine_available_memory(self) -> int:
        available = super().determine_available_memory()
        # One rank's memory may allow fewer drafts than another's.
        limits = [each for each in groups.share(self._memory.most_drafts) if isinstance(each, int)]
        self._memory.most_drafts = min(limits, default=None)
        return available

    def _columns(self) -> Sequence[RequestColumn]:
        received = () if self._link.group.is_first_rank else (HiddenIn(self._link),)
        return (*super()._columns(), *received)

    def _make_end(self, executor: ModelExecutor) -> StepEnd:
        if self._link.group.is_last_rank:
            return super()._make_end(executor)
        return HiddenOut(self._link, self._requests)

    def _warm_up(self) -> None:
        """No rehearsal of a stage: its steps, and the dense check of them, are of all layers."""
        if self._link.group.world_size == 1:
            super()._warm_up()

    def execute_model(
        self, scheduler_output: SchedulerOutput
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        if self._answers:
            return super().execute_model(scheduler_output)
        with _heard():
            result = super().execute_model(scheduler_output)
            if isinstance(result, AsyncModelRunnerOutput):
                result.get_output()
        return None

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> AsyncModelRunnerOutput:
        if self._answers:
            return super().sample_tokens(grammar_output)
        if self._link.group.is_last_rank:  # it must know as much as the rank that answers
            with _heard():
                super().sample_tokens(grammar_output).get_output()
        return LateOutput(partial(StepResult, [], {}))  # its step has ended, and nobody reads this

    def _processes_here(self) -> dict[int, int]:
        """Process ids of the ranks of this machine, by rank."""
        size = self.parallel_config.local_world_size
        pids = enumerate(groups.share(os.getpid()))
        return {
            n: pid for n, pid in pids if isinstance(pid, int) and n // size == self.rank // size
        }

    def shutdown(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.close()
        super().shutdown()


@contextmanager
def _heard() -> Iterator[None]:
    """Ends this process where a step fails; nobody would hear of the error, and others wait."""
    try:
        yield
    except Exception as error:
        logger.exception("A step failed")
        heartbeat.end_process(f"a step failed: {error}")
