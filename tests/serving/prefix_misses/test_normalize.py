# SPDX-License-Identifier: Apache-2.0
"""Parts that are removed from system messages, and parts that stay."""

import pytest

from vllm_metal.serving.prefix_misses.normalize import normalizer
from vllm_metal.settings.additional_config import NORMALIZED

CASES = {
    "billing_header": [
        ("x-anthropic-billing-header: cc_version=2.1.330; cch=0a1b2;\nBe brief.", "Be brief."),
        ("Ask for the x-anthropic-billing-header: it is", None),
    ],
    "token_countdown": [
        ("<total_tokens>14,000 tokens left</total_tokens>\nBe brief.", "Be brief."),
        ("Token usage: 48012/1000000; 951988 remaining\nBe brief.", "Be brief."),
        ("There were 3 tokens left in the purse, so he paid.", None),
    ],
    "times": [
        ("It is Wed Nov 25 10:32:05 UTC 2026.", "It is Wed Nov 25 2026."),
        ("now=2026-11-30T23:59:59.5Z;", "now=2026-11-30;"),
        ("On 2026-11-30 at 10:05 PM, or", "On 2026-11-30, or"),
        ("Today is 2026-11-30; mix 3:2.", None),
    ],
    "uuids": [
        (
            "Session 7b1c2d3e-1111-2222-3333-444455556666.",
            "Session 00000000-0000-0000-0000-000000000000.",
        ),
        ("commit 7b1c2d3e", None),
    ],
}


def test_each_name_that_can_be_set_is_known():
    assert set(CASES) == set(NORMALIZED)
    normalizer(NORMALIZED)


@pytest.mark.parametrize("name", CASES)
def test_a_name_takes_out_its_texts_and_no_others(name):
    of = normalizer([name])
    for text, left in CASES[name]:
        message = {"role": "system", "content": text}
        assert of([message]) == [message | {"content": text if left is None else left}]
    others = [text for other in CASES if other != name for text, _ in CASES[other]]
    for text in others:
        assert of([{"role": "system", "content": text}])[0]["content"] == text


def test_parts_of_content_are_read_and_other_roles_are_not():
    text = "Session 7b1c2d3e-1111-2222-3333-444455556666"
    zeros = "Session 00000000-0000-0000-0000-000000000000"
    picture = {"type": "image_url", "image_url": {"url": text}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": text}, picture]},
        {"role": "user", "content": text},
        {"role": "system", "content": None},
    ]
    changed = normalizer(["uuids"])(messages)
    assert changed[0]["content"] == [{"type": "text", "text": zeros}, picture]
    assert changed[1:] == messages[1:]
    assert messages[0]["content"][0]["text"] == text  # it was not changed in place
