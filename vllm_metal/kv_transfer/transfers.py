# SPDX-License-Identifier: Apache-2.0
"""ConfiguredTransfers: the worker's interface to K/V transfer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from metal_kernels.cache import cache_dir
from vllm_metal.engine.worker.step_hooks import NO_HOOKS, StepHooks
from vllm_metal.identity import weights_digest
from vllm_metal.identity.fingerprint import Fingerprint
from vllm_metal.kv_transfer.config import TransferConfig
from vllm_metal.kv_transfer.page_store import PageStore
from vllm_metal.kv_transfer.transfer_hooks import TransferHooks, staging_bytes

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from vllm_metal.kv_transfer.messages import TransferHandshake


class ConfiguredTransfers:
    """Makes the transfer hooks from the settings; does nothing without such settings."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        """`vllm_config`: as checked and completed by the platform."""
        self._vllm_config = vllm_config
        self._config = TransferConfig.of(vllm_config)
        self._weights: Mapping[str, str] = {}  # digests of the loaded networks
        #: Called around each step; they do nothing if K/V stay in the pool.
        self.hooks: TransferHooks | StepHooks = NO_HOOKS

    @property
    def memory_bytes(self) -> int:
        """Limit of the memory for K/V transfer: staged pages, and the stores' memory."""
        if self._config is None:
            return 0
        stores = sum(store.memory_bytes for store in self._config.stores.values())
        return staging_bytes(self._is_waited_for) + stores

    @property
    def _is_waited_for(self) -> bool:
        assert self._config is not None
        return any(store.is_waited_for for store in self._config.stores.values())

    def weights_loaded(self) -> None:
        """Notes the digests of the weights that were just read, as the files may change later."""
        if self._config is not None:
            memo = cache_dir() / "weights" / "digests.json"
            self._weights = weights_digest.of_networks(self._vllm_config, memo)

    def open(self, kv_cache_config: KVCacheConfig, pool: str) -> None:
        """Opens the configured stores; `pool`: what computes on the K/V, "scatter" or "kernels"."""
        config = self._config
        if config is None:
            return
        stores = {name: store.open(config.engine_id) for name, store in config.stores.items()}
        self.hooks = TransferHooks(
            PageStore(stores),
            lambda: Fingerprint.of(self._vllm_config, kv_cache_config, self._weights, pool),
            self._vllm_config.cache_config.block_size,
            self._is_waited_for,
        )

    def handshake(self) -> dict[tuple[int, int], TransferHandshake] | None:
        """Returns the connector's handshake data by (pipeline rank, tensor rank)."""
        if not isinstance(self.hooks, TransferHooks):
            return None
        return {(0, 0): self.hooks.store.handshake()}

    def close(self) -> None:
        """Ends the threads, after the pool is gone."""
        if isinstance(self.hooks, TransferHooks):
            self.hooks.close()
