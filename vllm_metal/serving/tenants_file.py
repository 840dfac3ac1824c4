# SPDX-License-Identifier: Apache-2.0
"""Reads and writes the file with the digests of tenants' API keys.

A key has 256 random bits, so a plain SHA-256 protects it: a slow hash helps only secrets that can
be guessed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from vllm_metal.settings.secret_file import write_private

Purpose = Literal["tenant", "metrics"]
#: Tenants' names appear in metric labels, logs and JSON.
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_GENERATION = re.compile(r"(?:[0-9a-f]{16})?")
_ID_DIGITS = 8
_VERSION = 1
_POLL_S = 1.0  # a removed key is rejected within this time; one `stat` per second is cheap


@dataclass(frozen=True)
class Key:
    """An API key's entry in the file."""

    id: str  # 8 hex digits, to refer to the key
    tenant: str
    purpose: Purpose  # "metrics": only for /metrics
    sha256: str  # of the key, in hex
    made: str  # UTC, such as 2026-01-31T12:00:00Z
    generation: str = ""  # 16 random hex digits per tenant; "" in files of older versions

    @property
    def identity(self) -> str:
        """Owner of the tenant's data; differs from that of a removed tenant of the same name."""
        return f"{self.tenant}@{self.generation}" if self.generation else self.tenant


@dataclass(frozen=True)
class Removal:
    keys: list[Key]
    ended: list[Key]  # one key of each tenant that has none left


def read(path: Path) -> list[Key]:
    """Reads a file's keys.

    Raises ValueError if the file is unreadable, accessible to other users, or was not written by
    `vllm-metal tenants`.
    """
    mode, keys = _load(path)
    if mode & 0o077:
        raise ValueError(f"{_describe_mode(path, mode)}: run `chmod 600 {path}`")
    return keys


def _describe_mode(path: Path, mode: int) -> str:
    return (
        f"the file of tenants' keys {path} has the mode {mode:04o}, which gives other users access"
    )


def _load(path: Path) -> tuple[int, list[Key]]:
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            content = file.read()
    except OSError as error:
        raise ValueError(
            f"the file of tenants' keys {path} cannot be read ({error.strerror or error}): make it "
            f"by `vllm-metal tenants add NAME --keys {path}`"
        ) from error
    return mode, _parse(content, path)


def add(path: Path, tenant: str, purpose: Purpose = "tenant") -> tuple[Key, str]:
    """Creates a key for a tenant; returns its entry and the key itself.

    Raises ValueError if the name is invalid or the file cannot be read, OSError if the file cannot
    be written.
    """
    check_name(tenant)
    secret = f"vm-{secrets.token_urlsafe(32)}"
    made = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    with _locked(path):
        keys = read(path) if path.exists() else []
        key = Key(
            secrets.token_hex(_ID_DIGITS // 2),
            tenant,
            purpose,
            digest(secret),
            made,
            _generation(keys, tenant) if purpose == "tenant" else "",
        )
        _write(path, [*keys, key])
    return key, secret


def _generation(keys: Sequence[Key], tenant: str) -> str:
    # All keys of a tenant share one generation.
    others = (key.generation for key in keys if (key.tenant, key.purpose) == (tenant, "tenant"))
    return next(others, secrets.token_hex(8))


def remove(path: Path, which: str) -> Removal:
    """Removes the key with an id, or all keys of a tenant.

    Raises ValueError if there is no such key or the file cannot be read, OSError if the file cannot
    be written.
    """
    with _locked(path):
        keys = read(path)
        removed = [key for key in keys if which in (key.id, key.tenant)]
        if not removed:
            raise ValueError(f"{path} has no key with the id {which!r}, and no tenant of this name")
        remaining = [key for key in keys if key not in removed]
        _write(path, remaining)
    living = {key.identity for key in remaining if key.purpose == "tenant"}
    ended = {key.identity: key for key in removed if key.purpose == "tenant"}
    return Removal(removed, [key for identity, key in ended.items() if identity not in living])


def check_name(tenant: str) -> None:
    """Raises ValueError if `tenant` is not a valid name."""
    if NAME.fullmatch(tenant) is None:
        raise ValueError(
            f"{tenant!r} is not a valid tenant name: write up to 63 of a-z, 0-9, '.', '_' and '-'"
        )


def digest(secret: str) -> str:
    """Returns SHA-256 of a key, in hex."""
    return hashlib.sha256(secret.encode(errors="surrogatepass")).hexdigest()


class KeyFile:
    """The current keys of a file, which is read again when it changes.

    If the file becomes unreadable, the keys stay as they were. If it becomes accessible to other
    users, only removals of keys take effect. Both are logged once.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Reads the file; raises ValueError as `read` does. `clock` is in seconds."""
        self._path, self._clock = path, clock
        self._seen = self._state()
        self._keys = _by_digest(read(path))
        self._next_check = clock() + _POLL_S

    def find(self, secret: str) -> Key | None:
        """Returns an API key's entry; None if it is unknown."""
        if self._clock() >= self._next_check:
            self._reload_if_changed()
        # Timing of this lookup reveals something about the digest, but not about the key.
        return self._keys.get(digest(secret))

    def _reload_if_changed(self) -> None:
        self._next_check = self._clock() + _POLL_S
        state = self._state()
        if state == self._seen:
            return
        self._seen = state
        try:
            mode, found = _load(self._path)
        except ValueError as error:
            _warn(f"{error}. The keys stay as they were before.")
            return
        keys = _by_digest(found)
        if mode & 0o077:
            _warn(
                f"{_describe_mode(self._path, mode)}. Removed keys are rejected, and new keys are "
                f"ignored until you run `chmod 600 {self._path}`."
            )
            keys = {known: key for known, key in self._keys.items() if keys.get(known) == key}
        self._keys = keys

    def _state(self) -> tuple[int, ...]:
        try:
            found = self._path.stat()
        except OSError:
            return ()
        return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino, found.st_mode


def _warn(text: str) -> None:
    # Imported here to keep `vllm-metal tenants` fast, which never gets here.
    from vllm.logger import init_logger

    init_logger(__name__).warning("%s", text)


def _by_digest(keys: Sequence[Key]) -> dict[str, Key]:
    return {key.sha256: key for key in keys}


def _parse(content: bytes, path: Path) -> list[Key]:
    try:
        found = json.loads(content)
        if not isinstance(found, dict) or found.get("version") != _VERSION:
            raise ValueError
        keys = [Key(**entry) for entry in found["keys"]]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} was not written by `vllm-metal tenants add`") from error
    for key in keys:
        named = isinstance(key.tenant, str) and NAME.fullmatch(key.tenant)
        hashed = isinstance(key.sha256, str) and _DIGEST.fullmatch(key.sha256)
        known = isinstance(key.generation, str) and _GENERATION.fullmatch(key.generation)
        if not named or not hashed or not known or key.purpose not in ("tenant", "metrics"):
            raise ValueError(
                f"{path} was not written by `vllm-metal tenants add`: see key {key.id!r}"
            )
    return keys


def _write(path: Path, keys: Sequence[Key]) -> None:
    text = json.dumps({"version": _VERSION, "keys": [asdict(key) for key in keys]}, indent=1)
    write_private(path, f"{text}\n")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    # The folder is locked, not the file: writing replaces the file.
    handle = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
