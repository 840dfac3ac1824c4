# SPDX-License-Identifier: Apache-2.0
"""Reads secrets from files, and writes files that only their owner may read."""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

#: Minimum bytes of a secret: 128 bits if they are random. RFC 2104, section 3, advises 32 bytes.
MIN_BYTES = 16


def read(path: Path, setting: str) -> bytes:
    """Returns the secret in a file, stripped of white space.

    Raises ValueError, naming `setting`, if the file cannot be read, holds fewer than 16 bytes, or
    users other than its owner may read or write it.
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
            f"{named} holds {len(secret)} bytes, but a secret needs {MIN_BYTES}: create one with "
            f"`openssl rand -hex 32 > {path}`"
        )
    return secret


def read_or_make(path: Path, setting: str) -> bytes:
    """Like `read`, but creates a missing file with 256 random bits; may raise OSError."""
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Another process may create it at the same time; the first file stays.
        write_private(path, f"{secrets.token_hex(32)}\n", replace=False)
    return read(path, setting)


def write_private(path: Path, text: str, replace: bool = True) -> None:
    """Writes a file for its owner alone, atomically.

    If `replace` is false, an existing file stays. Raises OSError if the file cannot be written.
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
            with suppress(FileExistsError):  # unlike a rename, a link never overwrites
                os.link(name, path)
    finally:
        Path(name).unlink(missing_ok=True)
