# SPDX-License-Identifier: Apache-2.0
"""Transfers: all that the worker asks for where K/V may leave the pool."""

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
    """Makes the hooks that move K/V, from the settings; does nothing where none were given."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        """
        Args:
            vllm_config: vLLM's, after the platform's check.
        """
        self._vllm_config = vllm_config
        self._config = TransferConfig.of(vllm_config)
        self._weights: Mapping[str, str] = {}  # digests of the networks that are loaded
        #: To be called around each step; they do nothing where K/V stay in the pool.
        self.hooks: TransferHooks | StepHooks = NO_HOOKS

    @property
    def memory_bytes(self) -> int:
        """Memory that it takes at most: staging, and what stores keep there."""
        if self._config is None:
            return 0
        stores = sum(store.memory_bytes for store in self._config.stores.values())
        return staging_bytes(self._is_waited_for) + stores

    @property
    def _is_waited_for(self) -> bool:
        assert self._config is not None
        return any(store.is_waited_for for store in self._config.stores.values())

    def weights_loaded(self) -> None:
        """Notes which weights were just read. Later, the files may be others."""
        if self._config is not None:
            memo = cache_dir() / "weights" / "digests.json"
            self._weights = weights_digest.of_networks(self._vllm_config, memo)

    def open(self, kv_cache_config: KVCacheConfig, pool: str) -> None:
        """Opens the stores that were asked for.

        Args:
            kv_cache_config: of the pool.
            pool: who computes on it, "scatter" or "kernels".
        """
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
        """What the scheduler's connector gets at its start, by (pipeline rank, tensor rank)."""
        if not isinstance(self.hooks, TransferHooks):
            return None
        return {(0, 0): self.hooks.store.handshake()}

    def close(self) -> None:
        """Ends the threads; there is no pool any more."""
        if isinstance(self.hooks, TransferHooks):
            self.hooks.close()
