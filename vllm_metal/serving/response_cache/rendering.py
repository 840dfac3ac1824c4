# SPDX-License-Identifier: Apache-2.0
"""Prompts as vLLM's own renderer makes them, and what else an answer depends on.

It is the renderer behind vLLM's routes `/v1/chat/completions/render` and its like, so that its
tokens are those that the engine gets.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse

from vllm_metal.kv_transfer import weights_digest
from vllm_metal.models import loader
from vllm_metal.serving.response_cache.key import Render
from vllm_metal.serving.routes import Style
from vllm_metal.settings import envs

#: Arguments of `vllm serve` that say where and how it listens, or what it prints.
_NO_PART = (
    *("host", "port", "uds", "ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs"),
    *("ssl_ciphers", "enable_ssl_refresh", "root_path", "middleware", "api_key", "config"),
    *("uvicorn_log_level", "disable_uvicorn_access_log", "disable_access_log_for_endpoints"),
    *("log_config_file", "max_log_len", "enable_log_requests", "enable_log_outputs"),
    *("enable_log_deltas", "disable_log_stats", "log_error_stack", "dispatch_function"),
    *("subparser", "model_tag", "headless", "api_server_count", "grpc", "grpc_port"),
)
#: Files beside the weights from which text is made of tokens, and tokens of text.
_SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
#: What each route takes, and the renderer's method for it.
_REQUESTS: dict[Style, tuple[type[BaseModel], str]] = {
    "chat": (ChatCompletionRequest, "render_chat_request"),
    "completion": (CompletionRequest, "render_completion_request"),
    "messages": (AnthropicMessagesRequest, "render_messages_request"),
}


def renderer(state: Any) -> Render:
    """How to make tokens of prompts.

    Args:
        state: of vLLM's application.
    """

    async def render(style: Style, fields: dict[str, Any]) -> list[list[int]] | None:
        model, name = _REQUESTS[style]
        serving = state.serving_render
        copy = json.loads(json.dumps(fields))  # vLLM's models change what they are given
        try:
            made = await getattr(serving, name)(model.model_validate(copy))
        except Exception:  # of pydantic, of a template: vLLM's own answer will say what is wrong
            return None
        prompts = made if isinstance(made, list) else [made]
        if not prompts or any(isinstance(prompt, ErrorResponse) for prompt in prompts):
            return None
        return [prompt.token_ids for prompt in prompts]

    return render


def fingerprint(state: Any, memo: Path | None) -> str:
    """Of the model and of all settings that an answer may depend on, as 64 hex digits.

    It reads the weights once, which takes seconds to a minute; `weights_digest` remembers them.

    Args:
        state: of vLLM's application.
        memo: the file that remembers digests; None: nothing is remembered.

    Raises:
        OSError: a file cannot be read.
    """
    config = state.engine_client.vllm_config
    model = config.model_config
    arguments = {
        name: _plain(value) for name, value in vars(state.args).items() if name not in _NO_PART
    }
    facts = {
        "versions": {name: version(name) for name in ("vllm-metal", "mlx", "mlx-lm")},
        "vllm": _vllm_version(),
        "device": [envs.requested_device(), envs.kernels()],
        "weights": weights_digest.of_networks(config, memo),
        "files": _files(loader.model_folder(model, config), Path(model.tokenizer)),
        "arguments": arguments,
        "template": state.online_renderer.chat_template,
        "sampling": _plain(model.get_diff_sampling_param()),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _vllm_version() -> str:
    import vllm

    return vllm.__version__


def _files(*folders: Path) -> list[str]:
    """Digests of the small files in folders."""
    paths = {
        path
        for folder in folders
        if folder.is_dir()
        for pattern in _SMALL_FILES
        for path in folder.glob(pattern)
    }
    return sorted(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in paths)


def _plain(value: Any) -> Any:
    """As JSON has it; what has no form there, by its type and fields."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        plain = [_plain(each) for each in value]
        return sorted(plain, key=str) if isinstance(value, set | frozenset) else plain
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {field.name: _plain(getattr(value, field.name, None)) for field in fields}
    return repr(value)
