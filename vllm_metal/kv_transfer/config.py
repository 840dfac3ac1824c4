# SPDX-License-Identifier: Apache-2.0
"""The settings of K/V that leave the pool, and what they change of vLLM.

vLLM's way is `--kv-transfer-config` with the connector `MetalKVConnector`. A prefix cache on disk
has a short one, too: `--additional-config '{"prefix_cache_dir": ...}'`. Both end as vLLM's, every
value read and absolute, which goes to the engine's process and is read there.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vllm.logger import init_logger

from vllm_metal.kv_transfer import peer_config
from vllm_metal.kv_transfer.disk import layout
from vllm_metal.kv_transfer.disk.limits import DEFAULT_DAILY_WRITE_BYTES, default_max_bytes
from vllm_metal.kv_transfer.peer_config import PeerConfig
from vllm_metal.settings import salts, secret_file, values
from vllm_metal.settings.additional_config import OPTION, PREFIX_CACHE_KEYS, AdditionalConfig

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig

logger = init_logger(__name__)

CONNECTOR = "MetalKVConnector"
CONNECTOR_MODULE = "vllm_metal.kv_transfer.connector"
SPEC = "MetalOffloadingSpec"
#: vLLM's default pickles, and equal texts can have different pickles: by which strings are shared.
HASH_ALGORITHM: Literal["sha256_cbor"] = "sha256_cbor"
EXTRA = "--kv-transfer-config kv_connector_extra_config"


def _text(expected: str) -> values.Reader:
    def read(value: Any) -> str:
        if value != expected:
            raise ValueError(f"must be {expected!r}, not {value!r}")
        return expected

    return read


def _one(value: Any) -> int:
    if isinstance(value, bool) or value != 1:
        raise ValueError(f"must be 1, as each block is kept by itself, not {value!r}")
    return 1


def _tokens(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"must be a number of tokens, not {value!r}")
    return value


_READERS: Mapping[str, values.Reader] = {
    "path": values.path,
    "bytes": values.size,
    "daily_writes": values.daily_size,
    "salt_key": values.path,
    "offload_prompt_only": values.flag,
    "blocks_per_chunk": _one,
    "block_size": _tokens,
    "spec_name": _text(SPEC),
    "listen": peer_config.address,
    "peers": peer_config.addresses,
    "secret": values.path,
    "outbox_bytes": values.size,
}
#: Keys that need "path".
_OF_DISK = ("bytes", "daily_writes", "salt_key")


@dataclass(frozen=True)
class PrefixCacheConfig:
    """What of --kv-transfer-config is about the cache on disk."""

    directory: Path  # absolute
    max_bytes: int  # of all that the folder holds
    daily_write_bytes: int | None  # in a calendar day; None: no limit
    salt_key: Path | None  # file of the secret of derived salts; None: salted requests are not kept


@dataclass(frozen=True)
class TransferConfig:
    """What the connector reads of --kv-transfer-config."""

    disk: PrefixCacheConfig | None
    peers: PeerConfig | None

    @staticmethod
    def of(vllm_config: VllmConfig) -> TransferConfig | None:
        """Of a configuration that `settle_kv_transfer` has seen; None: no connector is on."""
        transfer = vllm_config.kv_transfer_config
        if transfer is None or transfer.kv_connector is None:
            return None
        given = values.read(transfer.kv_connector_extra_config, _READERS, EXTRA)
        disk = None
        if "path" in given:
            daily = given["daily_writes"]
            disk = PrefixCacheConfig(
                directory=given["path"],
                max_bytes=given["bytes"],
                daily_write_bytes=None if daily == values.UNLIMITED else daily,
                salt_key=given.get("salt_key"),
            )
        return TransferConfig(disk, PeerConfig.of(given))


def settle_kv_transfer(vllm_config: VllmConfig) -> None:
    """Makes vLLM's configuration whole: the connector, and the hashes that it needs.

    vLLM checks a configuration again in the engine's process; a settled one stays as it is.

    Raises:
        ValueError: the settings contradict each other or cannot be honoured, the folder cannot be
            made, or the file of the salts' key cannot be used. The message names the setting.
    """
    short, given = AdditionalConfig.of(vllm_config), vllm_config.additional_config
    transfer = vllm_config.kv_transfer_config
    if short.prefix_cache_dir is not None:
        if transfer is not None:
            raise ValueError(
                f"{OPTION} 'prefix_cache_dir' and --kv-transfer-config both set up a cache: leave "
                "one of them out"
            )
        vllm_config.kv_transfer_config = transfer = _of_short_way(short)
        assert isinstance(given, dict)  # else it could not have had the key
        # Only one way is left for the engine's process, which settles again.
        vllm_config.additional_config = {
            key: value for key, value in given.items() if key not in PREFIX_CACHE_KEYS
        }
    if transfer is None:
        return
    transfer.kv_connector_module_path = CONNECTOR_MODULE
    extra = values.read(transfer.kv_connector_extra_config, _READERS, EXTRA)
    assert transfer.kv_role is not None  # vLLM asks for it
    peer_config.check(transfer.kv_role, extra, EXTRA)
    _check_disk(extra)
    _check_cache(vllm_config, extra)
    if "path" in extra:
        _prepare(extra["path"])
    if "salt_key" in extra:
        secret_file.read(extra["salt_key"], salts.SALT_KEY)
    transfer.kv_connector_extra_config = _settled(extra)
    vllm_config.cache_config.prefix_caching_hash_algo = HASH_ALGORITHM


def _of_short_way(short: AdditionalConfig) -> KVTransferConfig:
    from vllm.config import KVTransferConfig

    extra = {
        "path": short.prefix_cache_dir,
        "bytes": short.prefix_cache_bytes,
        "daily_writes": short.prefix_cache_daily_writes,
        "salt_key": short.prefix_cache_salt_key,
    }
    return KVTransferConfig(
        kv_connector=CONNECTOR,
        kv_connector_module_path=CONNECTOR_MODULE,
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={k: v for k, v in extra.items() if v is not None},
    )


def _settled(given: Mapping[str, Any]) -> dict[str, Any]:
    """The same as JSON has it, with every default."""
    settled: dict[str, Any] = {
        "spec_name": SPEC,
        "offload_prompt_only": given.get("offload_prompt_only", False),
    }
    if "path" in given:
        max_bytes = given.get("bytes")
        if max_bytes is None:  # of a full disk the default is 0, which is no size
            max_bytes = max(default_max_bytes(given["path"]), 1)
        settled |= {
            "path": str(given["path"]),
            "bytes": max_bytes,
            "daily_writes": given.get("daily_writes", DEFAULT_DAILY_WRITE_BYTES),
        }
    if "salt_key" in given:
        settled["salt_key"] = str(given["salt_key"])
    peers = PeerConfig.of(given)
    return settled if peers is None else settled | peers.settled()


def _check_disk(given: Mapping[str, Any]) -> None:
    """Raises where there is nowhere to keep K/V, or a key of a disk without one."""
    if "path" in given:
        return
    if not {"listen", "peers"} & given.keys():
        raise ValueError(
            f"{EXTRA} lacks 'path', the folder of a cache on disk, or 'listen' and 'peers', the "
            "addresses of engines that hand each other K/V"
        )
    if alone := [key for key in _OF_DISK if key in given]:
        raise ValueError(f"{EXTRA} {alone[0]!r} needs 'path', the folder of the cache on disk")


def _check_cache(vllm_config: VllmConfig, given: Mapping[str, Any]) -> None:
    """Raises where the cache in memory does not allow K/V to leave it."""
    cache = vllm_config.cache_config
    if not cache.enable_prefix_caching:
        raise ValueError(
            "K/V on disk or of other engines (prefix_cache_dir, --kv-transfer-config) need prefix "
            "caching: leave out --no-enable-prefix-caching (enable_prefix_caching=False)"
        )
    if cache.prefix_caching_hash_algo.startswith("xxhash"):
        raise ValueError(
            f"--prefix-caching-hash-algo {cache.prefix_caching_hash_algo} does not go with K/V on "
            "disk or of other engines (prefix_cache_dir, --kv-transfer-config): it is no "
            "cryptographic hash, so a text can be made that hashes like another's, and its seed "
            f"changes with each process; choose {HASH_ALGORITHM}"
        )
    tokens = given.get("block_size", cache.block_size)
    if tokens != cache.block_size:
        raise ValueError(
            f"{EXTRA} 'block_size' {tokens} must be the cache's, {cache.block_size}, as each block "
            "is kept by itself: leave it out, or set --block-size"
        )


def _prepare(directory: Path) -> None:
    """Makes the folder, for its owner alone; warns where nothing can be written to it.

    Raises:
        ValueError: it cannot be made or read, is a file, or holds other things than a cache.
    """
    setting = f"the folder of the prefix cache (prefix_cache_dir, or 'path' of {EXTRA})"
    try:
        if directory.exists() and not directory.is_dir():
            raise ValueError(f"{setting}: {directory} is a file; name a folder")
        layout.make_folder(directory, directory)
        ours = layout.may_be_cache(directory)
    except OSError as error:
        raise ValueError(
            f"{setting}: {error.filename or directory} cannot be used ({error.strerror or error}); "
            "name a folder that you may read and write"
        ) from error
    if not ours:
        raise ValueError(
            f"{setting}: {directory} holds other things; name an empty folder, or a new one"
        )
    if directory.stat().st_mode & 0o022:
        logger.warning(
            "%s can be written to by other users, who could plant blocks there that change "
            "answers: run `chmod go-w %s`",
            directory,
            directory,
        )
    try:
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        logger.warning(
            "%s cannot be written to (%s): the prefix cache serves what is there, and keeps "
            "nothing new",
            directory,
            error.strerror or error,
        )
