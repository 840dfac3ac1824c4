# SPDX-License-Identifier: Apache-2.0
"""Data parallel without lock-step: each rank is a whole engine, which needs none of the others.

vLLM shares the experts of a model out among its data-parallel ranks. They then step together, with
empty steps where one of them has no request, and rank 0 tells the rest when all may rest. Here each
rank holds the whole model, so they are what vLLM's ranks of dense models are: engines of their own
behind one server, which asks how long their queues are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_metal.vllm_patches.replacing import replace

if TYPE_CHECKING:
    from argparse import Namespace

    from vllm.config import ParallelConfig, VllmConfig
    from vllm.engine.arg_utils import EngineArgs

_SHARE = "vllm_metal_share"  # of a ParallelConfig, which goes to the engine's process


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


def share(parallel: ParallelConfig) -> Any:
    """What was given to `set_share`; None: nothing was.

    Args:
        parallel: of an engine's process. vLLM forgets there how many ranks its machine has.
    """
    return getattr(parallel, _SHARE, None)


def set_share(parallel: ParallelConfig, share: Any) -> None:
    """Notes something for the engines that a launcher starts; any object that can be pickled."""
    setattr(parallel, _SHARE, share)
