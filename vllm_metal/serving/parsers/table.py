# SPDX-License-Identifier: Apache-2.0
"""TOOLS and REASONING map chat templates to the vLLM parsers that read the model's format.

A rule's markers are parts of the template: what it renders for a tool call or the reasoning of an
earlier turn, or what it instructs the model to write. They come from the templates in vLLM's and
llama.cpp's source archives, and from the docstrings of vLLM's parsers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Rule:
    """A parser, and the conditions for it, all of which a model must meet."""

    parser: str  # name in vLLM's registry
    markers: tuple[str, ...] = ()  # parts of the chat template; all must be there
    absent_markers: tuple[str, ...] = ()  # parts that must not be there
    families: tuple[str, ...] = ()  # allowed values of model_type; empty: any
    #: Tokens that the tokenizer must have: without them vLLM's parser fails at startup, or the
    #: family's template does not show the format.
    tokens: tuple[str, ...] = ()
    #: Required reasoning of requests that do not mention it: "by_default", or always, as the prompt
    #: ends inside <think> ("opened"). Such a parser takes all text up to the end marker
    #: as reasoning, which is wrong for other models. None: the parser detects reasoning itself.
    reasoning: Literal["by_default", "opened"] | None = None
    module: str = ""  # module that the parser imports and vLLM does not require
    defect: str = ""  # known problem of vLLM's parser, as a sentence without its subject
    chosen: bool = True  # False: the problem is worse than having no parser


_THINK = ("<think>", "</think>")
_DEEPSEEK_CALLS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_TOKENS = (*_DEEPSEEK_CALLS, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
_HUNYUAN = ("hunyuan", "hunyuan_v1_dense", "hunyuan_v1_moe")
_GRANITE = ("granite", "granitemoe", "granitemoehybrid")
_LLAMA_4 = ("llama4", "llama4_text")
_LFM2 = ("lfm2", "lfm2_moe")
_OLMO_3 = ("olmo3", "olmo_hybrid")
#: vLLM's parser looks for the parts of </think>, which is not a single token in this family.
_OLMO_3_TOKENS = ("Ġ</", "</", "think", ">")
_ERNIE = ("ernie4_5", "ernie4_5_moe")
_PYTHONIC = "[func_name1(params_name1=params_value1"
#: Kimi K3 is identified by these tokens, as its text model has another family's model_type.
_XTML = ("<|open|>", "<|close|>", "<|sep|>")
#: Ling 3 shares its model_type with Ling 2.5, whose template has no <arg_key>.
_LING_3 = ("bailing_hybrid", "bailing_moe_v3")
#: Such deltas occur with speculative decoding, which yields several tokens per step.
_ONE_DELTA = "loses a streamed call that arrives whole in one delta"

#: The first matching rule decides, so specific rules come first.
TOOLS: tuple[Rule, ...] = (
    # Formats with unique markers, for any family.
    Rule("openai", families=("gpt_oss",)),
    Rule("kimi_k3", tokens=_XTML),
    Rule("minimax_m3", ("]<]minimax[>[",)),
    Rule("minimax_m2", ("<minimax:tool_call>",)),
    Rule("gemma4", ("<|tool_call>", "<tool_call|>")),
    Rule(
        "functiongemma",
        ("<start_function_call>",),
        defect="garbles streamed calls with several arguments",
    ),
    Rule("longcat", ("<longcat_tool_call>",)),
    Rule("seed_oss", ("<seed:tool_call>", "<function=")),
    Rule("kimi_k2", ("<|tool_calls_section_begin|>",)),
    Rule("plamo3", ("<|plamo:begin_tool_requests:plamo|>",)),
    Rule("cohere_command4", ("<|START_ACTION|>", "<|START_TEXT|>"), module="cohere_melody"),
    Rule("cohere_command3", ("<|START_ACTION|>",), module="cohere_melody"),
    Rule(
        "apertus",
        ("<|tools_prefix|>",),
        defect="withholds the last letters before a streamed call",
    ),
    Rule(
        "muse_glimmer",
        ("<atem:function_calls>",),
        defect="loses the first of two calls that arrive in one streamed delta",
    ),
    Rule("dots", ("<dots_function_call>",)),
    Rule(
        "internlm",
        ("<|action_start|>", "<|plugin|>"),
        defect=f"fails if an answer has two calls, and {_ONE_DELTA}",
    ),
    Rule(
        "minicpm5",
        ('<function name="', '<param name="'),
        defect="drops the text before a call, and streams the call as text, too",
    ),
    Rule(
        "deepseek_v3",
        (_DEEPSEEK_CALLS[0], "```json"),
        tokens=_DEEPSEEK_TOKENS,
        defect=_ONE_DELTA,
    ),
    Rule(
        "deepseek_v31",
        (_DEEPSEEK_CALLS[0], "<｜tool▁sep｜>"),
        tokens=_DEEPSEEK_TOKENS,
        defect=_ONE_DELTA,
    ),
    Rule(
        "mistral",
        ("[TOOL_CALLS]", "[CALL_ID]"),
        tokens=("[TOOL_CALLS]",),
        defect="takes [CALL_ID], which this template writes, for a part of a tool's name",
    ),
    Rule(
        "mistral",
        ("[TOOL_CALLS]",),
        absent_markers=("[ARGS]",),
        tokens=("[TOOL_CALLS]",),
        defect="garbles arguments where a stream's delta ends just before them",
    ),
    Rule("mistral", ("[TOOL_CALLS]",), tokens=("[TOOL_CALLS]",)),
    Rule("lfm2", families=_LFM2, tokens=("<|tool_call_start|>", "<|tool_call_end|>")),
    # Similar formats, distinguished by family.
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
        defect="loses the second of two calls that arrive in one streamed delta",
    ),
    Rule(
        "hunyuan_a13b",
        ("<tool_calls>",),
        families=_HUNYUAN,
        defect="loses a stream's arguments at deltas of several tokens, and streams calls behind "
        "text as text",
    ),
    Rule(
        "jamba",
        ("<tool_calls>",),
        families=("jamba",),
        tokens=("<tool_calls>", "</tool_calls>"),
        defect="drops letters of streamed arguments",
    ),
    Rule("olmo3", ("<function_calls>",), families=_OLMO_3),
    Rule(
        "gigachat3",
        ("function call", "<|role_sep|>", "<|message_sep|>"),
        defect=f"reads one call per answer, and {_ONE_DELTA}",
    ),
    Rule(
        "llama4_json",
        ('"parameters": ',),
        families=_LLAMA_4,
        tokens=("<|python_tag|>",),
        defect=_ONE_DELTA,
    ),
    Rule("llama4_pythonic", families=_LLAMA_4, tokens=("<|python_start|>",)),
    Rule(
        "llama3_json",
        ("ipython", '"parameters": '),
        absent_markers=("<function=", ">>>all", _PYTHONIC),
        families=("llama",),
        tokens=("<|python_tag|>",),
        defect=_ONE_DELTA,
    ),
    Rule("pythonic", (_PYTHONIC,)),
    Rule(
        "xlam",
        ("single JSON array", '{"name": "tool_call_name"'),
        defect="streams arguments twice if a delta ends inside them",
    ),
    Rule(
        "phi4_mini_json",
        ("<|tool|>",),
        families=("phi3",),
        defect="streams nothing if an answer has no calls",
        chosen=False,
    ),
    # Hermes' format, which most others adopted: JSON between two tags.
    Rule(
        "hermes",
        ("<tool_call>", "</tool_call>", "arguments"),
        absent_markers=("<|tool_call|>", "</tool_calls>"),
    ),
)

REASONING: tuple[Rule, ...] = (
    Rule("openai_gptoss", families=("gpt_oss",)),
    Rule("kimi_k3", tokens=_XTML),
    Rule(
        "minimax_m3",
        ("<mm:think>",),
        tokens=("<mm:think>", "</mm:think>"),
        defect="streams reasoning as content",
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
        "deepseek_v3",
        ("<｜Assistant｜>", "thinking", *_THINK),
        absent_markers=("```json",),
        tokens=_THINK,
    ),
    Rule("ling3", ("<arg_key>", *_THINK), families=_LING_3, tokens=_THINK),
    Rule("glm47", ("<arg_key>", "<think>"), tokens=_THINK, reasoning="by_default"),
    Rule(
        "poolside_v1", ("<arg_key>", *_THINK), families=("laguna",), tokens=("<assistant>", *_THINK)
    ),
    Rule("mimo", families=("mimo", "mimo_v2_flash"), tokens=_THINK, reasoning="by_default"),
    Rule("step3p5", ("<tool_call>", *_THINK), families=("step3p5",), tokens=_THINK),
    Rule(
        "nemotron_v3",
        ("<function=", *_THINK),
        families=("nemotron_h",),
        tokens=_THINK,
        reasoning="by_default",
    ),
    Rule(
        "granite_thinking_parser",
        ("<function=", *_THINK),
        families=_GRANITE,
        tokens=_THINK,
        reasoning="by_default",
    ),
    Rule("ernie45", ("<think>",), families=_ERNIE, tokens=_THINK),
    Rule(
        "hunyuan_a13b",
        ("<think>",),
        families=_HUNYUAN,
        defect="ends a stream with an error if a delta has several tokens",
        chosen=False,
    ),
    Rule("olmo3", ("<think>",), families=_OLMO_3, tokens=_OLMO_3_TOKENS, reasoning="opened"),
    # Qwen3's format: a switch in the template, with reasoning on by default.
    Rule("qwen3", ("enable_thinking", *_THINK), tokens=_THINK, reasoning="by_default"),
    Rule("deepseek_r1", _THINK[:1], tokens=_THINK, reasoning="opened"),
)
