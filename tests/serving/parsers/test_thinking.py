# SPDX-License-Identifier: Apache-2.0
"""Whether models think unasked, of templates that switch it in the ways that publishers do."""

import pytest

from vllm_metal.serving.parsers import files, thinking
from vllm_metal.serving.parsers.thinking import (
    NEVER,
    Thinking,
    of_template,
    of_unknown_template,
)

_CLOSED = "<think>\n\n</think>\n"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        # On unless it is off: Qwen3, GLM-4.5.
        (
            "A:{% if enable_thinking is defined and enable_thinking is false %}"
            + _CLOSED
            + "{% endif %}",
            Thinking(opened=False, by_default=True),
        ),
        # The same, and the prompt begins the thought: Qwen3.5.
        (
            "A:{% if enable_thinking is defined and not enable_thinking %}"
            + _CLOSED
            + "{% else %}<think>\n{% endif %}",
            Thinking(opened=True, by_default=True),
        ),
        # Off unless it is on.
        ("A:{% if enable_thinking %}<think>\n{% endif %}", NEVER),
        # Whoever does not ask gets neither.
        (
            "A:{% if enable_thinking is true %}<think>{% elif enable_thinking is false %}"
            + _CLOSED
            + "{% endif %}",
            NEVER,
        ),
        # No switch: QwQ.
        ("A:<think>\n", Thinking(opened=True, by_default=False)),
        ("A:{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}", NEVER),
        ("{{ raise_exception('no think') }}", NEVER),
        ("{% if think", NEVER),
        ("", NEVER),
    ],
)
def test_templates(template, expected):
    assert of_template(template) == expected


def test_a_template_without_an_end_is_given_up(monkeypatch, caplog):
    """It would hold up a start for ever, or take all memory."""
    assert of_unknown_template("A:<think>\n") == Thinking(opened=True, by_default=False)
    assert of_unknown_template("no thoughts") == NEVER
    assert of_unknown_template("<think>{{ 'a' * 20000000000 }}") == NEVER
    monkeypatch.setattr(thinking, "SECONDS", 0.2)
    loops = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
    assert of_unknown_template(f"<think>{loops}") == NEVER
    assert "--reasoning-parser" in caplog.text


def test_templates_of_folders_are_rendered_within_bounds(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert files.read(str(tmp_path)).judge is of_unknown_template
