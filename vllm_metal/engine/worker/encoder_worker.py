# SPDX-License-Identifier: Apache-2.0
"""EncoderWorker: MetalWorker for encoders, which keep nothing of a text and need no pool."""

from __future__ import annotations

from functools import partial
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
from vllm_metal.engine.pooling.pooling_end import PoolingEnd
from vllm_metal.engine.worker.model_runner import ModelRunner
from vllm_metal.engine.worker.networks import Networks
from vllm_metal.engine.worker.worker import MetalWorker
from vllm_metal.identity import model_files
from vllm_metal.identity.model_files import ModelLoadError
from vllm_metal.patches.vllm_patches import shutdown

if TYPE_CHECKING:
    import torch
    from vllm.model_executor.layers.pooler.abstract import Pooler
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec


class EncoderWorker(MetalWorker):
    """Owns an encoder and its runner. A step's texts are there from beginning to end."""

    @property
    def _encoder(self) -> Encoder:
        return cast(Encoder, self.networks.target)

    def _load(self) -> None:
        model = self.model_config
        served = of_config(self.vllm_config)
        assert served is not None
        dtype = loader.mlx_dtype(self.vllm_config)
        path = model_files.model_folder(model, self.vllm_config)
        overrides = model.hf_overrides if isinstance(model.hf_overrides, dict) else {}
        encoder, head = lazy_encoder(path, served, dtype, overrides)
        try:
            mx.eval(encoder.model.parameters())
        except RuntimeError as error:
            raise ModelLoadError(f"weights in {path} are unreadable: {error}") from error
        pooler = self._pooler(served, head)
        types = TokenTypes(
            self.scheduler_config.max_num_seqs, getattr(model.hf_config, "type_vocab_size", 1)
        )
        # Of the target, MetalWorker asks nothing but the model in what is not overridden here.
        target = cast(Any, encoder)
        self._networks = Networks(target, [], None, 0, columns=(types,), pooler=pooler)
        self._backend = SCATTER  # of which there are none

    def _pooler(self, served: Architecture, head: torch.nn.Module | None) -> Pooler:
        """vLLM's pooler, by the rows that the family's head is for.

        `token_classify` is left out: in vLLM it is the head's last layer alone.
        """
        config = self.model_config.pooler_config
        assert config is not None
        if head is None:
            return poolers.make(self.vllm_config, None)
        if served.family is MODERNBERT:  # its file names the rows, and vLLM follows it alone
            named = str(self.model_config.hf_config.classifier_pooling).upper()
            config.seq_pooling_type = cast(Any, named)
        pooler: Any = poolers.make(self.vllm_config, head.to(self.model_config.head_dtype))
        del pooler.poolers_by_task["token_classify"]
        return cast("Pooler", pooler)

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return {}

    def determine_available_memory(self) -> int:
        """No bytes: there is no pool. vLLM does not ask."""
        return 0

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        executor = self._executor()
        self._memory.without_pool(
            self.vllm_config, partial(profile_step, executor, self.vllm_config)
        )
        super().initialize_from_config(kv_cache_config)

    def _executor(self) -> EncoderExecutor:
        return EncoderExecutor(self._encoder, self.cache_config.block_size)

    def _make_runner(self, graphs: Graphs) -> ModelRunner:
        networks, config = self.networks, self.model_config.pooler_config
        assert networks.pooler is not None and config is not None
        return ModelRunner(
            cast(Any, self._executor()),
            self._requests,
            PoolingEnd(networks.pooler, config, self._requests),
            self.scheduler_config.max_num_seqs,
            columns=networks.columns,
            hooks=self.transfers.hooks,
            clock=self._clock,
        )

    def compile_or_warm_up_model(self) -> CompilationTimes:
        self._seed()  # the largest step has run
        shutdown.ignore_ctrl_c()
        return CompilationTimes(language_model=0.0, encoder=0.0)
