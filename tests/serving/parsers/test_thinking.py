# SPDX-License-Identifier: Apache-2.0
"""Detection of templates that reason by default."""

import pytest

from vllm_metal.serving.parsers import files, thinking
from vllm_metal.serving.parsers.thinking import (
    NEVER,
    EndlessTemplate,
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


@pytest.mark.parametrize("speaks", ["<think>", ""])
def test_a_template_without_an_end_is_an_error(monkeypatch, speaks):
    """It would hang the start or use up all memory; so would vLLM's warm-up."""
    with pytest.raises(EndlessTemplate, match="--chat-template"):
        of_unknown_template(speaks + "{{ 'a' * 20000000000 }}")
    monkeypatch.setattr(thinking, "SECONDS", 0.2)
    loops = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
    with pytest.raises(EndlessTemplate, match=r"0\.2 s"):
        of_unknown_template(speaks + loops)


def test_templates_with_an_end_are_rendered_apart():
    assert of_unknown_template("A:<think>\n") == Thinking(opened=True, by_default=False)
    for template in ("no thoughts", "{{ raise_exception('no') }}", "{% if", ""):
        assert of_unknown_template(template) == NEVER


def test_templates_of_folders_are_rendered_within_bounds(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert files.read(str(tmp_path)).judge is of_unknown_template
