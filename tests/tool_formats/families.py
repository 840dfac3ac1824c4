# SPDX-License-Identifier: Apache-2.0
"""Families with tool calls or reasoning, their templates, and known errors of vLLM's parsers.

`written.py` has those without a published template. Cohere's are tested if the package
cohere_melody is installed. Excluded: phi4_mini_json, which streams nothing of an answer without
calls, and loses calls whose arguments have a bracket.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

ONE_DELTA = "vLLM's parser loses a call that comes whole in one delta"
#: Formats in which a call has no surrounding text.
ALONE = ("call", "calls", "answer")
#: Formats with one call per turn.
ONE = ("call", "said", "answer")


@dataclass(frozen=True, eq=False)
class Rendered:
    """A family tested with its own template."""

    template: str  # name in `templates.template`
    family: str  # model_type
    parsers: tuple[str | None, str | None]  # of tool calls, of reasoning
    thinks: bool = False  # whether the template writes reasoning
    tokens: tuple[str, ...] = ()  # tokenizer's tokens that the template does not name
    module: str = ""  # imported by its parsers but not required by vLLM
    cases: tuple[str, ...] = ("call", "calls", "said", "answer")
    #: Cases in which vLLM's parser errs, with its behavior: "case whole" or "case streamed".
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
        tokens=("<|python_tag|>",),  # its template does not write it for the user's tools
        cases=("call", "answer"),  # its template writes one call, and no surrounding text
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
    Rendered("ibm-granite-granite-4.1", "granitemoehybrid", ("granite4", None)),
    Rendered("Bielik-11B-v3.0-Instruct", "llama", ("hermes", None)),
    Rendered("NousResearch-Hermes-3-Llama-3.1-8B-tool_use", "llama", ("hermes", None), cases=ALONE),
    Rendered("MiMo-VL", "mimo", ("hermes", None)),
    Rendered("Spark2.5", "spark2_5", ("glm47", "glm47"), thinks=True),
    Rendered("inclusionai-ling-3.0-flash", "bailing_hybrid", ("ling3", "ling3"), thinks=True),
    Rendered("poolside-Laguna-S-2.1", "laguna", ("poolside_v1", "glm47"), thinks=True),
    Rendered("poolside-Laguna-XS-2.1", "laguna", ("poolside_v1", "poolside_v1")),
    Rendered(
        "Kimi-K3",
        "kimi_linear",
        ("kimi_k3", "kimi_k3"),
        thinks=True,
    ),
    Rendered(
        "MiniMax-M3",
        "minimax_m3",
        ("minimax_m3", "minimax_m3"),
        thinks=True,
        tokens=("]<]minimax[>[",),
        errs=dict.fromkeys(
            ("call streamed", "calls streamed", "said streamed", "answer streamed"),
            "vLLM's parser finds the end of a thought in the template's instructions",
        ),
    ),
    Rendered(
        "muse-glimmer",
        "muse_glimmer",
        ("muse_glimmer", "muse_glimmer"),
        thinks=True,
        cases=ALONE,
        errs={"calls streamed": "vLLM's parser loses the first of two calls in one delta"},
    ),
    Rendered(
        "openbmb-MiniCPM5-1B",
        "minicpm",
        ("minicpm5", None),
        errs={
            "said whole": "vLLM's parser drops the text before a call",
            **dict.fromkeys(
                ("call streamed", "calls streamed"), "vLLM's parser streams a call as text, too"
            ),
        },
    ),
    Rendered(
        "GigaChat3.1-10B-A1.8B",
        "deepseek_v3",
        ("gigachat3", None),
        cases=ONE,
        errs=dict.fromkeys(("call streamed", "said streamed"), ONE_DELTA),
    ),
    Rendered(
        "vllm:internlm2_tool",
        "internlm2",
        ("internlm", None),
        errs={
            "calls whole": "vLLM's parser raises where an answer has two calls",
            "said streamed": ONE_DELTA,
        },
    ),
    Rendered(
        "vllm:hunyuan_a13b",
        "hunyuan_v1_moe",
        ("hunyuan_a13b", None),
        cases=("call", "calls", "said"),  # it writes a role's name before an answer
        errs=dict.fromkeys(
            ("call streamed", "calls streamed", "said streamed"),
            "vLLM's parser loses streamed arguments, and calls behind text",
        ),
    ),
    Rendered(
        "vllm:functiongemma",
        "gemma3_text",
        ("functiongemma", None),
        cases=ALONE,
        errs=dict.fromkeys(
            ("call streamed", "calls streamed"), "vLLM's parser garbles streamed arguments"
        ),
    ),
    Rendered(
        "mistralai-Mistral-Nemo-Instruct-2407",
        "mistral",
        ("mistral", None),
        cases=ALONE,
        errs={
            "call streamed": "vLLM's parser garbles arguments where a delta ends just before them"
        },
    ),
    Rendered("mistralai-Ministral-3-14B-Reasoning-2512", "mistral3", ("mistral", "mistral")),
    Rendered("vllm:gemma4", "gemma4_text", ("gemma4", "gemma4"), cases=ALONE),
    Rendered(
        "vllm:llama4_json",
        "llama4",
        ("llama4_json", None),
        cases=("call",),
        tokens=("<|python_tag|>",),
        errs={"call streamed": ONE_DELTA},
    ),
    Rendered(
        "vllm:deepseekr1",
        "deepseek_v3",
        ("deepseek_v3", None),
        errs=dict.fromkeys(("call streamed", "calls streamed", "said streamed"), ONE_DELTA),
    ),
    Rendered(
        "LFM2.5-8B-A1B",
        "lfm2_moe",
        ("lfm2", None),
        tokens=("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    Rendered(
        "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
        "cohere2",
        ("cohere_command3", "cohere_command3"),
        cases=("call", "calls"),
        module="cohere_melody",
    ),
    Rendered(
        "Cohere2MoE",
        "cohere2",
        ("cohere_command4", "cohere_command4"),
        thinks=True,
        cases=ALONE,
        module="cohere_melody",
    ),
)
