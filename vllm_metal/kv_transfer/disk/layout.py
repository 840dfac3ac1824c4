# SPDX-License-Identifier: Apache-2.0
"""Names of a cache's files and folders, and functions that create them.

<root>/ledger                                        size, and the bytes written today
<root>/engines/<pid>-<hex>                           locked while that engine runs
<root>/<fingerprint>/manifest.json                   explains the fingerprint
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

#: File sizes are rounded up to this, the block size of APFS and ext4.
_ALLOCATED = 4096


def bytes_on_disk(size: int) -> int:
    """Returns the bytes on disk of a file of `size` bytes."""
    return -(-size // _ALLOCATED) * _ALLOCATED


@dataclass(frozen=True)
class BlockName:
    """The parts of a block file's path."""

    fingerprint: str
    namespace: str
    key: bytes


def block_path(folder: Path, key: bytes) -> Path:
    """Returns the file of a block in a namespace's folder."""
    name = key.hex()
    return folder / name[:2] / f"{name}.kv"


def block_name(root: Path, path: Path) -> BlockName | None:
    """Parses a path below the root; None if it is not a block's."""
    parts = path.relative_to(root).parts
    if len(parts) != 4 or not FINGERPRINT.fullmatch(parts[0]) or not NAMESPACE.fullmatch(parts[1]):
        return None
    key = block_key(parts[3])
    if key is None or parts[2] != parts[3][:2]:
        return None
    return BlockName(parts[0], parts[1], key)


def block_key(file_name: str) -> bytes | None:
    """Returns the key in a block file's name; None for names of other files."""
    found = _BLOCK.fullmatch(file_name)
    return None if found is None else bytes.fromhex(found[1])


def namespaces(folder: Path) -> list[str]:
    """Returns the namespaces in a fingerprint's folder, which may be missing."""
    try:
        return [name for name in os.listdir(folder) if NAMESPACE.fullmatch(name)]
    except OSError:
        return []


def temporary_path(path: Path, engine: str, number: int) -> Path:
    """Returns where an engine writes a file before it is renamed to `path`."""
    return path.with_name(f"{path.name}.{engine}.{number}.tmp")


def writer_of(file_name: str) -> str | None:
    """Returns the engine in a temporary file's name; None for names of other files."""
    found = _TEMPORARY.fullmatch(file_name)
    return None if found is None else found[1]


def fingerprints(root: Path) -> list[str]:
    """Returns the fingerprints that have a folder, sorted; raises OSError if unreadable."""
    with os.scandir(root) as entries:
        return sorted(
            entry.name
            for entry in entries
            if FINGERPRINT.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
        )


def manifest_content(fingerprint: str, facts: Mapping[str, Any]) -> bytes:
    """Returns a manifest's contents; values that JSON cannot express become text."""
    manifest = {"fingerprint": fingerprint, "facts": dict(facts)}
    return json.dumps(manifest, indent=1, sort_keys=True, default=str).encode() + b"\n"


def read_manifests(root: Path) -> dict[str, Mapping[str, Any]]:
    """Returns the facts of each fingerprint whose manifest is readable."""
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
    """Returns whether a folder is a cache: it has a ledger, or a fingerprint's manifest."""
    if not root.is_dir():
        return False
    return (root / LEDGER).is_file() or any(
        (root / fingerprint / MANIFEST).is_file() for fingerprint in fingerprints(root)
    )


def may_be_cache(root: Path) -> bool:
    """Returns whether a folder is a cache or has only hidden files; OSError if unreadable."""
    # macOS leaves hidden files in any folder.
    return all(name.startswith(".") for name in os.listdir(root)) or is_cache(root)


def is_trusted(status: os.stat_result) -> bool:
    """Returns whether a file or folder belongs to this user or root."""
    # Checksums have no secret key, so anyone else's blocks could hold anything.
    return status.st_uid in (os.geteuid(), 0)


def make_folder(root: Path, folder: Path) -> None:
    """Creates `folder`, at or below the root, with mode 0700 whatever the umask; or OSError."""
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
    """Opens a file, created if missing, with mode 0600 whatever the umask; raises as os.open."""
    descriptor = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(descriptor, 0o600)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
