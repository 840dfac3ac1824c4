# SPDX-License-Identifier: Apache-2.0
"""Data parallel without lock-step: each rank is a whole engine and needs no other rank.

vLLM distributes a model's experts over its data-parallel ranks. They then step together, with empty
steps for ranks without requests, until rank 0 says that all may rest. Here each rank holds the
whole model, like vLLM's ranks of dense models: independent engines behind one server, which
balances requests by their queue lengths.
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

_RANK = "vllm_metal_rank"  # attribute of a ParallelConfig, which goes to the engine's process
#: Key of the configuration fingerprint in an engine's ready message, and attribute of a server's
#: client with that of its first rank.
_FINGERPRINT = "vllm_metal_facts"


def run_in_their_processes() -> None:
    """Makes data-parallel ranks run their worker in the engine's process, like a single engine."""
    # With several ranks vLLM chooses the executor with one process per worker, though each rank
    # already has its own process.
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
    """Sets `args.api_server_count` to 1 unless the user has set it, or the server is headless."""
    # vLLM starts as many servers as ranks. They would share no tenants' limits, cached responses or
    # knowledge of idle engines, and a few Macs do not keep one server busy.
    if args.api_server_count is None and not args.headless:
        args.api_server_count = 1


def make_independent(config: VllmConfig) -> None:
    """Marks the model as dense, so that vLLM's launchers expect no lock-step; call it before they
    start.

    The configuration of the server or launcher, with `data_parallel_size` above 1, goes on to the
    coordinator's, the headless launcher's and the engines' processes.
    """
    # `ModelConfig.is_moe` reads this. Nothing of ours does; vLLM's own estimate of floating-point
    # operations (--enable-mfu-metrics) would be a dense model's, so platform rejects that option.
    config.model_config.model_arch_config.num_experts = 0
    config.parallel_config.is_moe_model = False


def mark_ranks(parallel: ParallelConfig) -> None:
    """Marks a launcher's configuration, so that the engines that it starts know they are ranks."""
    setattr(parallel, _RANK, True)


def is_rank(parallel: ParallelConfig) -> bool:
    """Returns whether this process's engine is one of several data-parallel ranks."""
    return hasattr(parallel, _RANK)


def tell_facts(facts: Callable[[VllmConfig], Mapping[str, Any]]) -> None:
    """Makes a rank send its server a fingerprint of its configuration; call it in the engine.

    `facts` takes the configuration of an engine with its weights loaded, and returns everything
    that the output depends on as JSON values.
    """
    from vllm.v1.engine.core import EngineCoreProc, EngineCoreReadyResponse

    # vLLM's server ignores fields that it does not know.
    rank_response = make_dataclass(
        "RankReadyResponse",
        [(_FINGERPRINT, Mapping[str, Any], field(kw_only=True))],
        bases=(EngineCoreReadyResponse,),
    )

    def with_fingerprint(make: Callable[[Any], Any], self: Any) -> Any:
        response = make(self)
        if not is_rank(self.vllm_config.parallel_config):
            return response
        return rank_response(**vars(response) | {_FINGERPRINT: dict(facts(self.vllm_config))})

    replace(EngineCoreProc, "_make_ready_response", with_fingerprint)


def refuse_other_ranks(difference: Callable[[Mapping[str, Any], Mapping[str, Any]], str]) -> None:
    """Makes a server fail if its ranks would give different tokens; call it once vLLM is loaded.

    `difference` describes how the results of two ranks' `facts` differ; "" if they do not.
    """
    # vLLM compares only ranks in lock-step.
    from vllm.v1.engine.core_client import MPClient

    def comparing(apply: Callable[[Any, bytes], None], self: Any, payload: bytes) -> None:
        apply(self, payload)
        response_fields = msgspec.msgpack.decode(payload) if payload else {}
        if (facts := response_fields.get(_FINGERPRINT)) is None:  # an only engine
            return
        rank = response_fields["data_parallel_rank"]
        first, ours = self.__dict__.setdefault(_FINGERPRINT, (rank, facts))
        if found := difference(ours, facts):
            raise ValueError(
                f"data-parallel ranks {first} and {rank} would give different tokens: {found} "
                f"(here: rank {first}). Give all ranks the same files, releases and settings"
            )

    replace(MPClient, "_apply_ready_response", comparing)
