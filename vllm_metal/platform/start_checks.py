# SPDX-License-Identifier: Apache-2.0
"""Checks arguments before anything is loaded: paths, addresses, choices.

vLLM also finds most of these mistakes, but some only after the engine has started, and reports them
in terms of its internal classes.
"""

from __future__ import annotations

import importlib.util
import json
import ssl
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from vllm_metal.device import mlx_device
from vllm_metal.engine.kv_cache import formats
from vllm_metal.engine.lora import files as adapter_files
from vllm_metal.engine.spec_decode.registry import BY_NAME, SPECULATIVE_METHODS
from vllm_metal.engine.weights.quantization import METHODS
from vllm_metal.identity import model_names
from vllm_metal.platform import model_folders
from vllm_metal.serving.parsers import files as model_files
from vllm_metal.settings import envs, values

#: Supported choices of vLLM's options.
SERVED = {
    "--kv-cache-dtype": formats.OFFERED,
    "--quantization": tuple(METHODS),
}
_LAST_PORT = 65535
#: Arguments of a server that name files, which vLLM opens only once its engine runs.
_FILES = (
    *("ssl_keyfile", "ssl_certfile", "ssl_ca_certs"),
    *("tool_parser_plugin", "reasoning_parser_plugin"),
)
#: Bounds of numeric options that vLLM does not check, or checks late or under another name.
_BOUNDS = {
    **dict.fromkeys(("max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes"), (1, None)),
    "seed": (0, 2**32 - 1),  # numpy's range
}
#: Characters by which vLLM distinguishes a template's file name from its text.
_PATH_LIKE = ("/", "\\")
_TEMPLATE_LIKE = ("{", "}", "\n")
_EXECUTORS = ("external_launcher", "mp", "ray", "uni")  # others are class names
_GENERATION = "generation_config.json"
#: Maps keys of generation_config.json to their names in requests, if they differ.
_REQUEST_NAMES = {"max_new_tokens": "max_tokens"}
_OWN_COUNT = "suffix"  # the method for which vLLM chooses num_speculative_tokens
_OWN_CLASS = "custom_class"  # the method with a `model` that is not a checkpoint


def check_server(args: Namespace) -> None:
    """Checks arguments of `vllm serve`: first the server's own, then the engine's.

    Raises ValueError, naming the argument, or ModelLoadError if a model is not found.
    """
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    if not 0 <= args.port <= _LAST_PORT:
        raise ValueError(f"--port={args.port} is not a port: choose one from 1 to {_LAST_PORT}")
    for name in _FILES:
        path = getattr(args, name, None)
        if path and not Path(path).expanduser().is_file():
            raise ValueError(f"{_option(name)}={path}: there is no such file")
    if not all(args.api_key or ()):
        raise ValueError("--api-key is empty, which lets anybody in: leave it out, or give a key")
    _check_certificate(args)
    if not args.tool_parser_plugin:
        _check_parser("--tool-call-parser", args.tool_call_parser, ToolParserManager)
    if not args.reasoning_parser_plugin:
        _check_parser("--reasoning-parser", args.reasoning_parser, ReasoningParserManager)
    for name in args.middleware or ():
        _check_import("--middleware", name)
    _check_template(args.chat_template)
    for adapter in args.lora_modules or ():
        _check_adapter(adapter.name, adapter.path)
    given = getattr(args, "model_tag", None)
    model = args.model if given is None else given
    check_engine(args, model)
    if (folder := model_names.folder_here(model)) is not None:
        model_folders.check(folder)
        if args.chat_template is None and args.tokenizer is None:
            model_files.check_own_templates(model)


def check_engine(args: Any, model: str | None = None) -> None:
    """Checks arguments of an engine: vLLM's `EngineArgs`, or a command's options.

    `model` replaces `args.model`. Raises ValueError, naming the argument, or ModelLoadError if a
    model is not found.
    """
    model = args.model if model is None else model
    _check_choices(args)
    _check_mappings(args)
    for name, (least, most) in _BOUNDS.items():
        given = getattr(args, name)
        if not isinstance(given, int):
            continue
        if given < least:
            raise ValueError(
                f"{_option(name)}={given}: it must be greater than or equal to {least}"
            )
        if most is not None and given > most:
            raise ValueError(f"{_option(name)}={given}: it must be less than or equal to {most}")
    for processor in args.logits_processors or ():
        if isinstance(processor, str):
            _check_import("--logits-processors", processor)
    media = args.allowed_local_media_path
    if media and not Path(media).is_dir():
        raise ValueError(f"--allowed-local-media-path={media}: there is no such folder")
    _check_pool(args.kv_cache_memory_bytes)
    names = args.served_model_name
    if names is not None and not all([names] if isinstance(names, str) else names):
        raise ValueError("--served-model-name is empty: leave it out, or give a name")
    model_names.check(model)
    _check_sampling(args, model)
    if not args.skip_tokenizer_init:
        _check_tokenizer(model if args.tokenizer is None else args.tokenizer, model)
    if isinstance(args.speculative_config, Mapping):
        _check_speculation(args.speculative_config)


def _check_certificate(args: Namespace) -> None:
    """Loads a server's certificate and key, as vLLM does only once its engine runs."""
    if not args.ssl_certfile:
        return
    cert, key = args.ssl_certfile, args.ssl_keyfile
    given = f"--ssl-certfile={cert}" + (f" --ssl-keyfile={key}" if key else "")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=lambda: "")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{given} is not a certificate with its key: give both in PEM format, and the key "
            "without a password"
        ) from error


def _check_sampling(args: Any, model: str) -> None:
    """Checks the sampling defaults, which vLLM reads only when a request comes."""
    source = args.generation_config
    folder = Path(model if source == "auto" else source).expanduser()
    file = folder / _GENERATION
    if source not in ("auto", "vllm") and not file.is_file():
        if folder.is_dir():
            raise ValueError(f"--generation-config={source}: the folder has no {_GENERATION}")
        model_names.check(source, "--generation-config")
    if source != "vllm" and file.is_file():
        try:
            found = json.loads(file.read_bytes())
        except ValueError as error:
            raise ValueError(f"{file} is not JSON, so download it again: {error}") from error
        _check_defaults(str(file), found)
    _check_defaults("--override-generation-config", args.override_generation_config)


def _check_defaults(source: str, found: Any) -> None:
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    given = found if isinstance(found, Mapping) else {}
    params: dict[str, Any] = {}
    for key in model_files.SAMPLING:
        if (value := given.get(key)) is None:
            continue
        if not isinstance(value, int | float):
            raise ValueError(
                f"{source}: {key} {value!r} is not a number: change it, or leave it out"
            )
        params[_REQUEST_NAMES.get(key, key)] = value
    try:
        SamplingParams(**params)
    except (ValueError, VLLMValidationError) as error:
        raise ValueError(f"{source}: {error} Change it, or leave it out") from error


def _check_tokenizer(given: str, model: str) -> None:
    # A folder may have a tokenizer only, without a model.
    if given == model or Path(given).expanduser().is_dir():
        model_names.check_tokenizer(given)
    else:
        model_names.check(given, "--tokenizer")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _check_choices(args: Any) -> None:
    """Checks options with other choices than vLLM's."""
    from vllm.config.cache import CacheDType
    from vllm.tokenizers.registry import TokenizerRegistry

    given = args.quantization
    if given is not None and given not in (*METHODS, "metal"):
        raise ValueError(
            f"--quantization={given} is not supported: weights are served as their files have "
            f"them, in {', '.join(METHODS)}, or as MLX has quantized them. Leave it out."
        )
    given = args.distributed_executor_backend
    if isinstance(given, str) and given not in _EXECUTORS and "." not in given:
        raise ValueError(f"--distributed-executor-backend={given} is not supported: leave it out")
    given = args.tokenizer_mode
    if given.lower() not in ("auto", *TokenizerRegistry.tokenizers):
        raise ValueError(f"--tokenizer-mode={given} is not supported: leave it out")
    given = args.kv_cache_dtype
    if given not in (*get_args(CacheDType), *formats.OFFERED):
        raise ValueError(
            f"--kv-cache-dtype={given} is not supported: choose one of {', '.join(formats.OFFERED)}"
        )


def _check_pool(size: int | None) -> None:
    if size is None:
        return
    most = mlx_device.total_memory(envs.requested_device() or "metal")
    if size > most:
        raise ValueError(
            f"--kv-cache-memory-bytes={size} is more than the memory of this machine, "
            f"{most}: leave it out to use what fits"
        )


def _check_mappings(args: Any) -> None:
    for name in ("additional_config", "hf_overrides", "speculative_config"):
        given = getattr(args, name)
        if isinstance(given, str):
            raise ValueError(f"{_option(name)}={given} is not JSON, such as '{{\"key\": 1}}'")


def _check_template(given: str | None) -> None:
    """Checks a chat template, given as a file name or as the template itself."""
    if given is None:
        return
    path = Path(given).expanduser()
    is_text = any(sign in given for sign in _TEMPLATE_LIKE)
    if not is_text and any(sign in given for sign in _PATH_LIKE) and not path.is_file():
        raise ValueError(f"--chat-template={given}: there is no such file")
    try:
        text = given if is_text or not path.is_file() else path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--chat-template={given} is not a text file: {error}") from error
    model_files.check_syntax(text, f"--chat-template={given}")


def _check_parser(option: str, given: str | None, manager: Any) -> None:
    known = manager.list_registered()
    if given and given not in known:
        raise ValueError(
            f"{option}={given} is not supported: omit the option to use the model's default"
            + values.did_you_mean(given, known)
        )


def _check_import(option: str, name: str) -> None:
    module = name.replace(":", ".").rpartition(".")[0]
    try:
        found = importlib.util.find_spec(module) if module else None
    except ImportError:
        found = None
    if found is None:
        raise ValueError(f"{option}={name} does not exist: give MODULE.NAME of a Python module")


def _check_adapter(name: str, given: str) -> None:
    path = Path(given).expanduser()
    if path.is_dir():
        _check_adapter_folder(path, f"--lora-modules {name}={given}")
    elif given.startswith((".", "/", "~")) or path.exists():
        raise ValueError(f"--lora-modules {name}={given}: there is no such folder")
    else:
        model_names.check(given, f"--lora-modules {name}")


def _check_adapter_folder(path: Path, setting: str) -> None:
    if not (config := path / adapter_files.CONFIG).is_file():
        raise ValueError(
            f"{setting}: the folder has no {adapter_files.CONFIG}, so it is not an adapter"
        )
    if not any((path / name).is_file() for name in adapter_files.WEIGHTS):
        raise ValueError(f"{setting}: the folder has none of {', '.join(adapter_files.WEIGHTS)}")
    try:
        json.loads(config.read_bytes())
    except ValueError as error:
        raise ValueError(
            f"{setting}: {config.name} is not JSON, so make or download the adapter again: {error}"
        ) from error


def _check_speculation(given: Mapping[str, Any]) -> None:
    from vllm.config import SpeculativeConfig

    method, draft = given.get("method"), given.get("model")
    option = "--speculative-config"
    for key in given:
        if key not in SpeculativeConfig.__dataclass_fields__:
            near = values.did_you_mean(key, SpeculativeConfig.__dataclass_fields__)
            raise ValueError(f"{option} has no key {key!r}{near}")
    if method is not None and method not in SPECULATIVE_METHODS and not _is_known_later(method):
        choices = ", ".join(SPECULATIVE_METHODS)
        raise ValueError(f"{option}: method {method!r} is not supported: choose one of {choices}")
    served = BY_NAME.get(method or "")
    if served is not None and not served.has_network:
        if method != _OWN_COUNT and not given.get("num_speculative_tokens"):
            raise ValueError(f"{option}: num_speculative_tokens is missing, such as 3")
    elif method != _OWN_CLASS and isinstance(draft, str):
        model_names.check(draft, f"{option}: model")
    elif served is not None and served.needs_model and not draft:
        raise ValueError(f"{option}: model is missing: name the checkpoint that drafts")


def _is_known_later(method: Any) -> bool:
    # `refusals` rejects custom_class; vLLM replaces names such as deepseek_mtp by "mtp".
    return method == _OWN_CLASS or str(method).endswith("mtp")
