# SPDX-License-Identifier: Apache-2.0
"""vLLM's worker on one MLX device: lifecycle and memory; the steps are the runner's."""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
from vllm.logger import init_logger
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from vllm_metal import device
from vllm_metal.kv_cache import budget, choice
from vllm_metal.kv_cache.specs import allocate_regions, kv_cache_specs
from vllm_metal.models import loader
from vllm_metal.models.executor import ModelExecutor
from vllm_metal.models.layers import AttentionLayer, attention_layers
from vllm_metal.models.profile import profile_step
from vllm_metal.outputs import StepOutput
from vllm_metal.requests import BlockTables, Requests
from vllm_metal.runner import ModelRunner
from vllm_metal.sample import CustomProcessors, Sampler
from vllm_metal.spec_decode.choice import make_speculator
from vllm_metal.spec_decode.networks import load_network

if TYPE_CHECKING:
    from vllm.tasks import SupportedTask
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

logger = init_logger(__name__)


class MetalWorker(WorkerBase):
    """Owns the model, the KV pool and the runner of one process."""

    model: nn.Module
    layers: list[AttentionLayer]
    runner: ModelRunner

    def init_device(self) -> None:
        device.select(self.current_platform.mlx_device)
        set_random_seed(self.model_config.seed)

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        if load_dummy_weights:
            raise NotImplementedError("--load-format dummy is not supported by vllm-metal")
        started = time.perf_counter()
        self.model = loader.load(self.vllm_config)
        self.layers = attention_layers(self.model, loader.model_type(self.vllm_config))
        self._rows = loader.SelectedRows(self.model)
        self._draft = load_network(self.vllm_config, self.model, self._rows)
        # Both models' K/V lie in the same blocks.
        self._all_layers = [*self.layers, *(self._draft.layers if self._draft else ())]
        self._region_type = choice.region_type(
            self.current_platform.mlx_device,
            self._all_layers,
            loader.mlx_dtype(self.vllm_config),
            self.cache_config.block_size,
        )
        logger.info(
            "Loaded %s in %.1f s: %.2f GiB of weights on %s",
            self.model_config.model,
            time.perf_counter() - started,
            mx.get_active_memory() / 2**30,
            self.current_platform.get_device_name(),
        )

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        dtype = loader.torch_dtype(self.vllm_config)
        return kv_cache_specs(self._all_layers, self.cache_config.block_size, dtype)

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return ["LBNHC"]  # layer outermost: a region a layer, slots of a block in order

    def determine_available_memory(self) -> int:
        """Bytes for the KV pool."""
        if self.cache_config.kv_cache_memory_bytes is not None:
            return self.cache_config.kv_cache_memory_bytes
        return budget.available_for_pool(
            self.current_platform.mlx_device,
            self.cache_config.gpu_memory_utilization,
            len(self._all_layers),
            self._largest_step,
        )

    def _largest_step(self) -> None:
        profile_step(self.model, self._rows, self.layers, self.vllm_config, self._region_type)
        if self._draft is not None:
            self._draft.profile(self._region_type)

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        block_size = self.cache_config.block_size
        regions = allocate_regions(
            kv_cache_config,
            self._all_layers,
            block_size,
            loader.mlx_dtype(self.vllm_config),
            self._region_type,
        )
        groups = kv_cache_config.kv_cache_groups
        group_of = {name: g for g, group in enumerate(groups) for name in group.layer_names}
        executor = ModelExecutor(self.model, self._rows, self.layers, regions, group_of, block_size)
        mx.eval(executor.pool_arrays())
        max_num_reqs = self.scheduler_config.max_num_seqs
        max_len = self.model_config.max_model_len
        # One spare block: a step in flight past the last position may still be given one.
        tables = BlockTables(len(groups), max_num_reqs, -(-max_len // block_size) + 1)
        self._requests = Requests(max_num_reqs, max_len, tables)
        network = self._draft.proposer(regions, group_of, tables) if self._draft else None
        speculator = make_speculator(self.vllm_config, self._requests, network)
        sampler = Sampler(
            self.vocab_size,
            max_num_reqs,
            self.model_config.logprobs_mode,
            self.model_config.seed,
            CustomProcessors(self.vllm_config),
        )
        self.runner = ModelRunner(
            executor,
            self._requests,
            sampler,
            max_num_reqs,
            speculator,
        )

    def compile_or_warm_up_model(self) -> CompilationTimes:
        set_random_seed(self.model_config.seed)
        return CompilationTimes(language_model=0.0, encoder=0.0)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        return self.runner.execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> StepOutput:
        return self.runner.sample_tokens(grammar_output)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        return self.runner.take_draft_token_ids()

    def get_supported_tasks(self) -> tuple[SupportedTask, ...]:
        return ("generate",)

    def get_model(self) -> Any:
        return self.model

    def update_max_model_len(self, max_model_len: int) -> None:
        self.model_config.max_model_len = max_model_len

    def check_health(self) -> None:
        """Raises where the device no longer computes."""
        mx.eval(mx.zeros(1) + 1)

    def synchronize_device(self) -> None:
        self.runner.wait()

    def reset_encoder_cache(self) -> None:
        return  # text models keep none

    def profile(self, is_start: bool = True, profile_prefix: str | None = None) -> None:
        """Captures a Metal trace between start and stop; needs MTL_CAPTURE_ENABLED=1."""
        if self.current_platform.mlx_device != "metal":
            raise RuntimeError("profiling captures Metal traces; the CPU device has none")
        if is_start:
            mx.metal.start_capture(f"{profile_prefix or 'vllm-metal'}.gputrace")
        else:
            self.runner.wait()
            mx.metal.stop_capture()

    def execute_dummy_batch(self) -> None:
        return  # only data-parallel ranks must keep step with each other

    def shutdown(self) -> None:
        """Lets go of the model and the pool, once nothing on the device uses them."""
        mx.synchronize()
        for name in ("runner", "model", "_draft", "_rows", "_requests"):
            if hasattr(self, name):
                delattr(self, name)
        gc.collect()
        mx.clear_cache()
