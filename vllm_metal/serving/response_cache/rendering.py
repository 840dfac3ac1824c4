# SPDX-License-Identifier: Apache-2.0
"""Renders prompts with vLLM's renderer, and fingerprints everything else a response depends on.

vLLM's routes such as `/v1/chat/completions/render` use the same renderer, so the tokens are those
that the engine gets.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import vllm
from pydantic import BaseModel
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse

from vllm_metal.identity import facts, model_files, weights_digest
from vllm_metal.patches.vllm_patches import media_loading
from vllm_metal.serving.response_cache.key import Render, Rendered
from vllm_metal.serving.routes import Style
from vllm_metal.settings import envs

#: Arguments of `vllm serve` without effect on responses: they control listening and logging.
_IRRELEVANT_ARGUMENTS = (
    *("host", "port", "uds", "ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs"),
    *("ssl_ciphers", "enable_ssl_refresh", "root_path", "middleware", "api_key", "config"),
    *("uvicorn_log_level", "disable_uvicorn_access_log", "disable_access_log_for_endpoints"),
    *("log_config_file", "max_log_len", "enable_log_requests", "enable_log_outputs"),
    *("enable_log_deltas", "disable_log_stats", "log_error_stack", "dispatch_function"),
    *("subparser", "model_tag", "headless", "api_server_count", "grpc", "grpc_port"),
)
#: Packages besides vLLM that produce text or tokens, read images, or enforce grammars.
_PACKAGES = (
    *("mlx", "mlx-lm", "transformers", "tokenizers", "jinja2", "mistral_common", "tiktoken"),
    *("mlx-vlm", "pillow", "torchvision"),
    *("xgrammar", "llguidance", "outlines_core", "lm-format-enforcer", "openai_harmony"),
)
#: Arguments that name Python files.
_PLUGIN_FILES = ("tool_parser_plugin", "reasoning_parser_plugin")
#: Files of the tokenizer, the chat template and the configuration.
_SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
#: Request class of each route, and the renderer's method for it.
_REQUESTS: dict[Style, tuple[type[BaseModel], str]] = {
    "chat": (ChatCompletionRequest, "render_chat_request"),
    "completion": (CompletionRequest, "render_completion_request"),
    "messages": (AnthropicMessagesRequest, "render_messages_request"),
}


def renderer(state: Any) -> Render:
    """Returns a function that renders prompts with the renderer in vLLM's application state."""

    async def render(style: Style, fields: dict[str, Any]) -> list[Rendered] | None:
        model, name = _REQUESTS[style]
        serving = state.serving_render
        copy = json.loads(json.dumps(fields))  # vLLM's request classes change their input
        copy["mm_payload"] = "none"  # only hashes of images are needed
        try:
            # Images are read again for the response, and then count against the request's limit.
            with media_loading.MEMORY.request():
                made = await getattr(serving, name)(model.model_validate(copy))
        except Exception:  # of pydantic or a template: vLLM's own response will state the error
            return None
        prompts = made if isinstance(made, list) else [made]
        if not prompts or any(isinstance(prompt, ErrorResponse) for prompt in prompts):
            return None
        if fields.get("model") in list(serving.models.lora_requests):
            return None  # the adapter may be replaced by another with the same name
        return [
            Rendered(prompt.token_ids, prompt.features.mm_hashes if prompt.features else {})
            for prompt in prompts
        ]

    return render


def fingerprint(state: Any, memo: Path | None) -> str:
    """Returns a digest of the model and of all settings that affect responses, as 32 hex digits.

    Reads all weights, which takes seconds to a minute, unless the file `memo` has their digest.
    Raises OSError if a file cannot be read. `state`: state of vLLM's application.
    """
    config = state.engine_client.vllm_config
    model = config.model_config
    arguments = {
        name: value for name, value in vars(state.args).items() if name not in _IRRELEVANT_ARGUMENTS
    }
    return facts.digest(
        {
            "sources": facts.sources(facts.NOT_IN_ANSWERS),
            "versions": {"vllm": vllm.__version__, **facts.versions(*_PACKAGES)},
            "device": [envs.requested_device(), envs.kernels()],
            "weights": weights_digest.of_networks(config, memo),
            "files": _files(model_files.model_folder(model, config), Path(model.tokenizer)),
            "arguments": arguments,
            "plugins": _plugins(state.args),
            "template": state.online_renderer.chat_template,
            "sampling": model.get_diff_sampling_param(),
        }
    )


def _files(*folders: Path) -> str:
    return facts.of_files(
        {
            (path, folder)
            for folder in folders
            if folder.is_dir()
            for pattern in _SMALL_FILES
            for path in folder.glob(pattern)
        }
    )


def _plugins(arguments: Any) -> str:
    """Digests the Python files of parsers and logits processors that arguments name."""
    paths = [getattr(arguments, name, None) for name in _PLUGIN_FILES]
    for processor in getattr(arguments, "logits_processors", None) or ():
        module = str(processor).partition(":")[0] if isinstance(processor, str) else None
        found = importlib.util.find_spec(module) if module else None
        paths.append(None if found is None else found.origin)
    files = [Path(path) for path in paths if path]
    return facts.of_files((path, path.parent) for path in files if path.is_file())
