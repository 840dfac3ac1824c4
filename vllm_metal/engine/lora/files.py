# SPDX-License-Identifier: Apache-2.0
"""Finds, reads and digests an adapter's files; does not import MLX."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from vllm.exceptions import LoRAAdapterNotFoundError

CONFIG = "adapter_config.json"
#: PEFT's two formats, then mlx-lm's; the first one found is read.
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapters.safetensors")


class AdapterError(ValueError):
    """An adapter cannot be served; the message names it and the problem."""

    def __init__(self, adapter: str, problem: str) -> None:
        super().__init__(f"LoRA adapter {adapter!r} {problem}")


@dataclass(frozen=True)
class AdapterFiles:
    """Paths of an adapter's files."""

    name: str
    config: Path
    weights: Path

    @staticmethod
    def find(name: str, path: str) -> AdapterFiles:
        """Finds an adapter in a folder, or downloads it if `path` is a repository of the hub.

        Raises:
            LoRAAdapterNotFoundError: there is neither such a folder nor such a repository.
            AdapterError: the folder has no adapter.
        """
        folder = _find_folder(name, path)
        config = folder / CONFIG
        if not config.is_file():
            raise AdapterError(name, f"has no {CONFIG} in {folder}")
        for file in WEIGHTS:
            if (weights := folder / file).is_file():
                return AdapterFiles(name, config, weights)
        raise AdapterError(name, f"has none of {', '.join(WEIGHTS)} in {folder}")

    def stamp(self) -> tuple[tuple[int, int, int], ...]:
        """Returns (inode, size, mtime) of each file, which normally changes when it is written."""
        stats = [path.stat() for path in (self.config, self.weights)]
        return tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats)

    def digest(self) -> str:
        """Returns SHA-256 of the files' content as 64 hex digits; the location does not matter."""
        with self.weights.open("rb") as file:
            weights = hashlib.file_digest(file, "sha256").hexdigest()
        return self._digest(self.config.read_bytes(), weights)

    def read(self) -> AdapterContent:
        config, weights = self.config.read_bytes(), self.weights.read_bytes()
        digest = self._digest(config, hashlib.sha256(weights).hexdigest())
        return AdapterContent(self.name, self.weights.name, config, weights, digest)

    def _digest(self, config: bytes, weights: str) -> str:
        config_digest = hashlib.sha256(config).hexdigest()
        return hashlib.sha256(f"{self.weights.name} {config_digest} {weights}".encode()).hexdigest()


@dataclass(frozen=True)
class AdapterContent:
    """An adapter's configuration and weights file, read but not parsed, and their digest."""

    name: str  # the adapter's name
    file: str  # name of the weights file, one of WEIGHTS
    config: bytes
    weights: bytes
    digest: str  # see AdapterFiles.digest


def _find_folder(name: str, path: str) -> Path:
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, allow_patterns=[CONFIG, *WEIGHTS]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise LoRAAdapterNotFoundError(name, path) from error
