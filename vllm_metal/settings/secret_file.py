# SPDX-License-Identifier: Apache-2.0
"""Reads secrets that users keep in files, and writes files that only their owner may read."""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

#: Bytes that a secret must have; 128 bits where they are random. RFC 2104, section 3, advises 32.
MIN_BYTES = 16


def read(path: Path, setting: str) -> bytes:
    """The secret in a file, white space around it left out.

    Args:
        path: of the file.
        setting: that names it, for messages.

    Raises:
        ValueError: the file cannot be read, others than its owner may read or write it, or it holds
            fewer than 16 bytes. The message names the setting.
    """
    named = f"{setting}: {path}"
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            secret = file.read().strip()
    except OSError as error:
        raise ValueError(f"{named} cannot be read ({error.strerror or error})") from error
    if mode & 0o077:
        raise ValueError(
            f"{named} holds a secret, but its mode {mode:04o} gives other users access: "
            f"run `chmod 600 {path}`"
        )
    if len(secret) < MIN_BYTES:
        raise ValueError(
            f"{named} holds {len(secret)} bytes, and a secret needs {MIN_BYTES}: make one by "
            f"`openssl rand -hex 32 > {path}`"
        )
    return secret


def read_or_make(path: Path, setting: str) -> bytes:
    """The secret in a file, as `read`; where there is none, one is made, of 256 random bits.

    Raises:
        ValueError: as `read`.
        OSError: the file cannot be made.
    """
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Another process may make it at the same time.
        write_private(path, f"{secrets.token_hex(32)}\n", replace=False)
    return read(path, setting)


def write_private(path: Path, text: str, replace: bool = True) -> None:
    """Writes a file for its owner alone. Whoever reads it finds all of it, or none.

    Args:
        path: of the file.
        text: its content.
        replace: whether a file that is there makes room; else it stays, and nothing is written.

    Raises:
        OSError: the file cannot be written.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
    try:
        with open(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if replace:
            os.replace(name, path)
        else:
            with suppress(FileExistsError):
                os.link(name, path)
    finally:
        Path(name).unlink(missing_ok=True)
