# SPDX-License-Identifier: Apache-2.0
"""Digests networks' weights from the contents of their files."""

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

#: Minimum age of a file's last change for its digest to be remembered. File-system clocks tick in
#: up to 2 s (FAT), so a second change could leave the same time (like git's "racy" index entries).
_SETTLED_NS = 2 * 10**9
_BAR_AFTER = 2.0  # seconds before a progress bar shows


def of_networks(vllm_config: VllmConfig, memo: Path | None) -> dict[str, str]:
    """Digests the target's weights, as "target", and those of a draft with K/V, as "draft".

    Args:
        vllm_config: configuration of an engine whose weights are on disk.
        memo: file that caches digests; None caches nothing.

    Raises:
        OSError: a file cannot be read.
        ModelLoadError: a folder is gone.
    """
    found = {"target": digest(_target_files(vllm_config), memo)}
    if draft_methods.keeps_kv(vllm_config):
        found["draft"] = digest(_draft_files(vllm_config), memo)
    return found


def digest(files: Sequence[Path], memo: Path | None) -> str:
    """Returns BLAKE3 of the files' names and contents, as 32 hex digits; order does not matter.

    Args:
        files: files of one network; names must be unique.
        memo: JSON file of digests by path, created privately if missing. If it cannot be read or
            written, digests are only computed again.

    Raises:
        OSError: a file cannot be read.
    """
    # Reading a large model takes seconds to a minute, so a file's digest is remembered until its
    # `_file_state` changes.
    remembered = _read_memo(memo)
    found: dict[str, str] = {}
    renewed: dict[str, list[int | str]] = {}
    total = sum(path.stat().st_size for path in files)
    bar = tqdm(total=total, unit="B", unit_scale=True, desc="Hashing weights", delay=_BAR_AFTER)
    with bar:
        for path in files:
            before = _file_state(path)
            known = remembered.get(str(path.absolute()))
            if isinstance(known, list) and known[:-1] == before:
                found[path.name] = str(known[-1])
            else:
                found[path.name] = _file_digest(path)
                # Not if the file changed while it was read.
                if _file_state(path) == before and time.time_ns() - before[1] > _SETTLED_NS:
                    renewed[str(path.absolute())] = [*before, found[path.name]]
            bar.update(before[0])
    if memo is not None and renewed:
        _update_memo(memo, renewed)
    listed = json.dumps(sorted(found.items()))
    return blake3.blake3(listed.encode()).hexdigest(length=16)


def _target_files(config: VllmConfig) -> list[Path]:
    # Without config.json: the fingerprint has its content.
    folder = model_files.model_folder(config.model_config, config)
    return sorted([*weight_files(folder), *_other_files(config.model_config, folder)])


def _draft_files(config: VllmConfig) -> list[Path]:
    assert config.speculative_config is not None
    model_config = config.speculative_config.draft_model_config
    folder = model_files.model_folder(model_config, config, model_files.HEAD_PATTERNS)
    of_gguf = weight_files(folder) if is_gguf(folder) else []
    # torch's files only if there are no others.
    weights = (
        of_gguf
        or list(folder.glob("*.safetensors"))
        or [path for path in folder.iterdir() if path.suffix in (".bin", ".pt")]
    )
    return sorted([*weights, *_other_files(model_config, folder)])


def _other_files(model_config: ModelConfig, folder: Path) -> list[Path]:
    # Other files that decide what a network computes: ModelOpt's quantization, how GGUF types
    # without an exact packing are read, code that may run, and ids over which n-grams are hashed.
    of_ngrams = []
    if getattr(model_config.hf_text_config, "engram_layer_ids", None):
        is_stated = (folder / "engram_token_map.json").is_file()
        of_ngrams = ["engram_token_map.json" if is_stated else "tokenizer.json"]
    patterns = [
        "hf_quant_config.json",
        GGUF_CONVERSION,
        *(["*.py"] if model_config.trust_remote_code else []),
        *of_ngrams,
    ]
    return [path for pattern in patterns for path in folder.glob(pattern)]


def _file_state(path: Path) -> list[int]:
    # Size, mtime, inode and ctime (in ns). Archives and images give many files one mtime; a ctime
    # cannot be set by users.
    found = path.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ino, found.st_ctime_ns]


def _file_digest(path: Path) -> str:
    hasher = blake3.blake3(max_threads=blake3.blake3.AUTO)
    return hasher.update_mmap(path).hexdigest(length=16)


def _read_memo(memo: Path | None) -> dict[str, object]:
    try:
        found = {} if memo is None else json.loads(memo.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _update_memo(memo: Path, renewed: dict[str, list[int | str]]) -> None:
    # Another engine may write at the same time; the later rename wins.
    kept = {path: known for path, known in _read_memo(memo).items() if os.path.exists(path)}
    try:
        memo.parent.mkdir(parents=True, exist_ok=True)
        secret_file.write_private(memo, json.dumps(kept | renewed, indent=1))
    except OSError as error:
        logger.warning("Digests of weights could not be saved in %s: %s", memo, error)
