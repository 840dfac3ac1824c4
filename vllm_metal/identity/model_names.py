# SPDX-License-Identifier: Apache-2.0
"""Checks that a user's model name can be resolved, with one-line errors that name the remedy."""

from __future__ import annotations

import difflib
import json
import os
import re
import socket
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit
from urllib.request import getproxies

from vllm_metal.identity import gguf_names, model_files
from vllm_metal.identity.model_files import ModelLoadError

# Without a network, huggingface_hub and transformers retry each file of a model for a minute in
# total, and neither knows other programs' names for models. These checks come first.

_CONNECT_S = 3.0  # includes the DNS lookup, which has no timeout of its own
_PAGE = re.compile(r"https?://[^/]+/(?P<repo>[\w.-]+/[\w.-]+)")
#: Files that hold a tokenizer, for any of transformers' classes.
_TOKENIZERS = ("*.tiktoken", "spiece.model", "tekken.json", "tokenizer*", "*vocab*")
#: JSON files that are read together with a tokenizer.
_READ_BY_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
#: Where a model may be inside the given folder; the Hugging Face cache has snapshots.
_INNER = ("*/config.json", "snapshots/*/config.json")
_MOST_PARSED = 2**20  # bytes
_OLLAMA = re.compile(r"[\w.-]+:[\w.-]+")
_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")


def check(model: str, option: str = "") -> None:
    """Checks that a name means a folder, a cached model, or one that can be downloaded.

    `option`: the flag that sets the name, for the message; "" for the model to serve. Raises
    ModelLoadError with what to type instead.
    """
    try:
        _check(model)
    except (ModelLoadError, PermissionError) as error:
        if isinstance(error, PermissionError):
            error = model_files.unreadable(Path(model), error)
        raise ModelLoadError(f"{option}: {error}" if option else str(error)) from error


def _check(model: str) -> None:
    if not model:
        raise ModelLoadError("the model's name is empty: give a folder, or a name on Hugging Face")
    path = Path(model).expanduser()
    if path.is_dir():
        _check_folder(path)
        return
    if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
        return
    if path.is_file():
        if gguf_names.file_of(model) is None:
            raise ModelLoadError(f"{model} is a file: give the folder that has its config.json")
        return
    if path.is_symlink():
        raise ModelLoadError(f"{model} is a broken link to {os.readlink(path)}")
    if "://" in model:
        _check_address(model)
    elif gguf_names.file_of(model) is not None:
        return
    elif model.startswith((".", "/", "~")):
        raise ModelLoadError(f"there is no folder {model}{_hint(model)}")
    elif _OLLAMA.fullmatch(model):
        raise ModelLoadError(
            f"{model} is an Ollama name: give one on Hugging Face, as "
            f"OWNER/NAME{_hint(model) or '; `vllm-metal fit` lists some that fit this machine'}"
        )
    elif not _NAME.fullmatch(model):
        raise ModelLoadError(
            (
                f"{model!r} is neither a local folder nor a name on Hugging Face: those are "
                "OWNER/NAME"
            )
            + _hint(model)
        )
    elif not _cached(model) and (why := unreachable()):
        raise ModelLoadError(f"{model} is not on this machine, and {why}{_hint(model)}")


def folder_here(model: str) -> Path | None:
    """Returns the local folder that a name means, if it has a config.json."""
    path = Path(model).expanduser()
    return path if (path / "config.json").is_file() else None


def check_tokenizer(model: str) -> None:
    """Raises ModelLoadError if a model's folder has no tokenizer files, or broken ones."""
    path = Path(model).expanduser()
    for name in _READ_BY_TOKENIZERS:
        if (path / name).exists():
            _check_json(path / name, "model" if name == "tokenizer.json" else "")
    # transformers' own error would recommend packages that do not help.
    if path.is_dir() and not any(file for name in _TOKENIZERS for file in path.glob(name)):
        raise ModelLoadError(
            f"the folder {model} has no tokenizer: add its tokenizer.json and "
            "tokenizer_config.json, name another folder by --tokenizer, or serve token ids alone "
            "with --skip-tokenizer-init"
        )


def _check_folder(path: Path) -> None:
    if (config := path / "config.json").is_file():
        _check_json(config)
    elif found := sorted(path.glob("*.gguf")):
        raise ModelLoadError(f"the folder {path} has no config.json: give the file, {found[0]}")
    elif not (path / "params.json").is_file():  # Mistral's own format has it
        inner = [found.parent for name in _INNER for found in sorted(path.glob(name))]
        suggestion = f"; did you mean {inner[0]}?" if inner else ""
        raise ModelLoadError(
            f"the folder {path} has no config.json: it is not a model's{suggestion}"
        )


def _check_json(path: Path, key: str = "") -> None:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise model_files.unreadable(path, error) from error
    # Parsing a large file takes too long; its braces at least show that it is complete.
    if len(text) > _MOST_PARSED and text.lstrip()[:1] == b"{" and text.rstrip()[-1:] == b"}":
        return
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        why = error if text.strip() else "it is empty"
        raise ModelLoadError(f"{path} is not JSON, so download it again: {why}") from error
    if not isinstance(found, dict):
        raise ModelLoadError(f"{path} holds no JSON object, so download it again")
    if key and key not in found:
        raise ModelLoadError(f"{path} has no {key!r}, so download it again")


def _check_address(model: str) -> None:
    # A page of the hub contains the name to use. Addresses of buckets are vLLM's business.
    if (page := _PAGE.match(model)) is not None:
        raise ModelLoadError(f"{model} is an address: give the model's name, {page['repo']}")


def _cached(model: str) -> bool:
    return any(
        _cache_folder().joinpath(f"models--{model.replace('/', '--')}", "snapshots").glob("*")
    )


def _cache_folder() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def unreachable() -> str:
    """Returns why nothing can be downloaded from the hub; empty if downloads may work."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set, so it is not downloaded"
    address = urlsplit(constants.ENDPOINT)
    if address.scheme in getproxies():  # the proxy decides; a direct connection proves nothing
        return ""
    port = address.port or (80 if address.scheme == "http" else 443)
    connected: list[bool] = []

    def connect() -> None:
        try:
            with socket.create_connection((address.hostname, port), _CONNECT_S):
                connected.append(True)
        except OSError:
            return

    # In a thread, because the DNS lookup cannot be interrupted.
    thread = Thread(target=connect, daemon=True)
    thread.start()
    thread.join(_CONNECT_S)
    remedy = "check the network, or give the folder of a model"
    return "" if connected else f"{address.hostname} does not answer: {remedy}"


def _hint(model: str) -> str:
    names = {name.rpartition("/")[2].lower(): name for name in cached()}
    wanted = re.split(r"[/:]", model.rstrip("/"))
    likely = [part.lower() for part in wanted if part]
    found = [
        names[near] for part in likely for near in difflib.get_close_matches(part, names, 2, 0.6)
    ]
    return f"; did you mean {' or '.join(dict.fromkeys(found))}?" if found else ""


def cached() -> list[str]:
    """Lists the models in the Hugging Face cache."""
    found = sorted(_cache_folder().glob("models--*"))
    return [path.name.removeprefix("models--").replace("--", "/") for path in found]
