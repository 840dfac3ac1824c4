# SPDX-License-Identifier: Apache-2.0
"""The table names existing vLLM parsers, and choices give their reasons."""

import json
import re

import pytest
from tool_formats import turns
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

from vllm_metal.serving.parsers.choice import choose
from vllm_metal.serving.parsers.files import ModelFiles
from vllm_metal.serving.parsers.table import REASONING, TOOLS

OPENED = "<think>\n"


def files(template="", family="llama", tokens=(), **more):
    return ModelFiles(family, (template,) if template else (), json.dumps(list(tokens)), **more)


def flags(*given, **named):
    return " ".join(choose(files(*given, **named)).flags)


def test_vllm_registers_every_parser_of_the_table():
    assert {rule.parser for rule in TOOLS} <= set(ToolParserManager.list_registered())
    assert {rule.parser for rule in REASONING} <= set(ReasoningParserManager.list_registered())


@pytest.mark.parametrize(
    ("get", "rules"),
    [
        (ToolParserManager.get_tool_parser, TOOLS),
        (ReasoningParserManager.get_reasoning_parser, REASONING),
    ],
)
def test_a_rule_asks_for_all_tokens_that_its_parser_cannot_be_made_without(get, rules):
    """Otherwise a choice would fail a start that worked without it."""
    for rule in rules:
        made = turns.tokenizer(rule.tokens, "".join(rule.markers))
        get(rule.parser)(made)


def test_a_model_without_the_tokens_gets_no_parser_that_needs_them():
    template = "{{ tools }}[TOOL_CALLS]"
    assert flags(template) == ""
    assert "mistral" in flags(template, tokens=["[TOOL_CALLS]"])


def test_a_parser_whose_package_is_not_installed_is_not_chosen(monkeypatch):
    """vLLM's Cohere parsers fail the start without it."""
    template = "<|START_ACTION|>{{ tools }}"
    monkeypatch.setattr("vllm_metal.serving.parsers.choice.find_spec", {"cohere_melody": 1}.get)
    assert "cohere_command3" in flags(template)
    monkeypatch.setattr("vllm_metal.serving.parsers.choice.find_spec", {}.get)
    assert flags(template) == ""
    said = choose(files(template)).of_tools
    assert "--tool-call-parser cohere_command3 is for this model" in said
    assert said.endswith("install cohere-melody")


@pytest.mark.parametrize(
    ("family", "template", "said"),
    [
        (
            "phi3",
            "{{ tools }}<|tool|>",
            "phi4_mini_json is for this model but is not chosen, because it streams no",
        ),
        (
            "hunyuan_v1_moe",
            "<think>",
            "hunyuan_a13b is for this model but is not chosen, because it ends a stream",
        ),
    ],
)
def test_a_parser_that_is_worse_than_none_is_not_chosen_and_named(family, template, said):
    choice = choose(files(template, family))
    assert choice.flags == () and choice.tool is choice.reasoning is None
    assert said in " ".join(choice.lines())


def test_what_a_chosen_parser_does_wrong_is_said():
    said = choose(files("{{ tools }}<start_function_call>")).of_tools
    assert "functiongemma" in said and "it garbles streamed calls" in said


def test_other_tags_around_calls_are_no_hermes():
    """Apriel's template writes a list between <tool_calls>."""
    template = "<tool_call> {{ arguments }} </tool_call>"
    assert "hermes" in flags(template)
    assert flags(template + "<tool_calls>[]</tool_calls>") == ""


def test_a_family_that_names_its_text_model_otherwise_is_known_by_its_tokens():
    """Kimi K3's text model is a kimi_linear."""
    tokens = ["<|open|>", "<|close|>", "<|sep|>"]
    assert flags("{{ tools }}", "kimi_linear", tokens).split()[2::2] == ["kimi_k3", "kimi_k3"]


@pytest.mark.parametrize(
    ("family", "parser"),
    [("qwen3_next", "qwen3_coder"), ("mimo_v2_flash", "mimo"), ("step3p5", "step3p5")],
)
def test_families_tell_like_formats_apart(family, parser):
    template = "<tool_call>\n<function={{ tools }}>"
    assert flags(template, family).endswith(f"--tool-call-parser {parser}")


def test_a_parser_that_waits_for_a_thoughts_end_is_not_for_a_model_that_answers_at_once():
    on_request = "{% if enable_thinking %}<think>{% endif %}</think>"
    assert flags(on_request, tokens=["<think>", "</think>"]) == ""
    assert flags(OPENED, tokens=["<think>", "</think>"]) == "--reasoning-parser deepseek_r1"


def test_a_tokenizer_that_says_how_answers_are_read_is_believed():
    found = choose(files("{{ tools }}", response_template=True))
    assert found.flags == (
        "--enable-auto-tool-choice",
        "--tool-call-parser",
        "hf",
        "--reasoning-parser",
        "hf",
    )
    assert "response_template" in found.of_tools


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("", "no chat template: chats need --chat-template"),
        ("{{ messages }}", "has no tools"),
        ("{{ tools }} in a tongue of its own", "pass --enable-auto-tool-choice --tool-call-parser"),
    ],
)
def test_what_is_not_known_is_said_with_the_flag(template, said):
    assert re.search(said, choose(files(template)).of_tools)


def test_thoughts_that_are_not_known_are_said_with_the_flag():
    assert "unless --reasoning-parser NAME" in choose(files("<|thinking|>")).of_reasoning
    assert choose(files("{{ messages }}")).of_reasoning == ""


def test_a_choice_says_why_and_what_requests_have_by_default():
    template = "<tool_call>{{ arguments }}</tool_call>{{ tools }}"
    tools, sampling = choose(files(template, sampling={"temperature": 0.6})).lines()
    assert "hermes: the chat template has <tool_call>" in tools
    assert "temperature 0.6" in sampling
