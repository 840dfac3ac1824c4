# SPDX-License-Identifier: Apache-2.0
"""The earlier prompt with the longest common prefix, against a naive search."""

import hypothesis
from hypothesis import strategies as st

from vllm_metal.serving.prefix_misses.prompt import Prompt
from vllm_metal.serving.prefix_misses.recent import CHUNK, RecentPrompts

PARTS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from([1, 7, CHUNK - 1, CHUNK, CHUNK + 1])),
    min_size=1,
    max_size=4,
)


def common(one, other):
    shorter = min(len(one), len(other))
    return next((i for i in range(shorter) if one[i] != other[i]), shorter)


@hypothesis.given(st.lists(PARTS, min_size=1, max_size=8), st.integers(1, 5))
def test_the_longest_common_beginning_is_found(parts, most):
    recent, before = RecentPrompts(most), []
    for part in parts:
        tokens = [token for token, count in part for _ in range(count)]
        remembered, closest = recent.add(Prompt.of(tokens))
        expected = max((common(tokens, other) for other in before), default=0)
        assert (closest.common if closest else 0) == expected
        if closest:
            found = closest.before.tokens(0, closest.before.num_tokens)
            assert found in before
            assert common(found, tokens) == expected
        assert remembered.tokens(3, 9) == tokens[3:9]
        before = [*before, tokens][-most:]
        assert len(recent) == len(before)


def test_what_prompts_share_is_kept_once_and_let_go_with_the_last_of_them():
    recent = RecentPrompts(8)
    head = list(range(4 * CHUNK))
    for turn in range(3):
        recent.add(Prompt.of(head + [turn] * CHUNK))
    assert recent.nbytes == 4 * (4 + 3) * CHUNK
    recent.forget()
    assert recent.nbytes == 4 * (4 + 2) * CHUNK
    recent.forget()
    recent.forget()
    assert (recent.nbytes, len(recent)) == (0, 0)
    _, closest = recent.add(Prompt.of(head))
    assert closest is None


def test_of_equal_prefixes_the_newest_counts():
    recent = RecentPrompts(8)
    for last in (1, 2, 3):
        recent.add(Prompt.of([7, 7, last]))
    _, closest = recent.add(Prompt.of([7, 7, 9]))
    assert closest.before.tokens(0, 3) == [7, 7, 3]


def test_where_the_first_token_differs_messages_tell_what_is_alike():
    recent = RecentPrompts(8)
    asked = {"role": "user", "content": "Where is Paris?"}
    other = {"role": "user", "content": "Where is Rome?"}
    recent.add(Prompt.of([1, 2, 3], [{"role": "system", "content": "at 10:00"}, asked]))
    recent.add(Prompt.of([4, 5, 6], [{"role": "system", "content": "at 10:00"}, other]))
    _, closest = recent.add(Prompt.of([9, 2], [{"role": "system", "content": "at 11:00"}, asked]))
    assert (closest.before.tokens(0, 1), closest.common) == ([1], 0)
    _, nothing = recent.add(Prompt.of([8], [{"role": "user", "content": "Why?"}]))
    assert nothing is None
