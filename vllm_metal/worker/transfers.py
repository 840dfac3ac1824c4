# SPDX-License-Identifier: Apache-2.0
"""Opens what K/V are kept in outside the pool, and asked of: a folder, other engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from vllm_metal.kv_transfer.config import PrefixCacheConfig, TransferConfig
from vllm_metal.kv_transfer.disk.disk_cache import DiskCache
from vllm_metal.kv_transfer.disk.limits import Limits
from vllm_metal.kv_transfer.fingerprint import Fingerprint
from vllm_metal.kv_transfer.page_store import PageStore
from vllm_metal.kv_transfer.peer_config import PeerConfig
from vllm_metal.kv_transfer.peering import Peering
from vllm_metal.worker.transfer_hooks import TransferHooks

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)


def open_transfers(
    vllm_config: VllmConfig, fingerprint: Callable[[], Fingerprint], block_size: int
) -> TransferHooks | None:
    """What moves blocks out of the pool and back; None where the user asked for nothing.

    Args:
        vllm_config: vLLM's.
        fingerprint: what K/V are kept under from now on.
        block_size: tokens of a block.
    """
    config = TransferConfig.of(vllm_config)
    if config is None:
        return None
    disk = None if config.disk is None else _open_disk(config.disk)
    peering = None if config.peers is None else _open_peering(config.peers, vllm_config)
    store = PageStore(fingerprint(), disk, peering)
    return TransferHooks(store, fingerprint, block_size)


def _open_disk(config: PrefixCacheConfig) -> DiskCache:
    limits = Limits(config.max_bytes, config.daily_write_bytes)
    cache = DiskCache(config.directory, limits)
    logger.info(
        "The prefix cache is kept in %s: %.3g GB at most, %s",
        config.directory,
        config.max_bytes / 1e9,
        "however much is written a day"
        if config.daily_write_bytes is None
        else f"{config.daily_write_bytes / 1e9:.3g} GB written a day at most",
    )
    return cache


def _open_peering(config: PeerConfig, vllm_config: VllmConfig) -> Peering:
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None and transfer.engine_id is not None  # vLLM makes one up
    peering = Peering(config, transfer.engine_id)
    if peering.address is not None:
        logger.info(
            "Other engines may ask for K/V at %s, of %.3g GB at most",
            peering.address,
            config.outbox_bytes / 1e9,
        )
    if config.peers:
        logger.info("K/V are asked of %s", ", ".join(map(str, config.peers)))
    return peering
