# SPDX-License-Identifier: Apache-2.0
"""The example proxy's estimate of what the decode server has cached."""

import pytest
from answered import Answered, prompt_tokens

SYSTEM = {"role": "system", "content": "s" * 4000}
TURN_1 = [SYSTEM, {"role": "user", "content": "u" * 400}]
TURN_2 = [
    *TURN_1,
    {"role": "assistant", "content": "a" * 800},
    {"role": "user", "content": "v" * 80},
]


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"prompt": list(range(70))}, 70),
        ({"prompt": [[1, 2, 3], [4, 5]]}, 5),
        ({"prompt": "x" * 400, "model": "y" * 400}, 100),
        ({"messages": [{"role": "user", "content": "x" * 396}]}, 100),
        ({"max_tokens": 7}, 0),
        ({"messages": [{"content": [{"image_url": {"url": "data:image/png;base64,AAAA"}}]}]}, 0),
    ],
)
def test_a_prompts_length(body: dict, tokens: int) -> None:
    assert prompt_tokens(body) == tokens


def chat(messages: list[dict], **more: object) -> dict:
    return {"messages": messages} | more


def test_a_next_turn_is_its_question() -> None:
    answered = Answered()
    assert answered.new_tokens(chat(TURN_1), "") == prompt_tokens(chat(TURN_1))
    answered.note(chat(TURN_1), "")
    assert answered.new_tokens(chat(TURN_1), "") == 0
    assert answered.new_tokens(chat(TURN_2), "") == 21  # and its role


def test_another_conversation_shares_its_beginning() -> None:
    answered = Answered()
    answered.note(chat(TURN_2), "")
    other = chat([SYSTEM, {"role": "user", "content": "w" * 396}])
    assert answered.new_tokens(other, "") == 100


@pytest.mark.parametrize("changed", [{"tools": ["t"]}, {"model": "another"}, {"whose": "another"}])
def test_nothing_is_known_of_other_tools_models_and_tenants(changed: dict) -> None:
    answered = Answered()
    answered.note(chat(TURN_1), "")
    whose = changed.pop("whose", "")
    body = chat(TURN_1, **changed)
    assert answered.new_tokens(body, whose) == prompt_tokens(body)


@pytest.mark.parametrize("unit", ["ab", [7, 8]], ids=["text", "ids"])
def test_a_text_that_goes_on_is_known_by_pieces(unit: str | list[int]) -> None:
    answered = Answered()
    answered.note({"prompt": 1000 * unit}, "")
    longer = {"prompt": 1000 * unit + 100 * unit[:1]}
    new = answered.new_tokens(longer, "")
    assert 0 < new <= prompt_tokens({"prompt": 100 * unit[:1]}) + 64


def test_the_oldest_go_where_a_pool_is_full() -> None:
    answered = Answered(pool_tokens=150)
    first, second = ({"prompt": [number] * 128} for number in (1, 2))
    answered.note(first, "")
    answered.note(second, "")
    assert answered.new_tokens(second, "") == 0
    assert answered.new_tokens(first, "") == 128  # of which a rest is not the beginning
