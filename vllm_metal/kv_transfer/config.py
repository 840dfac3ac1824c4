# SPDX-License-Identifier: Apache-2.0
"""Settings of K/V transfer, and the changes they make to vLLM's configuration.

The long form is vLLM's `--kv-transfer-config` with the connector `MetalKVConnector`. Some stores
also have a short form: `--additional-config '{"prefix_cache_dir": ...}'`. Both are completed to the
long form with absolute values, which the engine's process reads again. Each store's folder has its
own settings; `registry.py` lists the stores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vllm_metal.kv_transfer.registry import STORES
from vllm_metal.kv_transfer.store import StoreConfig, view_of
from vllm_metal.patches.vllm_patches import engine_wake
from vllm_metal.settings import salts, secret_file, values
from vllm_metal.settings.additional_config import OPTION, AdditionalConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

CONNECTOR = "MetalKVConnector"
CONNECTOR_MODULE = "vllm_metal.kv_transfer.connector"
SPEC = "MetalOffloadingSpec"
#: vLLM's default pickles, and equal texts can pickle differently, depending on shared strings.
HASH_ALGORITHM: Literal["sha256_cbor"] = "sha256_cbor"
EXTRA = "--kv-transfer-config kv_connector_extra_config"


def _only(expected: str | int, why: str = "") -> values.Reader:
    def read(value: Any) -> str | int:
        if isinstance(value, bool) or value != expected:
            raise ValueError(f"must be {expected!r}{why}, not {value!r}")
        return expected

    return read


def _tokens(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"must be a number of tokens, not {value!r}")
    return value


_READERS: dict[str, values.Reader] = {
    "salt_key": values.path,
    "offload_prompt_only": values.flag,
    "blocks_per_chunk": _only(1, ", as each block is kept by itself"),
    "block_size": _tokens,
    "spec_name": _only(SPEC),
}
for _store in STORES:
    _READERS |= _store.readers


@dataclass(frozen=True)
class TransferConfig:
    """The connector's settings from --kv-transfer-config."""

    engine_id: str  # unique per engine start
    stores: Mapping[str, StoreConfig]  # by name, in reading order
    salt_key: Path | None  # secret file for derived salts; None: salted texts are not stored

    @staticmethod
    def of(vllm_config: VllmConfig) -> TransferConfig | None:
        """Reads a completed configuration (`complete_kv_transfer`); None without a connector."""
        transfer = vllm_config.kv_transfer_config
        if transfer is None or transfer.kv_connector is None:
            return None
        assert transfer.engine_id is not None and transfer.kv_role is not None  # vLLM sets both
        given = values.read(transfer.kv_connector_extra_config, _READERS, EXTRA)
        stores = _stores(given, transfer.kv_role)
        return TransferConfig(transfer.engine_id, stores, given.get("salt_key"))

    def read_salt_key(self) -> bytes | None:
        """Reads the secret that derives tenants' salts; None without one, ValueError if invalid."""
        if self.salt_key is None:
            return None
        return secret_file.read(self.salt_key, salts.SALT_KEY)


def is_enabled(vllm_config: VllmConfig | EngineArgs) -> bool:
    """Returns whether the configuration, in either form, enables a store outside the pool."""
    short = AdditionalConfig.of(vllm_config)
    by_us = any(getattr(short, key) is not None for kind in STORES for key in kind.short)
    return by_us or vllm_config.kv_transfer_config is not None


def metric_types_of(vllm_config: VllmConfig) -> dict[str, type]:
    """Returns the metric dataclasses of transfers by source; see `PageStore.metrics`."""
    config = TransferConfig.of(vllm_config)
    if config is None:
        return {}
    from vllm_metal.kv_transfer.page_store import TRANSFERS, TransferStats

    views = {view_of(name): store.view_metrics_type for name, store in config.stores.items()}
    return (
        {name: store.metrics_type for name, store in config.stores.items()}
        | {whose: kind for whose, kind in views.items() if kind is not None}
        | {TRANSFERS: TransferStats}
    )


def _stores(given: Mapping[str, Any], role: str) -> dict[str, StoreConfig]:
    return {kind.name: kind.of(given, role) for kind in STORES if kind.is_enabled(given)}


def complete_kv_transfer(vllm_config: VllmConfig) -> None:
    """Completes vLLM's configuration with the connector and the hash algorithm that it needs.

    Idempotent, since vLLM checks the configuration again in the engine's process.

    Raises ValueError: settings conflict or are not supported; the message names the setting.
    """
    _expand_short_form(vllm_config)
    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        return
    transfer.kv_connector_module_path = CONNECTOR_MODULE
    given = values.read(transfer.kv_connector_extra_config, _READERS, EXTRA)
    assert transfer.kv_role is not None  # vLLM requires it
    _check_cache(vllm_config, given)
    _check_stores(transfer.kv_role, given)
    _check_process(vllm_config, given)
    complete = {"spec_name": SPEC, "offload_prompt_only": given.get("offload_prompt_only", False)}
    if "salt_key" in given:
        secret_file.read(given["salt_key"], salts.SALT_KEY)
        complete["salt_key"] = str(given["salt_key"])
    for config in _stores(given, transfer.kv_role).values():
        complete |= config.as_json()
    transfer.kv_connector_extra_config = complete
    vllm_config.cache_config.prefix_caching_hash_algo = HASH_ALGORITHM


def _expand_short_form(vllm_config: VllmConfig) -> None:
    from vllm.config import KVTransferConfig

    # Only the long form is left, as the engine's process runs this again.
    short, given = AdditionalConfig.of(vllm_config), vllm_config.additional_config
    keys = {key: other for kind in STORES for key, other in kind.short.items()}
    extra = {other: getattr(short, key) for key, other in keys.items()}
    extra = {key: value for key, value in extra.items() if value is not None}
    if not extra:
        return
    assert isinstance(given, dict)  # since it had one of the keys
    if vllm_config.kv_transfer_config is not None:
        raise ValueError(
            f"{OPTION} {next(key for key in keys if key in given)!r} and --kv-transfer-config both "
            "set up a cache: leave one of them out"
        )
    vllm_config.kv_transfer_config = KVTransferConfig(
        kv_connector=CONNECTOR,
        kv_connector_module_path=CONNECTOR_MODULE,
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config=extra,
    )
    vllm_config.additional_config = {k: value for k, value in given.items() if k not in keys}


def _check_stores(role: str, given: Mapping[str, Any]) -> None:
    for kind in STORES:
        others = [other for other in STORES if other is not kind]
        instead = None
        if not any(other.is_enabled(given) for other in others):
            instead = " or ".join(other.enabled_by for other in others)
        kind.check(given, role, EXTRA, instead)
    if not any(kind.is_enabled(given) for kind in STORES):
        raise ValueError(f"{EXTRA} lacks {', or '.join(kind.enabled_by for kind in STORES)}")


def _check_process(vllm_config: VllmConfig, given: Mapping[str, Any]) -> None:
    if not any(store.shares_pool for store in _stores(given, "kv_both").values()):
        return
    if vllm_config.parallel_config.distributed_executor_backend != "uni":
        raise ValueError(
            f"{EXTRA} 'share' needs the engine and its worker in one process: leave out "
            "--distributed-executor-backend, or 'share'"
        )
    engine_wake.let_connectors_wake()  # engines must notice when peers ask for pages of the pool


def _check_cache(vllm_config: VllmConfig, given: Mapping[str, Any]) -> None:
    cache = vllm_config.cache_config
    if not cache.enable_prefix_caching:
        raise ValueError(
            "a prefix cache on disk or on peers (prefix_cache_dir, --kv-transfer-config) "
            "needs prefix caching: leave out --no-enable-prefix-caching "
            "(enable_prefix_caching=False)"
        )
    if cache.prefix_caching_hash_algo.startswith("xxhash"):
        raise ValueError(
            f"--prefix-caching-hash-algo {cache.prefix_caching_hash_algo} is not supported "
            "with a prefix cache on disk or on peers (prefix_cache_dir, "
            "--kv-transfer-config): it is not a cryptographic hash, so a prompt can be "
            "made to collide with another one, and its seed changes with each process. "
            f"Choose {HASH_ALGORITHM}"
        )
    tokens = given.get("block_size", cache.block_size)
    if tokens != cache.block_size:
        raise ValueError(
            f"{EXTRA} 'block_size' {tokens} must equal the block size of the KV cache, "
            f"{cache.block_size}: leave it out, or set --block-size"
        )
