# SPDX-License-Identifier: Apache-2.0
"""Digests of networks' weights, from the contents of their files.

Reading a large model's files takes seconds to a minute, so a file's digest is remembered until its
size, its inode, or the time of a change of its contents or its inode (mtime, ctime) is another.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import blake3
from tqdm.auto import tqdm
from vllm.logger import init_logger

from vllm_metal.identity import model_files
from vllm_metal.identity.model_files import GGUF_CONVERSION, is_gguf, weight_files
from vllm_metal.settings import draft_methods, secret_file

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = init_logger(__name__)

#: A file changed so recently is not remembered: a second change could leave the same time, as the
#: clocks of file systems tick by up to 2 s (FAT; git's "racy" index entries are the same problem).
_SETTLED_NS = 2 * 10**9
_BAR_AFTER = 2.0  # seconds before a progress bar shows


def of_networks(vllm_config: VllmConfig, memo: Path | None) -> dict[str, str]:
    """Digests of the target's weights, and of the draft's where they have a part in K/V.

    Args:
        vllm_config: of an engine whose weights are in their folders, which a loaded model's are.
        memo: the file that remembers digests; None: nothing is remembered.

    Returns:
        "target", and "draft" for methods whose network keeps K/V, to 32 hex digits.

    Raises:
        OSError: a file cannot be read.
        ModelLoadError: a folder is gone.
    """
    found = {"target": digest(_target_files(vllm_config), memo)}
    if draft_methods.keeps_kv(vllm_config):
        found["draft"] = digest(_draft_files(vllm_config), memo)
    return found


def digest(files: Sequence[Path], memo: Path | None) -> str:
    """BLAKE3 of the files' names and contents, as 32 hex digits; their order does not matter.

    Args:
        files: of one network; no two of one name.
        memo: a JSON file of digests by path, made where there is none, private to its owner. One
            that cannot be read or written costs time only.

    Raises:
        OSError: a file cannot be read.
    """
    remembered = _remembered(memo)
    found: dict[str, str] = {}
    renewed: dict[str, list[int | str]] = {}
    total = sum(path.stat().st_size for path in files)
    bar = tqdm(total=total, unit="B", unit_scale=True, desc="Hashing weights", delay=_BAR_AFTER)
    with bar:
        for path in files:
            before = _state(path)
            known = remembered.get(str(path.absolute()))
            if isinstance(known, list) and known[:-1] == before:
                found[path.name] = str(known[-1])
            else:
                found[path.name] = _of_file(path)
                if _state(path) == before and time.time_ns() - before[1] > _SETTLED_NS:
                    renewed[str(path.absolute())] = [*before, found[path.name]]
            bar.update(before[0])
    if memo is not None and renewed:
        _remember(memo, renewed)
    listed = json.dumps(sorted(found.items()))
    return blake3.blake3(listed.encode()).hexdigest(length=16)


def _target_files(config: VllmConfig) -> list[Path]:
    """Lists the files that are read, but for config.json: the fingerprint has its facts."""
    folder = model_files.model_folder(config.model_config, config)
    return sorted([*weight_files(folder), *_beside_weights(config.model_config, folder)])


def _draft_files(config: VllmConfig) -> list[Path]:
    """All weights of the draft's checkpoint; of torch's files only where there are no others."""
    assert config.speculative_config is not None
    model_config = config.speculative_config.draft_model_config
    folder = model_files.model_folder(model_config, config, model_files.HEAD_PATTERNS)
    of_gguf = weight_files(folder) if is_gguf(folder) else []
    weights = (
        of_gguf
        or list(folder.glob("*.safetensors"))
        or [path for path in folder.iterdir() if path.suffix in (".bin", ".pt")]
    )
    return sorted([*weights, *_beside_weights(model_config, folder)])


def _beside_weights(model_config: ModelConfig, folder: Path) -> list[Path]:
    """Other files that decide what a network computes: ModelOpt's quantization, how GGUF types
    without an exact packing are read, and code that may run."""
    patterns = [
        "hf_quant_config.json",
        GGUF_CONVERSION,
        *(["*.py"] if model_config.trust_remote_code else []),
    ]
    return [path for pattern in patterns for path in folder.glob(pattern)]


def _state(path: Path) -> list[int]:
    """What changes with a file's contents: size, mtime in ns, inode, ctime in ns.

    Archives and images give many files one mtime; nobody can set a ctime.
    """
    found = path.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ino, found.st_ctime_ns]


def _of_file(path: Path) -> str:
    hasher = blake3.blake3(max_threads=blake3.blake3.AUTO)
    return hasher.update_mmap(path).hexdigest(length=16)


def _remembered(memo: Path | None) -> dict[str, object]:
    try:
        found = {} if memo is None else json.loads(memo.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _remember(memo: Path, renewed: dict[str, list[int | str]]) -> None:
    """Adds to the file, by a rename: another engine may do the same, and the later one stays."""
    kept = {path: known for path, known in _remembered(memo).items() if os.path.exists(path)}
    try:
        memo.parent.mkdir(parents=True, exist_ok=True)
        secret_file.write_private(memo, json.dumps(kept | renewed, indent=1))
    except OSError as error:
        logger.warning("Digests of weights could not be saved in %s: %s", memo, error)
