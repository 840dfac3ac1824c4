# SPDX-License-Identifier: Apache-2.0
"""Families that call tools or think: how each writes it, and where vLLM's parser errs.

`RENDERED` have their own template. `WRITTEN` are those whose template nobody ships, or does not
write calls as the model does: their format is written down from the docstring of vLLM's parser.
Not tried, for want of either or of what a parser needs: gpt-oss (openai_harmony fetches its
vocabulary), Cohere (cohere_melody is not installed here), Kimi K3, MiniMax M3, PLaMo 3, Muse,
Ling 3, Laguna, MiMo V2, dots, GigaChat 3 and InternLM 2. Not chosen: phi4_mini_json, which streams
nothing of an answer without calls, and loses calls whose arguments have a bracket.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Call = tuple[str, dict[str, Any]]
ONE_DELTA = "vLLM's parser loses a call that comes whole in one delta"
TWICE = "vLLM's parser streams arguments twice where a delta ends inside of them"
#: Formats in which a call has no text beside it.
ALONE = ("call", "calls", "answer")


@dataclass(frozen=True, eq=False)
class Rendered:
    """A family whose own template is rendered."""

    template: str  # as `templates.template` names it
    family: str  # model_type
    parsers: tuple[str | None, str | None]  # of tool calls, of thoughts
    thinks: bool = False  # whether the template writes thoughts
    cases: tuple[str, ...] = ("call", "calls", "said", "answer")
    #: Cases in which vLLM's parser errs, with what it does: "case whole" or "case streamed".
    errs: Mapping[str, str] = field(default_factory=dict)


RENDERED = (
    Rendered("Qwen-Qwen2.5-7B-Instruct", "qwen2", ("hermes", None)),
    Rendered("Qwen-Qwen3-0.6B", "qwen3", ("hermes", "qwen3"), thinks=True),
    Rendered("Qwen3-Coder", "qwen3_moe", ("qwen3_coder", None)),
    Rendered("Qwen3.5-4B", "qwen3_5", ("qwen3_coder", "qwen3"), thinks=True),
    Rendered(
        "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        "nemotron_h",
        ("qwen3_coder", "nemotron_v3"),
        thinks=True,
    ),
    Rendered("StepFun3.5-Flash", "step3p5", ("step3p5", "step3p5"), thinks=True),
    Rendered("ByteDance-Seed-OSS", "seed_oss", ("seed_oss", "seed_oss"), thinks=True),
    Rendered("GLM-4.6", "glm4_moe", ("glm47", "glm47"), thinks=True),
    Rendered("GLM-4.7-Flash", "glm4_moe_lite", ("glm47", "glm47"), thinks=True),
    Rendered("MiniMax-M2", "minimax", ("minimax_m2", "minimax_m2"), thinks=True),
    Rendered("moonshotai-Kimi-K2", "kimi_k2", ("kimi_k2", None)),
    Rendered("ibm-granite-granite-4.0", "granitemoehybrid", ("granite4", None)),
    Rendered("unsloth-mistral-Devstral-Small-2507", "mistral3", ("mistral", None)),
    Rendered(
        "Mistral-Small-3.2-24B-Instruct-2506",
        "mistral3",
        ("mistral", None),
        cases=("call",),
        errs={"call whole": "vLLM's parser takes [CALL_ID] for a part of the name"},
    ),
    Rendered(
        "meta-llama-Llama-3.1-8B-Instruct",
        "llama",
        ("llama3_json", None),
        cases=("call", "answer"),  # its template writes one call, and no text beside it
        errs={"call streamed": ONE_DELTA},
    ),
    Rendered(
        "deepseek-ai-DeepSeek-V3.1",
        "deepseek_v3",
        ("deepseek_v31", "deepseek_v3"),
        errs=dict.fromkeys(("call streamed", "calls streamed", "said streamed"), ONE_DELTA),
    ),
    Rendered(
        "Apertus-8B-Instruct",
        "apertus",
        ("apertus", None),
        errs={"said streamed": "vLLM's parser keeps the last letters before a call back"},
    ),
    Rendered("vllm:granite", "granite", ("granite", None), cases=("call", "calls", "answer")),
)


@dataclass(frozen=True, eq=False)
class Written:
    """A family whose format is written down here."""

    name: str
    family: str
    template: str  # with its marks only
    tokens: tuple[str, ...]
    parsers: tuple[str | None, str | None]
    calls: Callable[[tuple[Call, ...]], str]
    thought: Callable[[str], str] | None = None
    cases: tuple[str, ...] = ("call", "calls", "said", "answer")
    errs: Mapping[str, str] = field(default_factory=dict)


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _named(call: Call, arguments: str = "arguments") -> str:
    return _dumps({"name": call[0], arguments: call[1]})


def _each(begin: str, end: str, between: str = "\n") -> Callable[[tuple[Call, ...]], str]:
    return lambda calls: between.join(f"{begin}{_named(call)}{end}" for call in calls)


def _list(begin: str, end: str) -> Callable[[tuple[Call, ...]], str]:
    return lambda calls: f"{begin}[{', '.join(map(_named, calls))}]{end}"


def _python(begin: str, end: str, between: str = ", ") -> Callable[[tuple[Call, ...]], str]:
    def text(call: Call) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in call[1].items())
        return f"{call[0]}({given})"

    return lambda calls: f"{begin}{between.join(map(text, calls))}{end}"


def _deepseek(calls: tuple[Call, ...]) -> str:
    parts = (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{_dumps(given)}\n```"
        "<｜tool▁call▁end｜>"
        for name, given in calls
    )
    return "<｜tool▁calls▁begin｜>" + "\n".join(parts) + "<｜tool▁calls▁end｜>"


def _gemma(calls: tuple[Call, ...]) -> str:
    def value(given: Any) -> str:
        return f'<|"|>{given}<|"|>' if isinstance(given, str) else _dumps(given)

    return "".join(
        f"<|tool_call>call:{name}{{"
        + ",".join(f"{key}:{value(one)}" for key, one in given.items())
        + "}<tool_call|>"
        for name, given in calls
    )


def _kimi(calls: tuple[Call, ...]) -> str:
    parts = (
        f"<|tool_call_begin|>functions.{name}:{place}<|tool_call_argument_begin|>"
        f"{_dumps(given)}<|tool_call_end|>"
        for place, (name, given) in enumerate(calls)
    )
    return "<|tool_calls_section_begin|>" + "".join(parts) + "<|tool_calls_section_end|>"


_KIMI_TOKENS = (
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
_THINK = ("<think>", "</think>")
_OPENED = "{% if add_generation_prompt %}<think>\n{% endif %}"
WRITTEN = (
    Written(
        "Hermes",
        "llama",
        "{# tools <tool_call> arguments </tool_call> #}",
        ("<tool_call>", "</tool_call>"),
        ("hermes", None),
        _each("<tool_call>\n", "\n</tool_call>"),
    ),
    Written(
        "QwQ",
        "qwen2",
        "{# tools <tool_call> arguments </tool_call> #}" + _OPENED,
        ("<tool_call>", "</tool_call>", *_THINK),
        ("hermes", "deepseek_r1"),
        _each("<tool_call>\n", "\n</tool_call>"),
        lambda thought: f"{thought}\n</think>\n\n",
    ),
    Written(
        "DeepSeek-R1",
        "deepseek_v3",
        "{# tools <｜tool▁calls▁begin｜> ```json #}" + _OPENED,
        (
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>",
            *_THINK,
        ),
        ("deepseek_v3", "deepseek_r1"),
        _deepseek,
        lambda thought: f"{thought}\n</think>\n\n",
        errs=dict.fromkeys(("call streamed", "calls streamed", "said streamed"), ONE_DELTA),
    ),
    Written(
        "Kimi-K2-Thinking",
        "kimi_k2",
        "{# tools <|tool_calls_section_begin|> <think> </think> #}",
        (*_KIMI_TOKENS, *_THINK),
        ("kimi_k2", "kimi_k2"),
        _kimi,
        lambda thought: f"<think>{thought}</think>",
    ),
    Written(
        "Gemma 4",
        "gemma4_text",
        "{# tools <|tool_call> <tool_call|> <|channel> <channel|> #}",
        ("<|tool_call>", "<tool_call|>", "<|channel>", "<channel|>", '<|"|>'),
        ("gemma4", "gemma4"),
        _gemma,
        lambda thought: f"<|channel>thought\n{thought}<channel|>",
    ),
    Written(
        "LFM2",
        "lfm2",
        "{# tools #}",
        ("<|tool_call_start|>", "<|tool_call_end|>"),
        ("lfm2", None),
        _python("<|tool_call_start|>[", "]<|tool_call_end|>"),
    ),
    Written(
        "LongCat",
        "longcat_flash",
        "{# tools <longcat_tool_call> #}",
        ("<longcat_tool_call>", "</longcat_tool_call>"),
        ("longcat", None),
        _each("<longcat_tool_call>\n", "\n</longcat_tool_call>"),
    ),
    Written(
        "Jamba",
        "jamba",
        "{# tools <tool_calls> #}",
        ("<tool_calls>", "</tool_calls>"),
        ("jamba", None),
        _list("<tool_calls>", "</tool_calls>"),
        errs=dict.fromkeys(
            ("call streamed", "calls streamed", "said streamed"),
            "vLLM's parser drops letters of streamed arguments",
        ),
    ),
    Written(
        "ERNIE 4.5",
        "ernie4_5_moe",
        "{# tools <tool_call> #}",
        ("<tool_call>", "</tool_call>"),
        ("ernie45", None),
        _each("<tool_call>\n", "\n</tool_call>"),
        errs={"calls streamed": "vLLM's parser loses the second of two calls in one delta"},
    ),
    Written(
        "Gemma 3 and Llama 3.2, in Python",
        "gemma3",
        "{# tools [func_name1(params_name1=params_value1 #}",
        (),
        ("pythonic", None),
        _python("[", "]"),
        cases=ALONE,
    ),
    Written(
        "Llama 4",
        "llama4",
        "{# tools #}",
        ("<|python_start|>", "<|python_end|>"),
        ("llama4_pythonic", None),
        _python("<|python_start|>[", "]<|python_end|>"),
        cases=ALONE,
    ),
    Written(
        "OLMo 3",
        "olmo3",
        "{# tools <function_calls> #}",
        (),
        ("olmo3", None),
        _python("<function_calls>", "</function_calls>", "\n"),
        cases=ALONE,
    ),
    Written(
        "xLAM",
        "llama",
        '{# tools: single JSON array [{"name": "tool_call_name" #}',
        (),
        ("xlam", None),
        _list("", ""),
        cases=ALONE,
        errs=dict.fromkeys(("call streamed", "calls streamed"), TWICE),
    ),
)
