# SPDX-License-Identifier: Apache-2.0
"""Makes vLLM's request classes stop at the first invalid item of a list.

pydantic continues, and reports for each item why it is none of the permitted types. An item of a
response's `input` may have some thirty types: `[{}, {}, ...]` took 4 ms and 1.2 MB per item, in
which no other request was served. A body of 60 kB ended a server of 24 GB. 100,000 texts to embed
took 2.6 s, for the report that each is neither a token nor a list of tokens.
"""

# Remove when pydantic or vLLM limits the number of reported errors. Read against vLLM 0.33.

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

from pydantic import BaseModel
from pydantic_core import SchemaValidator

#: Modules with requests whose texts may have several types.
_WITH_TEXTS = (
    *(f"vllm.entrypoints.pooling.{name}.protocol" for name in ("classify", "embed", "pooling")),
    "vllm.entrypoints.pooling.scoring.protocol",
    "vllm.entrypoints.generate.generative_scoring.serving",
    "vllm.entrypoints.openai.chat_completion.protocol",
    "vllm.entrypoints.serve.tokenize.protocol",
)


def stop_at_the_first_mistake() -> None:
    """Makes vLLM's request classes reject a list at its first invalid item.

    Call it before vLLM's routes are made, which copy the classes' validators.
    """
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    models: set[type[BaseModel]] = {
        AnthropicMessagesRequest,
        CompletionRequest,
        ResponsesRequest,
        *(model for name in _WITH_TEXTS for model in _models(import_module(name))),
    }
    for model in models:
        schema: Any = model.__pydantic_core_schema__
        for part in parts(schema):
            if part.get("type") == "list":
                part["fail_fast"] = True
        model.__pydantic_validator__ = SchemaValidator(schema)


def _models(module: ModuleType) -> Iterator[type[BaseModel]]:
    for name, found in vars(module).items():
        is_model = isinstance(found, type) and issubclass(found, BaseModel)
        # Generic classes have no schema of their own.
        if is_model and "Request" in name and not found.__pydantic_generic_metadata__["parameters"]:
            yield found


def parts(schema: Any) -> Iterator[dict[str, Any]]:
    """Yields every dictionary in a pydantic schema once."""
    seen, waiting = set(), [schema]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, dict | list | tuple) or id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, dict):
            yield part
        waiting += part.values() if isinstance(part, dict) else part
