# SPDX-License-Identifier: Apache-2.0
"""Explanations of changes, with characters as tokens."""

import pytest
from prompt_shapes import PLAIN, RULES, SHAPES, TALK, decode, rendered

from vllm_metal.serving.prefix_misses.explain import LEAST, explain
from vllm_metal.serving.prefix_misses.prompt import Prompt
from vllm_metal.serving.prefix_misses.recent import RecentPrompts

BLOCK_SIZE = 16


def report(before, now, cached=None, block_size=BLOCK_SIZE, answered=True):
    """Returns the miss of `now` after `before`; `cached`: as by a complete cache."""
    recent = RecentPrompts(8)
    remembered, _ = recent.add(before)
    remembered.is_computed = answered
    _, closest = recent.add(now)
    if cached is None:
        common = min(closest.common if closest else 0, len(now.tokens) - 1)
        cached = common // block_size * block_size
    return explain(now, closest, cached, block_size, decode)


@pytest.mark.parametrize("name", SHAPES)
def test_each_shape_is_told_by_its_place_and_kind(name):
    shape = SHAPES[name]
    before, now = rendered(shape.before, shape.tools[0]), rendered(shape.now, shape.tools[1])
    miss = report(before, now)
    if shape.cause is None:
        assert miss is None or miss.cause == "first_seen"
        return
    assert (miss.cause, miss.message, miss.role) == (shape.cause, shape.message, shape.role)
    same = next(i for i in range(len(now.tokens)) if now.tokens[i] != before.tokens[i])
    assert miss.token == same
    if miss.cause != "first_seen":
        assert miss.lost == min(len(before.tokens), len(now.tokens) - 1) - miss.cached
        assert miss.before != miss.now


def test_a_template_that_drops_thoughts_is_told_so():
    talk = [dict(message) for message in TALK]
    talk[1]["content"] = "<think>Type 55, or 65? The baker said 65.</think>" + talk[1]["content"]
    messages = [{"role": "system", "content": RULES}, *talk]
    miss = report(rendered(messages), rendered(messages, thoughts=False))
    assert (miss.cause, miss.message) == ("template", None)


def test_what_the_cache_let_go_is_no_change():
    prompt = rendered(PLAIN)
    miss = report(prompt, prompt, cached=160)
    assert (miss.cause, miss.token) == ("evicted", 160)
    assert miss.lost == len(prompt.tokens) - 1 - 160
    assert report(prompt, prompt, cached=160, answered=False).cause == "in_flight"


def test_long_blocks_lose_what_is_behind_the_last_whole_one():
    prompt = rendered(PLAIN)
    assert report(prompt, prompt) is None
    miss = report(prompt, prompt, block_size=512)
    assert (miss.cause, miss.cached) == ("granularity", len(prompt.tokens) // 512 * 512)


def test_little_is_not_worth_a_word():
    tokens = list(range(8 * LEAST))
    before, now = Prompt.of(tokens), Prompt.of([*tokens[: -LEAST + 16], *range(1000, 1100)])
    assert report(before, now) is None


def test_a_text_without_messages_has_a_place_and_a_kind():
    first, second = (Prompt.of(list(map(ord, f"On {day} {RULES}"))) for day in ("1/2/26", "1/3/26"))
    miss = report(first, second)
    assert (miss.cause, miss.token, miss.message, miss.role) == ("date", 5, None, None)
    assert (miss.before, miss.now) == ("1/2/26", "1/3/26")
