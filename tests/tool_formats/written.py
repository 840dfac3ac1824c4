# SPDX-License-Identifier: Apache-2.0
"""Families without a published template, or whose template writes calls unlike the model.

Their formats follow the docstrings and tests of vLLM's parsers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tool_formats.families import ALONE, ONE, ONE_DELTA

Call = tuple[str, dict[str, Any]]
TWICE = "vLLM's parser streams arguments twice where a delta ends inside of them"


@dataclass(frozen=True, eq=False)
class Written:
    """A family with a format defined here."""

    name: str
    family: str
    template: str  # only its markers
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


def _plamo(calls: tuple[Call, ...]) -> str:
    begin, end = "<|plamo:begin_tool_", ":plamo|>"
    parts = (
        f"{begin}request{end}{begin}name{end}{name}<|plamo:end_tool_name{end}"
        f"{begin}arguments{end}<|plamo:constrain|>json<|plamo:msg|>{_dumps(given)}"
        f"<|plamo:end_tool_arguments{end}<|plamo:end_tool_request{end}"
        for name, given in calls
    )
    return f"{begin}requests{end}{''.join(parts)}<|plamo:end_tool_requests{end}"


def _dots(calls: tuple[Call, ...]) -> str:
    def invoked(call: Call) -> str:
        given = (f'<parameter name="{key}">{value}</parameter>\n' for key, value in call[1].items())
        return f'<invoke name="{call[0]}">\n{"".join(given)}</invoke>\n'

    return f"<dots_function_call>\n{''.join(map(invoked, calls))}</dots_function_call>"


def _mimo(calls: tuple[Call, ...]) -> str:
    def called(call: Call) -> str:
        given = (f"<parameter={key}>{value}</parameter>" for key, value in call[1].items())
        return f"<tool_call>\n<function={call[0]}>{''.join(given)}</function>\n</tool_call>"

    return "\n".join(map(called, calls))


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
    Written(
        "PLaMo 3",
        "plamo3",
        "{# tools <|plamo:begin_tool_requests:plamo|> <|plamo:begin_think:plamo|> #}",
        (),
        ("plamo3", "plamo3"),
        _plamo,
        lambda thought: f"<|plamo:begin_think:plamo|>{thought}<|plamo:end_think:plamo|>",
    ),
    Written(
        "dots",
        "dots1",
        "{# tools <dots_function_call> #}",
        (),
        ("dots", None),
        _dots,
    ),
    Written(
        "MiMo V2",
        "mimo_v2_flash",
        "{# tools <tool_call> <function= #}"
        "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}",
        ("<tool_call>", "</tool_call>", *_THINK),
        ("mimo", "mimo"),
        _mimo,
        lambda thought: f"<think>{thought}</think>",
    ),
    Written(
        "GigaChat 3",
        "deepseek_v3",
        "{# tools: function call <|role_sep|> <|message_sep|> #}",
        ("<|role_sep|>", "<|message_sep|>"),
        ("gigachat3", None),
        lambda calls: f"<|message_sep|>\n\nfunction call<|role_sep|>\n{_named(calls[0])}",
        cases=ONE,
        errs=dict.fromkeys(("call streamed", "said streamed"), ONE_DELTA),
    ),
    Written(
        "Magistral",
        "mistral3",
        "{# tools [TOOL_CALLS] [ARGS] [THINK] #}",
        ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"),
        ("mistral", "mistral"),
        lambda calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{_dumps(given)}" for name, given in calls),
        lambda thought: f"[THINK]{thought}[/THINK]",
    ),
)
