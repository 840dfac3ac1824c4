# SPDX-License-Identifier: Apache-2.0
"""EncoderWorker: MetalWorker for encoders, which keep no state between steps and have no pool."""

from __future__ import annotations

from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
from vllm.v1.worker.worker_base import CompilationTimes

from vllm_metal.engine.kv_cache.scatter import SCATTER
from vllm_metal.engine.models import loader
from vllm_metal.engine.models.compiled import Graphs
from vllm_metal.engine.pooling import poolers
from vllm_metal.engine.pooling.encoders.executor import EncoderExecutor
from vllm_metal.engine.pooling.encoders.loading import lazy_encoder
from vllm_metal.engine.pooling.encoders.networks import Encoder
from vllm_metal.engine.pooling.encoders.profile import profile_step
from vllm_metal.engine.pooling.encoders.served import MODERNBERT, Architecture, of_config
from vllm_metal.engine.pooling.encoders.token_types import TokenTypes
from vllm_metal.engine.pooling.pooling_head import PoolingHead
from vllm_metal.engine.worker.model_runner import ModelRunner
from vllm_metal.engine.worker.networks import Networks
from vllm_metal.engine.worker.served_model import RunnerParts, ServedModel
from vllm_metal.engine.worker.worker import MetalWorker
from vllm_metal.identity import model_files
from vllm_metal.identity.model_files import ModelLoadError
from vllm_metal.patches.vllm_patches import shutdown

if TYPE_CHECKING:
    import torch
    from vllm.model_executor.layers.pooler.abstract import Pooler
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

    from vllm_metal.engine.memory.planner import MemoryPlanner


class EncoderModel(ServedModel):
    """An encoder and its pooler, without a KV pool."""

    samples = False
    backend = SCATTER  # unused: there are no layers with K/V

    @property
    def _encoder(self) -> Encoder:
        return cast(Encoder, self.networks.target)

    def load(self) -> None:
        self._networks = self.load_networks()

    def load_networks(self) -> Networks:
        model, config = self._config.model_config, self._config
        served = of_config(config)
        assert served is not None
        dtype = loader.mlx_dtype(config)
        path = model_files.model_folder(model, config)
        overrides = model.hf_overrides if isinstance(model.hf_overrides, dict) else {}
        encoder, head = lazy_encoder(path, served, dtype, overrides)
        try:
            mx.eval(encoder.model.parameters())
        except RuntimeError as error:
            raise ModelLoadError(f"weights in {path} are unreadable: {error}") from error
        pooler = self._pooler(served, head)
        types = TokenTypes(
            config.scheduler_config.max_num_seqs, getattr(model.hf_config, "type_vocab_size", 1)
        )
        # In code that is not overridden here, a worker only uses the target's `model`.
        target = cast(Any, encoder)
        return Networks(target, [], None, 0, columns=(types,), pooler=pooler)

    def _pooler(self, served: Architecture, head: torch.nn.Module | None) -> Pooler:
        # The pooler uses the rows that the family's head was trained on. `token_classify` is left
        # out: in vLLM it is only the head's last layer.
        model = self._config.model_config
        config = model.pooler_config
        assert config is not None
        if head is None:
            return poolers.make(self._config, None)
        if served.family is MODERNBERT:  # its config.json names the rows; vLLM uses only that
            named = str(model.hf_config.classifier_pooling).upper()
            config.seq_pooling_type = cast(Any, named)
        pooler: Any = poolers.make(self._config, head.to(model.head_dtype))
        del pooler.poolers_by_task["token_classify"]
        return cast("Pooler", pooler)

    def specs(self) -> dict[str, KVCacheSpec]:
        return {}

    def pool_size(self, memory: MemoryPlanner, transfer_bytes: int) -> int:
        return 0

    def executor(self) -> EncoderExecutor:
        return EncoderExecutor(self._encoder, self._config.cache_config.block_size)

    def make_runner(self, parts: RunnerParts, graphs: Graphs) -> ModelRunner:
        networks, config = self.networks, self._config.model_config.pooler_config
        assert networks.pooler is not None and config is not None
        return ModelRunner(
            cast(Any, self.executor()),
            parts.requests,
            PoolingHead(networks.pooler, config, parts.requests),
            self._config.scheduler_config.max_num_seqs,
            columns=networks.columns,
            hooks=parts.hooks,
            clock=parts.clock,
        )


class EncoderWorker(MetalWorker):
    """Owns an encoder and its runner. Every step computes whole prompts."""

    @cached_property
    def served(self) -> EncoderModel:
        return EncoderModel(self.vllm_config, self.current_platform.mlx_device)

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        step = partial(profile_step, self.served.executor(), self.vllm_config)
        self._memory.without_pool(self.vllm_config, step)
        super().initialize_from_config(kv_cache_config)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        self._seed()  # the largest step has run
        shutdown.ignore_ctrl_c()
        return CompilationTimes(language_model=0.0, encoder=0.0)
