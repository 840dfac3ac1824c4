# SPDX-License-Identifier: Apache-2.0
"""vLLM's request classes look no further than the first wrong item of a list.

pydantic goes on, and tells of each item why it is none of the kinds that it may be. An item of a
response's `input` may be of some thirty kinds: `[{}, {}, ...]` took 4 ms and 1.2 MB an item, in
which no other request was served. A body of 60 kB ended a server of 24 GB.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic_core import SchemaValidator


def stop_at_the_first_mistake() -> None:
    """Changes the classes; call it before vLLM's routes are made, which copy their validators."""
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
        for part in _parts(schema):
            if part.get("type") == "list":
                part["fail_fast"] = True
        model.__pydantic_validator__ = SchemaValidator(schema)


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    """All dictionaries in a schema, each once."""
    seen, waiting = set(), [schema]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, dict | list | tuple) or id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, dict):
            yield part
        waiting += part.values() if isinstance(part, dict) else part
