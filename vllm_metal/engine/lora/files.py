# SPDX-License-Identifier: Apache-2.0
"""Finds the files of an adapter, reads them, and names their content by a digest; without MLX."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from vllm.exceptions import LoRAAdapterNotFoundError

CONFIG = "adapter_config.json"
#: PEFT's two formats, then mlx-lm's; the first that is there is read.
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapters.safetensors")


class AdapterError(ValueError):
    """An adapter that cannot be served as it is; the message names it, and what is wrong."""

    def __init__(self, adapter: str, problem: str) -> None:
        super().__init__(f"LoRA adapter {adapter!r} {problem}")


@dataclass(frozen=True)
class AdapterFiles:
    """Where an adapter lies."""

    name: str
    config: Path
    weights: Path

    @staticmethod
    def find(name: str, path: str) -> AdapterFiles:
        """The files of a folder, or of a repository of the hub, which is fetched.

        Args:
            name: of the adapter, for messages.
            path: as a user wrote it.

        Raises:
            LoRAAdapterNotFoundError: there is no such folder, and the hub has none of that name.
            AdapterError: the folder has no adapter.
        """
        folder = _folder(name, path)
        config = folder / CONFIG
        if not config.is_file():
            raise AdapterError(name, f"has no {CONFIG} in {folder}")
        for file in WEIGHTS:
            if (weights := folder / file).is_file():
                return AdapterFiles(name, config, weights)
        raise AdapterError(name, f"has none of {', '.join(WEIGHTS)} in {folder}")

    def stamp(self) -> tuple[tuple[int, int, int], ...]:
        """Changes as a rule when a file is written: of each, its inode, size and time."""
        stats = [path.stat() for path in (self.config, self.weights)]
        return tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats)

    def digest(self) -> str:
        """64 hex digits that name what is in the files, wherever they lie."""
        with self.weights.open("rb") as file:
            weights = hashlib.file_digest(file, "sha256").hexdigest()
        return self._digest(self.config.read_bytes(), weights)

    def read(self) -> AdapterContent:
        """What is in the files."""
        config, weights = self.config.read_bytes(), self.weights.read_bytes()
        digest = self._digest(config, hashlib.sha256(weights).hexdigest())
        return AdapterContent(self.name, self.weights.name, config, weights, digest)

    def _digest(self, config: bytes, weights: str) -> str:
        of_config = hashlib.sha256(config).hexdigest()
        return hashlib.sha256(f"{self.weights.name} {of_config} {weights}".encode()).hexdigest()


@dataclass(frozen=True)
class AdapterContent:
    """An adapter's files as they were read."""

    name: str  # of the adapter
    file: str  # name of the file with its weights, one of WEIGHTS
    config: bytes
    weights: bytes
    digest: str  # see AdapterFiles.digest


def _folder(name: str, path: str) -> Path:
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, allow_patterns=[CONFIG, *WEIGHTS]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise LoRAAdapterNotFoundError(name, path) from error
