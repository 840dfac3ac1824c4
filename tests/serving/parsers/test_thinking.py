# SPDX-License-Identifier: Apache-2.0
"""Whether models think unasked, of templates that switch it in the ways that publishers do."""

import pytest

from vllm_metal.serving.parsers.thinking import NEVER, Thinking, of_template

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
