# SPDX-License-Identifier: Apache-2.0
"""Reports request fields that vLLM does not know and silently ignores.

Client libraries add fields every month, so an unknown field is no error: a response header lists
it. But a field that means something to other servers, or once did here, changes what the client
expects: it is rejected with the name to use.
"""

# Remove when vLLM reports fields that it does not know. Read against vLLM 0.33.

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from pydantic_core import PydanticCustomError, SchemaValidator, core_schema
from starlette.datastructures import MutableHeaders
from vllm.logger import init_logger

from vllm_metal.patches.vllm_patches import first_mistake

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = init_logger(__name__)

HEADER = "x-ignored-fields"
_GRAMMAR = "use structured_outputs, or response_format"
_AT_START = "it is set when the server starts, by "
#: Maps fields of other servers to the remedy here.
MEANT: dict[str, str] = {
    **dict.fromkeys(
        (
            "guided_choice",
            "guided_decoding_backend",
            "guided_grammar",
            "guided_json",
            "guided_regex",
            "guided_whitespace_pattern",
        ),
        _GRAMMAR,  # vLLM's until 0.11
    ),
    "grammar": _GRAMMAR,  # llama.cpp's, as the next ones
    "json_schema": _GRAMMAR,
    "n_predict": "use max_tokens",
    "n_probs": "use logprobs",
    "repeat_last_n": "repetition_penalty counts the whole text",
    "repeat_penalty": "use repetition_penalty",
    "format": "use response_format",  # Ollama's, as the next ones
    "keep_alive": _AT_START + "--additional-config '{\"idle_sleep\": ...}'",
    "num_ctx": _AT_START + "--max-model-len",
    "num_predict": "use max_tokens",
    "options": "write its fields beside model, by the names of OpenAI's API",
    "think": 'use chat_template_kwargs, such as {"enable_thinking": false}',
    "enable_thinking": 'use chat_template_kwargs: {"enable_thinking": ...}',
    "max_new_tokens": "use max_tokens",  # transformers'
    "do_sample": "use temperature 0 for no sampling",
    "num_beams": "use n, temperature and top_p; beams are not searched",
}
#: Limits on what clients can write into the header and into the log.
_LONGEST, _MOST = 64, 32
_MARK = "vllm_metal_unknown_fields"
_LOGGED: set[str] = set()
_ignored: ContextVar[dict[str, None] | None] = ContextVar("ignored", default=None)


def report_unknown_fields() -> None:
    """Makes vLLM's request classes record unknown fields, and reject some that other servers know.

    Call it before vLLM's routes are made, which copy the classes' schemas.
    """
    # Other routes are left alone: a body there may be of one of several classes, each with fields
    # of its own.
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    for model in (
        AnthropicMessagesRequest,
        ChatCompletionRequest,
        CompletionRequest,
        ResponsesRequest,
    ):
        schema: Any = model.__pydantic_core_schema__
        for part in first_mistake.parts(schema):
            if part.get("type") == "model" and part.get("cls") is model:
                part["schema"] = _checked(part["schema"], frozenset(_names(model)))
        model.__pydantic_validator__ = SchemaValidator(schema)


def _checked(fields: Any, known: frozenset[str]) -> Any:
    # Several request classes may share a schema: each gets only one check.
    if (fields.get("metadata") or {}).get(_MARK):
        return fields
    return core_schema.no_info_before_validator_function(
        _check_by(known), fields, metadata={_MARK: True}
    )


def _names(model: type[BaseModel]) -> Iterable[str]:
    for name, field in model.model_fields.items():
        yield name
        if field.alias:
            yield field.alias


def _check_by(known: frozenset[str]) -> Callable[[Any], Any]:
    def check(data: Any) -> Any:
        if isinstance(data, dict):
            for name in data.keys() - known:
                _record(str(name))
        return data

    return check


def _record(name: str) -> None:
    """Records an ignored field; raises PydanticCustomError if it has a meaning elsewhere."""
    if (remedy := MEANT.get(name)) is not None:
        raise PydanticCustomError("unknown_field", f"{name} is not supported: {remedy}")
    name = name[:_LONGEST].encode("ascii", "backslashreplace").decode()
    ignored = _ignored.get()
    if ignored is not None and len(ignored) < _MOST:
        ignored[name] = None
    if name not in _LOGGED and len(_LOGGED) < _MOST:
        _LOGGED.add(name)
        logger.info("A field of requests that has no effect: %r", name)


def around(app: ASGIApp, state: Any) -> ASGIApp:
    """Wraps the application so that responses list the fields that had no effect."""
    return _ReportIgnored(app)


class _ReportIgnored:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        ignored: dict[str, None] = {}

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start" and ignored:
                listed = ", ".join(sorted(name for name in ignored if name.isprintable()))
                MutableHeaders(scope=message)[HEADER] = listed
            await send(message)

        token = _ignored.set(ignored)
        try:
            await self._app(scope, receive, sending)
        finally:
            _ignored.reset(token)
