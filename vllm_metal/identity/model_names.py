# SPDX-License-Identifier: Apache-2.0
"""Finds the folder that a user's name for a model means, or says in one line why there is none.

Without a network, huggingface_hub and transformers try each file of a model several times, for a
minute; and neither knows what other programs call models.
"""

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

_CONNECT_S = 3.0  # also of the lookup of its name, which has no limit of its own
_PAGE = re.compile(r"https?://[^/]+/(?P<repo>[\w.-]+/[\w.-]+)")
#: Files that a tokenizer may be in, of all of transformers' classes.
_TOKENIZERS = ("*.tiktoken", "spiece.model", "tekken.json", "tokenizer*", "*vocab*")
#: Those of JSON that are read with a tokenizer.
_READ_BY_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
#: Where a model may lie below the folder that was named: the hub's cache has snapshots.
_INNER = ("*/config.json", "snapshots/*/config.json")
_MOST_PARSED = 2**20  # bytes
_OLLAMA = re.compile(r"[\w.-]+:[\w.-]+")
_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")


def check(model: str, option: str = "") -> None:
    """Checks that a model's name means a folder, a cached model, or one that can be fetched.

    Args:
        model: its name.
        option: by which a user has given it, for the message; "": as the model to serve.

    Raises:
        ModelLoadError: it does not; the message says what to type instead.
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
        raise ModelLoadError(f"{model} is a link that leads nowhere, to {os.readlink(path)}")
    if "://" in model:
        _check_address(model)
    elif gguf_names.file_of(model) is not None:
        return
    elif model.startswith((".", "/", "~")):
        raise ModelLoadError(f"there is no folder {model}{_near(model)}")
    elif _OLLAMA.fullmatch(model):
        raise ModelLoadError(
            f"{model} is an Ollama name: give one on Hugging Face, as "
            f"OWNER/NAME{_near(model) or '; `vllm-metal fit` lists some that fit this machine'}"
        )
    elif not _NAME.fullmatch(model):
        raise ModelLoadError(
            (
                f"{model!r} is neither a local folder nor a name on Hugging Face: those are "
                "OWNER/NAME"
            )
            + _near(model)
        )
    elif not _cached(model) and (why := unreachable()):
        raise ModelLoadError(f"{model} is not on this machine, and {why}{_near(model)}")


def folder_here(model: str) -> Path | None:
    """The folder that a name means, if it is one with a config.json and no name on the hub."""
    path = Path(model).expanduser()
    return path if (path / "config.json").is_file() else None


def check_tokenizer(model: str) -> None:
    """Checks that a model's folder has a tokenizer's files.

    Raises:
        ModelLoadError: it has none, and transformers would ask for packages that do not help; or
            one is broken.
    """
    path = Path(model).expanduser()
    for name in _READ_BY_TOKENIZERS:
        if (path / name).exists():
            _check_json(path / name, "model" if name == "tokenizer.json" else "")
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
    elif not (path / "params.json").is_file():  # as Mistral publishes it
        inner = [found.parent for name in _INNER for found in sorted(path.glob(name))]
        near = f"; did you mean {inner[0]}?" if inner else ""
        raise ModelLoadError(f"the folder {path} has no config.json: it is not a model's{near}")


def _check_json(path: Path, key: str = "") -> None:
    """Checks a file of JSON, and whether it has a key; of a large one, whether it is whole."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise model_files.unreadable(path, error) from error
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
    """Addresses of buckets are vLLM's; one of the hub's pages has a name in it."""
    if (page := _PAGE.match(model)) is not None:
        raise ModelLoadError(f"{model} is an address: give the model's name, {page['repo']}")


def _cached(model: str) -> bool:
    return any(_cache().joinpath(f"models--{model.replace('/', '--')}", "snapshots").glob("*"))


def _cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def unreachable() -> str:
    """Why nothing can be fetched from the hub; empty where something may."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set, so that it is not fetched"
    address = urlsplit(constants.ENDPOINT)
    if address.scheme in getproxies():
        return ""
    port = address.port or (80 if address.scheme == "http" else 443)
    answered: list[bool] = []

    def connect() -> None:
        try:
            with socket.create_connection((address.hostname, port), _CONNECT_S):
                answered.append(True)
        except OSError:
            return

    thread = Thread(target=connect, daemon=True)
    thread.start()
    thread.join(_CONNECT_S)
    remedy = "check the network, or give the folder of a model"
    return "" if answered else f"{address.hostname} does not answer: {remedy}"


def _near(model: str) -> str:
    """The names of models on this machine that are most like one."""
    names = {name.rpartition("/")[2].lower(): name for name in cached()}
    wanted = re.split(r"[/:]", model.rstrip("/"))
    likely = [part.lower() for part in wanted if part]
    found = [
        names[near] for part in likely for near in difflib.get_close_matches(part, names, 2, 0.6)
    ]
    return f"; did you mean {' or '.join(dict.fromkeys(found))}?" if found else ""


def cached() -> list[str]:
    """Names of the models in the hub's cache."""
    found = sorted(_cache().glob("models--*"))
    return [path.name.removeprefix("models--").replace("--", "/") for path in found]
