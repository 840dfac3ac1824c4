# SPDX-License-Identifier: Apache-2.0
"""Parses the fields of a body that serving needs, exactly as vLLM does.

vLLM's request classes are pydantic models, which read "false" as false, and "-1" and -1.0 as -1. So
a pydantic model parses the same fields here, with vLLM's types (`tests/serving/test_fields.py`
compares them).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, Field, ValidationError
from vllm.entrypoints.generate.base.protocol import StreamOptions

from vllm_metal.serving.routes import Style

#: vLLM treats this seed as no seed (vllm/sampling_params.py).
_NO_SEED = -1


class Body(BaseModel):
    """The fields that serving needs, typed as in vLLM's request classes."""

    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    background: bool | None = False
    n: int | None = 1  # completions have int, so vLLM itself rejects null


#: Fields of `Body` that each route reads.
OF_STYLE: dict[Style, tuple[str, ...]] = {
    "chat": ("stream", "stream_options", "temperature", "seed", "n"),
    "completion": ("stream", "stream_options", "temperature", "seed", "n"),
    "messages": ("stream", "temperature"),
    "responses": ("stream", "temperature", "background"),
}


@dataclass(frozen=True)
class Fields:
    """Parsed fields of a body."""

    stream: bool = False
    usage: bool = False  # whether a stream ends with its usage
    every_usage: bool = False  # whether every event has it, too
    background: bool = False
    repeatable: bool = False  # whether the engine would generate the same response again
    choices: int = 1  # number of choices to compute


def read(style: Style, body: dict[str, Any]) -> Fields:
    """Parses a client's body; returns the defaults if vLLM will reject it."""
    try:
        found = Body.model_validate({name: body[name] for name in OF_STYLE[style] if name in body})
    except ValidationError:
        return Fields()
    options = found.stream_options
    # Greedy and seeded requests repeat. Those of the Responses API are never cached: clients look
    # them up by their ids, and they do not state whether they were cut off.
    is_repeatable = found.temperature == 0 or found.seed not in (None, _NO_SEED)
    return Fields(
        stream=bool(found.stream),
        usage=bool(options and options.include_usage),
        every_usage=bool(options and options.continuous_usage_stats),
        background=bool(found.background),
        repeatable=style != "responses" and is_repeatable,
        choices=(found.n or 1)
        * _num_prompts(body.get("prompt") if style == "completion" else None),
    )


def _num_prompts(prompt: object) -> int:
    # A list holds several prompts, unless it is one prompt's token ids.
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list | dict):
        return len(prompt)
    return 1
