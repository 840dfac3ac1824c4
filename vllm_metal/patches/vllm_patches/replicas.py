# SPDX-License-Identifier: Apache-2.0
"""Data parallel without lock-step: each rank is a whole engine, which needs none of the others.

vLLM shares the experts of a model out among its data-parallel ranks. They then step together, with
empty steps where one of them has no request, and rank 0 tells the rest when all may rest. Here each
rank holds the whole model, so they are what vLLM's ranks of dense models are: engines of their own
behind one server, which asks how long their queues are.
"""

# Remove when a platform can say whether experts are distributed, and vLLM compares what ranks
# serve. Read against vLLM 0.33.

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field, make_dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_metal.patches.vllm_patches.replacing import replace

if TYPE_CHECKING:
    from argparse import Namespace

    from vllm.config import ParallelConfig, VllmConfig
    from vllm.engine.arg_utils import EngineArgs

_RANK = "vllm_metal_rank"  # of a ParallelConfig, which goes to the engine's process
#: In the message of an engine that is ready: its facts. In a server's client: those of its first
#: rank.
_FACTS = "vllm_metal_facts"


def run_in_their_processes() -> None:
    """Has ranks run their worker in the engine's process, as an engine without others does.

    vLLM takes its executor with a process a worker wherever there are several ranks, and each rank
    has a process as it is.
    """
    from vllm.engine.arg_utils import EngineArgs

    replace(EngineArgs, "create_engine_config", _in_process)


def _in_process(
    create: Callable[..., VllmConfig], self: EngineArgs, *args: Any, **options: Any
) -> VllmConfig:
    workers = self.tensor_parallel_size * self.pipeline_parallel_size
    if self.data_parallel_size > 1 and workers == 1:
        self.distributed_executor_backend = self.distributed_executor_backend or "uni"
    return create(self, *args, **options)


def answer_with_one_front_end(args: Namespace) -> None:
    """Makes --api-server-count 1 where its user has said nothing; changes a server's arguments.

    vLLM starts as many servers as there are ranks. They share no tenants' limits, no kept answers
    and no knowledge of who is idle, and a few Macs do not keep one of them busy.
    """
    if args.api_server_count is None and not args.headless:
        args.api_server_count = 1


def make_independent(config: VllmConfig) -> None:
    """Takes away all that vLLM's launchers read lock-step from; call it before they do.

    It goes with the configuration to every process: the server's, which starts a coordinator, the
    headless launcher's and the engine's. None of them asks anything else.

    Args:
        config: of a server or a launcher, with `data_parallel_size` above 1.
    """
    # What `ModelConfig.is_moe` reads. Nothing of ours does; vLLM's own estimate of floating-point
    # operations (--enable-mfu-metrics) is then of a dense model, and platform refuses it.
    config.model_config.model_arch_config.num_experts = 0
    config.parallel_config.is_moe_model = False


def mark_ranks(parallel: ParallelConfig) -> None:
    """Notes for the engines that a launcher starts that they are ranks.

    Args:
        parallel: of the launcher's configuration.
    """
    setattr(parallel, _RANK, True)


def is_rank(parallel: ParallelConfig) -> bool:
    """Whether an engine is one of several behind a server; vLLM tells it that it is the only one.

    Args:
        parallel: of its process's configuration.
    """
    return hasattr(parallel, _RANK)


def tell_facts(facts: Callable[[VllmConfig], Mapping[str, Any]]) -> None:
    """Has a rank tell its server all that its tokens depend on; call it in the engine's process.

    Args:
        facts: of the configuration of an engine whose weights are loaded; JSON has them unchanged.
    """
    from vllm.v1.engine.core import EngineCoreProc, EngineCoreReadyResponse

    # vLLM's server ignores a field that it does not know.
    of_rank = make_dataclass(
        "RankReadyResponse",
        [(_FACTS, Mapping[str, Any], field(kw_only=True))],
        bases=(EngineCoreReadyResponse,),
    )

    def telling(make: Callable[[Any], Any], self: Any) -> Any:
        response = make(self)
        if not is_rank(self.vllm_config.parallel_config):
            return response
        return of_rank(**vars(response) | {_FACTS: dict(facts(self.vllm_config))})

    replace(EngineCoreProc, "_make_ready_response", telling)


def refuse_other_ranks(difference: Callable[[Mapping[str, Any], Mapping[str, Any]], str]) -> None:
    """Has a server whose ranks would give different tokens not start; call it once vLLM is loaded.

    vLLM compares what ranks in lock-step were started with, and nothing of others.

    Args:
        difference: of facts of two ranks, in words; empty where there is none.
    """
    from vllm.v1.engine.core_client import MPClient

    def comparing(apply: Callable[[Any, bytes], None], self: Any, payload: bytes) -> None:
        apply(self, payload)
        told = msgspec.msgpack.decode(payload) if payload else {}
        if (facts := told.get(_FACTS)) is None:  # an engine without others
            return
        rank = told["data_parallel_rank"]
        first, ours = self.__dict__.setdefault(_FACTS, (rank, facts))
        if found := difference(ours, facts):
            raise ValueError(
                f"data-parallel ranks {first} and {rank} would give different tokens: {found} "
                f"(here: rank {first})"
            )

    replace(MPClient, "_apply_ready_response", comparing)
