# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` gets its model's parsers unless flags name some."""

import json
import logging
from pathlib import Path

import mlx.core as mx
import pytest
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.entrypoints.common.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_metal.serving.parsers import thinking
from vllm_metal.serving.parsers.serve import set_parsers

TEMPLATE = (
    "{{ tools }}<tool_call>{{ arguments }}</tool_call>"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)


@pytest.fixture(scope="module")
def parser():
    return make_arg_parser(FlexibleArgumentParser())


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"lm_head.weight": mx.zeros((1, 1))})
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<think>": 1, "</think>": 2}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.6}))
    return str(tmp_path)


@pytest.fixture
def served(parser, model):
    def checked(*flags):
        args = parser.parse_args([model, *flags])
        ServeSubcommand().validate(args)
        return args.tool_call_parser, args.enable_auto_tool_choice, args.reasoning_parser

    return checked


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"),
        ("--additional-config", '{"choose_parsers": false}'),
    ],
)
def test_a_template_without_an_end_ends_the_start(served, model, monkeypatch, flags):
    monkeypatch.setattr(thinking, "SECONDS", 0.1)
    endless = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
    Path(model, "chat_template.jinja").write_text(endless)
    with pytest.raises(ValueError, match="chat template takes more than"):
        served(*flags)


def test_a_server_gets_the_parsers_of_its_model_and_says_so(served, caplog):
    with caplog.at_level(logging.INFO, logger="vllm_metal.serving.parsers.serve"):
        assert served() == ("hermes", True, "qwen3")
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert "--tool-call-parser hermes: the chat template has <tool_call>" in said
    assert "--reasoning-parser qwen3" in said and "temperature 0.6" in said


def test_what_a_user_says_stays(served):
    assert served("--tool-call-parser", "mistral") == ("mistral", False, "qwen3")
    assert served("--reasoning-parser", "olmo3") == ("hermes", True, "olmo3")
    assert served("--structured-outputs-config", '{"reasoning_parser": "olmo3"}')[2] == ""


def test_tool_choice_without_a_parser_gets_one(served):
    """vLLM rejects the flag alone."""
    assert served("--enable-auto-tool-choice") == ("hermes", True, "qwen3")


def test_a_setting_turns_it_off(served):
    assert served("--additional-config", '{"choose_parsers": false}') == (None, False, "")


def test_a_users_template_decides(served, tmp_path):
    path = tmp_path / "mine.jinja"
    path.write_text("{{ tools }}<minimax:tool_call>")
    assert served("--chat-template", str(path)) == ("minimax_m2", True, "")


def test_a_model_that_cannot_be_read_is_left_to_vllm(parser, model, tmp_path, caplog):
    (tmp_path / "config.json").write_text("[]")
    args = parser.parse_args([model])
    with caplog.at_level(logging.INFO, logger="vllm_metal.serving.parsers.serve"):
        set_parsers(args)
    assert (args.tool_call_parser, args.reasoning_parser) == (None, "")
    assert "No parsers are chosen" in caplog.text
