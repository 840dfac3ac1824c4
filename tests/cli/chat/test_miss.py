# SPDX-License-Identifier: Apache-2.0
"""Parsing of the header for a missed prefix."""

from vllm_metal.cli.chat import miss
from vllm_metal.serving.prefix_misses import header
from vllm_metal.serving.prefix_misses.explain import Miss


def test_what_the_server_writes_is_read():
    texts = 'the "12th" of May; 100 % of naïve text', 'a \\ and token=9; role="x"'
    written = Miss(
        cause="date", cached=16, lost=48, token=37, message=0, role="system",
        before=texts[0], now=texts[1],
    )  # fmt: skip
    assert miss.read(header.value(written, with_text=True)) == {
        "cause": "date",
        "cached": 16,
        "lost": 48,
        "token": 37,
        "message": 0,
        "role": "system",
        "before": texts[0],
        "now": texts[1],
    }


def test_an_answer_without_the_header_missed_nothing():
    assert miss.read(None) is None
