# SPDX-License-Identifier: Apache-2.0
"""Names of the files and folders of a cache, and how they are made.

<root>/ledger                                        bytes, and the day's writes
<root>/engines/<pid>-<hex>                           locked while that engine runs
<root>/<fingerprint>/manifest.json                   what the fingerprint stands for
<root>/<fingerprint>/<namespace>/<2 hex>/<key>.kv    a block
....kv.<pid>-<hex>.<number>.tmp                      a file that this engine is writing
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LEDGER = "ledger"
ENGINES = "engines"
MANIFEST = "manifest.json"

FINGERPRINT = re.compile(r"[0-9a-f]{2,128}")
NAMESPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
_BLOCK = re.compile(r"((?:[0-9a-f]{2}){1,64})\.kv")
_TEMPORARY = re.compile(r".+\.([0-9]+-[0-9a-f]{8})\.[0-9]+\.tmp")

#: Files count in multiples of it: the block size of APFS and ext4.
_ALLOCATED = 4096


def room_of(size: int) -> int:
    """Bytes that a file of `size` bytes counts for."""
    return -(-size // _ALLOCATED) * _ALLOCATED


@dataclass(frozen=True)
class BlockName:
    """What the path of a block's file says."""

    fingerprint: str
    namespace: str
    key: bytes


def block_path(folder: Path, key: bytes) -> Path:
    """The file of a block in the folder of a namespace."""
    name = key.hex()
    return folder / name[:2] / f"{name}.kv"


def block_name(root: Path, path: Path) -> BlockName | None:
    """Which block a path below the root holds; None: it is not the path of a block."""
    parts = path.relative_to(root).parts
    if len(parts) != 4 or not FINGERPRINT.fullmatch(parts[0]) or not NAMESPACE.fullmatch(parts[1]):
        return None
    key = block_key(parts[3])
    if key is None or parts[2] != parts[3][:2]:
        return None
    return BlockName(parts[0], parts[1], key)


def block_key(file_name: str) -> bytes | None:
    """The key in the name of a block's file; None: it is not the name of one."""
    found = _BLOCK.fullmatch(file_name)
    return None if found is None else bytes.fromhex(found[1])


def namespaces(folder: Path) -> list[str]:
    """The namespaces that the folder of a fingerprint has; none where there is no folder."""
    try:
        return [name for name in os.listdir(folder) if NAMESPACE.fullmatch(name)]
    except OSError:
        return []


def temporary_path(path: Path, engine: str, number: int) -> Path:
    """Where an engine writes what becomes `path`."""
    return path.with_name(f"{path.name}.{engine}.{number}.tmp")


def writer_of(file_name: str) -> str | None:
    """The engine in the name of a temporary file; None: it is not the name of one."""
    found = _TEMPORARY.fullmatch(file_name)
    return None if found is None else found[1]


def fingerprints(root: Path) -> list[str]:
    """Fingerprints that have a folder, sorted.

    Raises:
        OSError: the root cannot be read.
    """
    with os.scandir(root) as entries:
        return sorted(
            entry.name
            for entry in entries
            if FINGERPRINT.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
        )


def manifest_content(fingerprint: str, facts: Mapping[str, Any]) -> bytes:
    """The file of a fingerprint; what JSON does not know becomes text."""
    manifest = {"fingerprint": fingerprint, "facts": dict(facts)}
    return json.dumps(manifest, indent=1, sort_keys=True, default=str).encode() + b"\n"


def read_manifests(root: Path) -> dict[str, Mapping[str, Any]]:
    """Facts by fingerprint; those whose manifest cannot be read are left out."""
    found: dict[str, Mapping[str, Any]] = {}
    with suppress(OSError):
        for fingerprint in fingerprints(root):
            with suppress(OSError, ValueError):
                manifest = json.loads((root / fingerprint / MANIFEST).read_bytes())
                facts = manifest.get("facts") if isinstance(manifest, dict) else None
                if isinstance(facts, dict):
                    found[fingerprint] = facts
    return found


def is_cache(root: Path) -> bool:
    """Whether a folder is the root of a cache: it has a ledger, or a fingerprint's manifest."""
    if not root.is_dir():
        return False
    return (root / LEDGER).is_file() or any(
        (root / fingerprint / MANIFEST).is_file() for fingerprint in fingerprints(root)
    )


def may_be_cache(root: Path) -> bool:
    """Whether a folder is a cache, or empty but for hidden files, which macOS leaves anywhere.

    Raises:
        OSError: it is no folder, or cannot be read.
    """
    return all(name.startswith(".") for name in os.listdir(root)) or is_cache(root)


def is_trusted(status: os.stat_result) -> bool:
    """Whether a file or folder is this process's own user's, or root's, who can do anything.

    Checksums have no key, so blocks of anybody else could be anything.
    """
    return status.st_uid in (os.geteuid(), 0)


def make_folder(root: Path, folder: Path) -> None:
    """Makes `folder`, which is the root or lies below it, with mode 0700 whatever the umask.

    Raises:
        OSError: it cannot be made.
    """
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        if folder == root:
            folder.parent.mkdir(parents=True, exist_ok=True)
            break
        folder = folder.parent
    for made in reversed(missing):
        try:
            os.mkdir(made, 0o700)
        except FileExistsError:
            continue  # another engine made it
        os.chmod(made, 0o700)


def create_file(path: Path, flags: int) -> int:
    """Opens a file, made if it is not there, with mode 0600 whatever the umask; its descriptor.

    Raises:
        OSError: as os.open does.
    """
    descriptor = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(descriptor, 0o600)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
