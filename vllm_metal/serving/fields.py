# SPDX-License-Identifier: Apache-2.0
"""Fields of a request's body that are looked at here, read as vLLM reads them.

vLLM's request classes are pydantic's, for which "false" is no, and "-1" and -1.0 are -1. So one
class of pydantic's reads the same fields, with vLLM's types (`tests/serving/test_fields.py`
compares them).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, Field, ValidationError
from vllm.entrypoints.generate.base.protocol import StreamOptions

from vllm_metal.serving.routes import Style

#: vLLM takes this seed for none (vllm/sampling_params.py).
_NO_SEED = -1


class Body(BaseModel):
    """As vLLM's request classes have it."""

    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    background: bool | None = False
    n: int | None = 1  # of completions: int, so that vLLM refuses none


#: What each route reads of it.
OF_STYLE: dict[Style, tuple[str, ...]] = {
    "chat": ("stream", "stream_options", "temperature", "seed", "n"),
    "completion": ("stream", "stream_options", "temperature", "seed", "n"),
    "messages": ("stream", "temperature"),
    "responses": ("stream", "temperature", "background"),
}


@dataclass(frozen=True)
class Fields:
    """What a body asks for."""

    stream: bool = False
    usage: bool = False  # whether a stream is to say its usage at the end
    every_usage: bool = False  # and in each event before
    background: bool = False
    repeatable: bool = False  # whether the engine would say the same again
    choices: int = 1  # that the engine is to compute


def read(style: Style, body: dict[str, Any]) -> Fields:
    """What a body asks for; nothing of all this where vLLM will refuse it.

    An answer is the same again at temperature 0 and with a seed. Those of the Responses API are
    never kept: they have ids under which they are found again, and do not say whether they were cut
    off.

    Args:
        style: of the route.
        body: as the client sent it.
    """
    try:
        found = Body.model_validate({name: body[name] for name in OF_STYLE[style] if name in body})
    except ValidationError:
        return Fields()
    options = found.stream_options
    same_again = found.temperature == 0 or found.seed not in (None, _NO_SEED)
    return Fields(
        stream=bool(found.stream),
        usage=bool(options and options.include_usage),
        every_usage=bool(options and options.continuous_usage_stats),
        background=bool(found.background),
        repeatable=style != "responses" and same_again,
        choices=(found.n or 1)
        * _num_prompts(body.get("prompt") if style == "completion" else None),
    )


def _num_prompts(prompt: object) -> int:
    """A list has several, or is one of tokens."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list | dict):
        return len(prompt)
    return 1
