# SPDX-License-Identifier: Apache-2.0
"""DiskConfig: settings of the prefix cache on disk."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from vllm_metal.kv_transfer.disk import layout
from vllm_metal.kv_transfer.disk.limits import (
    DEFAULT_DAILY_WRITE_BYTES,
    Limits,
    default_max_bytes,
)
from vllm_metal.kv_transfer.store import StoreConfig
from vllm_metal.settings import values

if TYPE_CHECKING:
    from vllm_metal.identity.fingerprint import PoolContent
    from vllm_metal.kv_transfer.disk.stats import DiskStats
    from vllm_metal.kv_transfer.disk.store import DiskStore
    from vllm_metal.kv_transfer.disk.view import DiskView

logger = init_logger(__name__)


@dataclass(frozen=True)
class DiskConfig(StoreConfig):
    """Folder and limits of the prefix cache on disk."""

    name = "disk"
    enabled_by = "'path', the folder of a cache on disk"
    enabling_keys = ("path",)
    readers = MappingProxyType(
        {"path": values.path, "bytes": values.size, "daily_writes": values.daily_size}
    )
    short = MappingProxyType(
        {
            "prefix_cache_dir": "path",
            "prefix_cache_bytes": "bytes",
            "prefix_cache_daily_writes": "daily_writes",
            "prefix_cache_salt_key": "salt_key",
        }
    )

    directory: Path  # absolute
    max_bytes: int  # limit for everything in the folder
    daily_write_bytes: int | None  # per calendar day; None: unlimited

    @classmethod
    def check(cls, given: Mapping[str, Any], role: str, where: str, instead: str | None) -> None:
        """Checks the settings, creates the folder, and warns if it is unsafe or read-only."""
        if "path" in given:
            _prepare(given["path"], where)
        elif alone := [key for key in ("bytes", "daily_writes", "salt_key") if key in given]:
            raise ValueError(f"{where} {alone[0]!r} needs 'path', the folder of the cache on disk")

    @classmethod
    def of(cls, given: Mapping[str, Any], role: str) -> DiskConfig:
        most = given.get("bytes")
        if most is None:  # the default for a full disk is 0, which is not a valid size
            most = max(default_max_bytes(given["path"]), 1)
        daily = given.get("daily_writes", DEFAULT_DAILY_WRITE_BYTES)
        return DiskConfig(given["path"], most, None if daily == values.UNLIMITED else daily)

    def as_json(self) -> dict[str, Any]:
        daily = self.daily_write_bytes
        return {
            "path": str(self.directory),
            "bytes": self.max_bytes,
            "daily_writes": values.UNLIMITED if daily is None else daily,
        }

    @property
    def metrics_type(self) -> type[DiskStats]:
        from vllm_metal.kv_transfer.disk.stats import DiskStats

        return DiskStats

    def open(self, engine_id: str) -> DiskStore:
        from vllm_metal.kv_transfer.disk.store import DiskStore

        store = DiskStore(self.directory, Limits(self.max_bytes, self.daily_write_bytes))
        logger.info(
            "Prefix cache in %s: at most %.3g GB, %s",
            self.directory,
            self.max_bytes / 1e9,
            "no daily write limit"
            if self.daily_write_bytes is None
            else f"at most {self.daily_write_bytes / 1e9:.3g} GB written per day",
        )
        return store

    def view(self, engine_id: str, content: PoolContent, handshake: None) -> DiskView:
        from vllm_metal.kv_transfer.disk.view import DiskView

        return DiskView(self.directory, content)


def _prepare(directory: Path, where: str) -> None:
    """Creates the folder with mode 0700, and warns if it is read-only; ValueError if unusable."""
    setting = f"the folder of the prefix cache (prefix_cache_dir, or 'path' of {where})"
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
            f"{setting}: {directory} contains other files; choose an empty or a new folder"
        )
    found = directory.stat()
    if not layout.is_trusted(found):
        raise ValueError(
            f"{setting}: {directory} belongs to another user (uid {found.st_uid}), who could plant "
            f"blocks there that change answers: name a folder of your own, or run `chown -R "
            f"{os.geteuid()} {directory}`"
        )
    if found.st_mode & 0o022:
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
            "%s is not writable (%s): the prefix cache serves its existing blocks and "
            "stores no new ones",
            directory,
            error.strerror or error,
        )
