# SPDX-License-Identifier: Apache-2.0
"""TOOLS and REASONING say which of vLLM's parsers reads what a chat template has models write.

A rule's markers are text of the template: what the template itself writes for a tool call or a
thought of an earlier turn, or what it tells the model to write. They were found in the templates
that vLLM's and llama.cpp's source archives carry, and in the docstrings of vLLM's parsers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Rule:
    """One parser, and the models it is for: those for which all that is stated here holds."""

    parser: str  # its name in vLLM's registry
    markers: tuple[str, ...] = ()  # parts of the chat template, all of them
    without: tuple[str, ...] = ()  # parts that it does not have
    families: tuple[str, ...] = ()  # model_type, one of them; empty: any
    #: Tokens that the tokenizer has. Without them vLLM's parser ends the start with an error, or
    #: the family's template does not name what the model writes.
    tokens: tuple[str, ...] = ()
    #: Of a request that says nothing: whether the model thinks ("unasked"), or even must, as its
    #: prompt ends inside of <think> ("opened"). The parser takes all text for a thought until it
    #: ends, so it is not for a model that answers at once. None: the parser can tell by itself.
    thinks: Literal["unasked", "opened"] | None = None
    module: str = ""  # that the parser imports and vLLM does not require
    errs: str = ""  # what vLLM's parser is known to do wrong, as a sentence without its subject
    chosen: bool = True  # False: it errs so much that no parser is better


_THINK = ("<think>", "</think>")
_DEEPSEEK_CALLS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_TOKENS = (*_DEEPSEEK_CALLS, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
_HUNYUAN = ("hunyuan", "hunyuan_v1_dense", "hunyuan_v1_moe")
_GRANITE = ("granite", "granitemoe", "granitemoehybrid")
_LLAMA_4 = ("llama4", "llama4_text")
_LFM2 = ("lfm2", "lfm2_moe")
_OLMO_3 = ("olmo3", "olmo_hybrid")
#: vLLM's parser looks for the parts of </think>, which is no token of this family.
_OLMO_3_TOKENS = ("Ġ</", "</", "think", ">")
_ERNIE = ("ernie4_5", "ernie4_5_moe")
_PYTHONIC = "[func_name1(params_name1=params_value1"
#: vLLM knows the three of Kimi K3, whose text model has another family's name.
_XTML = ("<|open|>", "<|close|>", "<|sep|>")
#: Ling 3 has the name of Ling 2.5, whose template has no <arg_key>.
_LING_3 = ("bailing_hybrid", "bailing_moe_v3")
#: Speculation makes deltas of several tokens.
_ONE_DELTA = "loses a call of a stream that comes whole in one delta"

#: The first rule that holds decides; those that say most come first.
TOOLS: tuple[Rule, ...] = (
    # Formats with marks of their own, whichever family writes them.
    Rule("openai", families=("gpt_oss",)),
    Rule("kimi_k3", tokens=_XTML),
    Rule("minimax_m3", ("]<]minimax[>[",)),
    Rule("minimax_m2", ("<minimax:tool_call>",)),
    Rule("gemma4", ("<|tool_call>", "<tool_call|>")),
    Rule(
        "functiongemma",
        ("<start_function_call>",),
        errs="garbles a stream's calls of several arguments",
    ),
    Rule("longcat", ("<longcat_tool_call>",)),
    Rule("seed_oss", ("<seed:tool_call>", "<function=")),
    Rule("kimi_k2", ("<|tool_calls_section_begin|>",)),
    Rule("plamo3", ("<|plamo:begin_tool_requests:plamo|>",)),
    Rule("cohere_command4", ("<|START_ACTION|>", "<|START_TEXT|>"), module="cohere_melody"),
    Rule("cohere_command3", ("<|START_ACTION|>",), module="cohere_melody"),
    Rule(
        "apertus", ("<|tools_prefix|>",), errs="keeps the last letters before a stream's call back"
    ),
    Rule(
        "muse_glimmer",
        ("<atem:function_calls>",),
        errs="loses the first of two calls that come in one delta of a stream",
    ),
    Rule("dots", ("<dots_function_call>",)),
    Rule(
        "internlm",
        ("<|action_start|>", "<|plugin|>"),
        errs=f"fails where an answer has two calls, and {_ONE_DELTA}",
    ),
    Rule(
        "minicpm5",
        ('<function name="', '<param name="'),
        errs="drops the text before a call, and streams the call as text, too",
    ),
    Rule(
        "deepseek_v3",
        (_DEEPSEEK_CALLS[0], "```json"),
        tokens=_DEEPSEEK_TOKENS,
        errs=_ONE_DELTA,
    ),
    Rule(
        "deepseek_v31",
        (_DEEPSEEK_CALLS[0], "<｜tool▁sep｜>"),
        tokens=_DEEPSEEK_TOKENS,
        errs=_ONE_DELTA,
    ),
    Rule(
        "mistral",
        ("[TOOL_CALLS]", "[CALL_ID]"),
        tokens=("[TOOL_CALLS]",),
        errs="takes [CALL_ID], which this template writes, for a part of a tool's name",
    ),
    Rule(
        "mistral",
        ("[TOOL_CALLS]",),
        without=("[ARGS]",),
        tokens=("[TOOL_CALLS]",),
        errs="garbles arguments where a stream's delta ends just before them",
    ),
    Rule("mistral", ("[TOOL_CALLS]",), tokens=("[TOOL_CALLS]",)),
    Rule("lfm2", families=_LFM2, tokens=("<|tool_call_start|>", "<|tool_call_end|>")),
    # Formats that look alike, told apart by their family.
    Rule("poolside_v1", ("<arg_key>",), families=("laguna",)),
    Rule("ling3", ("<arg_key>",), families=_LING_3),
    Rule("glm47", ("<tool_call>", "<arg_key>")),
    Rule("mimo", ("<tool_call>", "<function="), families=("mimo", "mimo_v2_flash")),
    Rule("step3p5", ("<tool_call>", "<function="), families=("step3p5",)),
    Rule("qwen3_coder", ("<tool_call>", "<function=")),
    Rule("granite", ("<|tool_call|>",), families=_GRANITE),
    Rule("granite4", ("<tool_call>",), families=_GRANITE),
    Rule(
        "ernie45",
        ("<tool_call>",),
        families=_ERNIE,
        errs="loses the second of two calls that come in one delta of a stream",
    ),
    Rule(
        "hunyuan_a13b",
        ("<tool_calls>",),
        families=_HUNYUAN,
        errs="loses a stream's arguments at deltas of several tokens, and streams calls behind "
        "text as text",
    ),
    Rule(
        "jamba",
        ("<tool_calls>",),
        families=("jamba",),
        tokens=("<tool_calls>", "</tool_calls>"),
        errs="drops letters of a stream's arguments",
    ),
    Rule("olmo3", ("<function_calls>",), families=_OLMO_3),
    Rule(
        "gigachat3",
        ("function call", "<|role_sep|>", "<|message_sep|>"),
        errs=f"reads one call an answer, and {_ONE_DELTA}",
    ),
    Rule(
        "llama4_json",
        ('"parameters": ',),
        families=_LLAMA_4,
        tokens=("<|python_tag|>",),
        errs=_ONE_DELTA,
    ),
    Rule("llama4_pythonic", families=_LLAMA_4, tokens=("<|python_start|>",)),
    Rule(
        "llama3_json",
        ("ipython", '"parameters": '),
        without=("<function=", ">>>all", _PYTHONIC),
        families=("llama",),
        tokens=("<|python_tag|>",),
        errs=_ONE_DELTA,
    ),
    Rule("pythonic", (_PYTHONIC,)),
    Rule(
        "xlam",
        ("single JSON array", '{"name": "tool_call_name"'),
        errs="streams arguments twice where a delta ends inside of them",
    ),
    Rule(
        "phi4_mini_json",
        ("<|tool|>",),
        families=("phi3",),
        errs="streams nothing of an answer without calls",
        chosen=False,
    ),
    # What Hermes began, and most others took up: JSON between two tags.
    Rule(
        "hermes",
        ("<tool_call>", "</tool_call>", "arguments"),
        without=("<|tool_call|>", "</tool_calls>"),
    ),
)

REASONING: tuple[Rule, ...] = (
    Rule("openai_gptoss", families=("gpt_oss",)),
    Rule("kimi_k3", tokens=_XTML),
    Rule(
        "minimax_m3",
        ("<mm:think>",),
        tokens=("<mm:think>", "</mm:think>"),
        errs="streams reasoning as content",
    ),
    Rule("minimax_m2", ("<minimax:tool_call>", "<think>"), tokens=_THINK),
    Rule("gemma4", ("<|channel>", "<channel|>")),
    Rule("seed_oss", ("<seed:think>",)),
    Rule("plamo3", ("<|plamo:begin_think:plamo|>",)),
    Rule("cohere_command4", ("<|START_THINKING|>", "<|START_TEXT|>"), module="cohere_melody"),
    Rule("cohere_command3", ("<|START_THINKING|>",), module="cohere_melody"),
    Rule("muse_glimmer", ("<atem:function_calls>", "to=self<|message|>")),
    Rule("mistral", ("[THINK]",), tokens=("[THINK]", "[/THINK]", "[TOOL_CALLS]")),
    Rule("kimi_k2", ("<|tool_calls_section_begin|>", *_THINK), tokens=_THINK),
    Rule(
        "deepseek_v3", ("<｜Assistant｜>", "thinking", *_THINK), without=("```json",), tokens=_THINK
    ),
    Rule("ling3", ("<arg_key>", *_THINK), families=_LING_3, tokens=_THINK),
    Rule("glm47", ("<arg_key>", "<think>"), tokens=_THINK, thinks="unasked"),
    Rule(
        "poolside_v1", ("<arg_key>", *_THINK), families=("laguna",), tokens=("<assistant>", *_THINK)
    ),
    Rule("mimo", families=("mimo", "mimo_v2_flash"), tokens=_THINK, thinks="unasked"),
    Rule("step3p5", ("<tool_call>", *_THINK), families=("step3p5",), tokens=_THINK),
    Rule(
        "nemotron_v3",
        ("<function=", *_THINK),
        families=("nemotron_h",),
        tokens=_THINK,
        thinks="unasked",
    ),
    Rule(
        "granite_thinking_parser",
        ("<function=", *_THINK),
        families=_GRANITE,
        tokens=_THINK,
        thinks="unasked",
    ),
    Rule("ernie45", ("<think>",), families=_ERNIE, tokens=_THINK),
    Rule(
        "hunyuan_a13b",
        ("<think>",),
        families=_HUNYUAN,
        errs="ends a stream with an error at a delta of several tokens",
        chosen=False,
    ),
    Rule("olmo3", ("<think>",), families=_OLMO_3, tokens=_OLMO_3_TOKENS, thinks="opened"),
    # A switch in the template, and thoughts on unless it is off: what Qwen3 began.
    Rule("qwen3", ("enable_thinking", *_THINK), tokens=_THINK, thinks="unasked"),
    Rule("deepseek_r1", _THINK[:1], tokens=_THINK, thinks="opened"),
)
