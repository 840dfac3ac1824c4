# SPDX-License-Identifier: Apache-2.0
"""ServedModel: a process's networks, the format of their K/V, and the runner on both."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import mlx.core as mx
from mlx.utils import tree_flatten
from vllm.logger import init_logger

from metal_kernels.paged_attention import Splits
from vllm_metal.device import gpu_cores, mlx_device, tuned
from vllm_metal.engine.kv_cache import choice, formats, warm_up
from vllm_metal.engine.kv_cache.specs import (
    allocate_kv_caches,
    choose_block_size,
    groups_of,
    kv_cache_specs,
)
from vllm_metal.engine.memory.needs import Needs
from vllm_metal.engine.memory.planner import quantized_share
from vllm_metal.engine.memory.profile import LargestCalls, profile_step, requests_profile
from vllm_metal.engine.memory.wiring import MOST_POOL_ARRAYS
from vllm_metal.engine.models import dense_check, loader
from vllm_metal.engine.models.dense_check import PagedHidden, PagedLogits
from vllm_metal.engine.models.executor import ModelExecutor
from vllm_metal.engine.pooling.pooling_head import PoolingHead
from vllm_metal.engine.sample import CustomProcessors, Sampler
from vllm_metal.engine.spec_decode.network import DraftPool
from vllm_metal.engine.spec_decode.registry import drafts_for_others, make_speculator
from vllm_metal.engine.weights.disk_tables import TableRule
from vllm_metal.engine.worker.model_runner import ModelRunner
from vllm_metal.engine.worker.networks import Networks
from vllm_metal.engine.worker.sampling_head import SamplingHead
from vllm_metal.engine.worker.warm_up_steps import Room, run_pooling_warm_up, run_warm_up
from vllm_metal.patches.vllm_patches import memory_shares
from vllm_metal.settings.additional_config import AdditionalConfig
from vllm_metal.settings.draft_methods import OFF_SWITCH, drop_default

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

    from vllm_metal.engine.batch.output_head import OutputHead
    from vllm_metal.engine.batch.per_request_state import PerRequestState
    from vllm_metal.engine.batch.requests import Requests
    from vllm_metal.engine.kv_cache.layer_cache import KVBackend
    from vllm_metal.engine.memory.planner import MemoryPlanner
    from vllm_metal.engine.models.compiled import Graphs
    from vllm_metal.engine.sample import SamplerOutput
    from vllm_metal.engine.spec_decode.proposer import Proposer
    from vllm_metal.engine.spec_decode.speculator import Speculator
    from vllm_metal.engine.worker.step_hooks import StepHooks
    from vllm_metal.metrics.step_clock import StepClock
    from vllm_metal.settings import envs

logger = init_logger(__name__)


@dataclass(frozen=True)
class RunnerParts:
    """Parts of the worker that are passed to every runner and outlive it."""

    kv_cache_config: KVCacheConfig
    requests: Requests
    hooks: StepHooks
    clock: StepClock
    memory: MemoryPlanner


class ServedModel:
    """One process's networks, the format of their K/V, and the runner on both.

    Subclasses for ranks and encoders load weights, or begin or end a forward, differently.
    """

    samples = True  # whether it samples tokens
    #: Maps this rank's samples to those that all ranks agreed on; None for a single rank.
    agreed: Callable[[SamplerOutput], SamplerOutput] | None = None
    backend: KVBackend  # known once the networks are loaded
    _pool_dtype: mx.Dtype

    def __init__(self, config: VllmConfig, device: envs.Device) -> None:
        self._config = config
        self._device = device
        self._networks: Networks | None = None

    @property
    def is_loaded(self) -> bool:
        return self._networks is not None

    @property
    def networks(self) -> Networks:
        if self._networks is None:
            raise RuntimeError("the weights are not loaded: call wake_up first")
        return self._networks

    def load(self) -> None:
        """Loads the networks, and chooses the block size and backend of their pool."""
        self._networks = self.load_networks()
        dtype = loader.mlx_dtype(self._config)
        self._pool_dtype = formats.pool_dtype(self._config.cache_config.cache_dtype, dtype)
        self._choose_block_size()
        self.backend = choice.kv_backend(
            self._device,
            self.networks.layers_with_kernels,
            dtype,
            self._pool_dtype,
            self._block_size,
            Splits.of_gpu(gpu_cores.count(), AdditionalConfig.of(self._config).fixed_splits),
            tuned.current(),
        )

    def load_networks(self) -> Networks:
        try:
            return Networks.load(self._config, self._table_rule())
        except (loader.ModelLoadError, NotImplementedError) as error:
            if not drop_default(self._config):
                raise
            # Raises again if the target is at fault.
            networks = Networks.load(self._config, self._table_rule())
            logger.warning("Serving without drafts: %s. %s hides this", error, OFF_SWITCH)
            return networks

    def _table_rule(self) -> TableRule:
        share = memory_shares.given(self._config.parallel_config)
        memory = mlx_device.total_memory(self._device) // (share.workers if share else 1)
        return TableRule(AdditionalConfig.of(self._config).embedding_tables, memory)

    def release(self) -> None:
        self._networks = None
        mlx_device.give_back()

    @property
    def _block_size(self) -> int:
        return self._config.cache_config.block_size

    @property
    def _vocab_size(self) -> int:
        stated = self._config.model_config.get_vocab_size()
        computed = self.networks.target.num_logits
        return stated if computed is None else min(stated, computed)

    @property
    def _max_num_seqs(self) -> int:
        return self._config.scheduler_config.max_num_seqs

    def _choose_block_size(self) -> None:
        # Blocks must have room for a recurrent state, if layers keep any.
        cache = self._config.cache_config
        state_bytes = choose_block_size(cache, self.networks.layers_of_all_ranks, self._pool_dtype)
        if not state_bytes:
            return
        logger.info(
            "Each request keeps %.1f MiB of recurrent state besides K/V; blocks have %d "
            "tokens to make room for it, and prefix-cache hits end at whole blocks",
            state_bytes / 2**20,
            cache.block_size,
        )

    def specs(self) -> dict[str, KVCacheSpec]:
        """Returns vLLM's KV cache spec of each of this rank's layers, by name."""
        specs, draft = self._specs_of_all_ranks(), self.networks.draft
        # vLLM would not load the last block of a transferred prompt for layers that it knows as a
        # draft network's; here their K/V arrive complete (`spec_decode.draft_writer`).
        known = self._config.kv_transfer_config is None
        kept = (
            [layer for layer in draft.layers if not layer.is_auxiliary] if draft and known else ()
        )
        of_draft = {layer.name for layer in kept}
        return {
            layer.name: replace(specs[layer.name], is_draft=layer.name in of_draft)
            for layer in self.networks.all_layers
            if layer.name in specs
        }

    def _specs_of_all_ranks(self) -> dict[str, KVCacheSpec]:
        return kv_cache_specs(self.networks.layers_of_all_ranks, self._block_size, self._pool_dtype)

    def pool_size(self, memory: MemoryPlanner, transfer_bytes: int) -> int:
        """Measures the largest step, and returns the bytes left for the KV pool.

        `transfer_bytes` is the most memory that K/V transfers take.
        """
        networks, config, backend = self.networks, self._config, self.backend
        layers = networks.all_layers
        elsewhere = [layer.name for layer in networks.elsewhere]
        return memory.pool_size(
            config,
            Needs.of(config, self._specs_of_all_ranks(), elsewhere),
            networks.draft_bytes,
            quantized_share(layers, self._pool_dtype),
            LargestCalls.of(config, layers, backend, self._vocab_size if self.samples else 0),
            self._largest_step,
            partial(requests_profile, networks.target, networks.forward_layers, config, backend),
            transfer_bytes,
            networks.adapter_bytes,
            networks.image_bytes(config),
        )

    def _largest_step(self) -> None:
        networks = self.networks
        profile_step(
            networks.target,
            networks.forward_layers,
            self._config,
            self.backend,
            networks.heaviest_extras,
        )
        if networks.draft is not None:
            networks.draft.profile(self.backend)

    @property
    def most_arrays(self) -> int:
        """Upper bound of arrays in weights and pool, draft network and adapters included."""
        networks = self.networks
        weights = len(tree_flatten(networks.target.model.parameters()))
        return 2 * weights + MOST_POOL_ARRAYS * len(networks.all_layers)

    def make_runner(self, parts: RunnerParts, graphs: Graphs) -> ModelRunner:
        """Allocates the pool, and makes a runner on it; for `graphs`, see CompiledForward."""
        networks, block_size, requests = self.networks, self._block_size, parts.requests
        kv_caches = allocate_kv_caches(
            parts.kv_cache_config, networks.all_layers, block_size, self._pool_dtype, self.backend
        )
        group_of = groups_of(parts.kv_cache_config, networks.all_layers)
        executor = ModelExecutor(
            networks.target,
            networks.forward_layers,
            kv_caches,
            group_of,
            block_size,
            graphs,
            networks.variables,
        )
        mx.eval(executor.pool_arrays())
        proposer, writer = None, None
        pool = DraftPool(kv_caches, group_of, requests.block_tables, graphs)
        if networks.draft is not None and drafts_for_others(self._config):
            writer = networks.draft.writer(pool, requests)
        elif networks.draft is not None:
            proposer = networks.draft.proposer(pool)
        return ModelRunner(
            executor,
            requests,
            self.make_head(executor, requests),
            self._max_num_seqs,
            self.make_speculator(parts, proposer),
            writer,
            self.columns(),
            hooks=parts.hooks,
            clock=parts.clock,
        )

    def make_speculator(self, parts: RunnerParts, network: Proposer | None) -> Speculator | None:
        """Makes the speculator; `network` is the draft network's proposer, if there is one."""
        return make_speculator(self._config, parts.requests, network, parts.memory.most_drafts)

    def columns(self) -> Sequence[PerRequestState]:
        """Returns the per-request inputs of the target's modules."""
        return self.networks.columns

    def make_head(self, executor: ModelExecutor, requests: Requests) -> OutputHead:
        """Makes the output head, which turns hidden states into results."""
        model = self._config.model_config
        if (pooler := self.networks.pooler) is not None:
            assert model.pooler_config is not None
            return PoolingHead(pooler, model.pooler_config, requests)
        sampler = Sampler(
            self._vocab_size,
            self._max_num_seqs,
            model.logprobs_mode,
            model.seed,
            CustomProcessors(self._config),
        )
        return SamplingHead(executor, requests, sampler, self.agreed)

    def compile_kernels(self) -> None:
        warm_up.compile_kernels(
            self.backend,
            self.networks.layers_with_kernels,
            loader.mlx_dtype(self._config),
            self._pool_dtype,
            self._block_size,
        )

    def run_warm_up(self, pool: KVCacheConfig, runner: ModelRunner) -> PagedLogits | PagedHidden:
        """Runs steps of a made-up request, and returns its tokens and results for `check`."""
        model = self._config.model_config
        room = Room(
            len(pool.kv_cache_groups), self._block_size, pool.num_blocks, model.max_model_len
        )
        if (pooler := model.pooler_config) is not None:
            return run_pooling_warm_up(runner, pooler, self._vocab_size, room)
        sampler = Sampler(self._vocab_size, self._max_num_seqs)
        defaults = model.get_diff_sampling_param()
        return run_warm_up(runner, sampler, defaults, self._vocab_size, room)

    def check(self, paged: PagedLogits | PagedHidden) -> None:
        """Raises if the dense forward disagrees with `paged`, the paged results of the warm-up."""
        dtype = loader.mlx_dtype(self._config)
        # Quantized pools are skipped: their rounding would mask a difference.
        if AdditionalConfig.of(self._config).dense_check and self._pool_dtype == dtype:
            family, target = loader.model_type(self._config), self.networks.target
            if isinstance(paged, PagedHidden):
                dense_check.check_hidden(target, paged, dtype, family)
            else:
                dense_check.check(target.model, paged, dtype, family)
