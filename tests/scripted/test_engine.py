# SPDX-License-Identifier: Apache-2.0
"""The engine generates scripts in chunks, after cached prefixes, and concurrently."""

import pytest
from e2e.harness import counters, engine
from vllm import SamplingParams

import scripted
from scripted import Call, Script, Turn

pytestmark = pytest.mark.more

STEPS = tuple(Turn(f"Step {count}.", (Call("read", {"n": count}),)) for count in range(9))
TURNS = (*STEPS, Turn("End."))
LONG = Script((Turn("word and " * 1000),), marker="[long]")
GREEDY = SamplingParams(temperature=0, max_tokens=200)
SAMPLED = SamplingParams(temperature=1, max_tokens=200, seed=3)


def history(results):
    """Makes a conversation with this many tool results."""
    messages = [
        {"role": "system", "content": "Rules and more rules. " * 600},
        {"role": "user", "content": "Do it."},
    ]
    for number in range(results):
        messages += [
            {"role": "assistant", "content": f"Step {number}."},
            {"role": "tool", "content": "word and word " * 40},
        ]
    return messages


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    model = scripted.checkpoint(tmp_path_factory.mktemp("model"), [Script(TURNS), LONG])
    options = {"max_model_len": 65536, "max_num_batched_tokens": 512}
    with engine(str(model), **options) as started:
        yield started


@pytest.mark.parametrize(
    "params", [GREEDY, pytest.param(SAMPLED, marks=pytest.mark.slow)], ids=["greedy", "sampled"]
)
def test_each_turn_is_said_and_most_of_its_prompt_is_cached(llm, params):
    for results, turn in enumerate(TURNS):
        before = counters(llm)
        (output,) = llm.chat(history(results), params, use_tqdm=False)
        assert output.outputs[0].text == turn.answer
        now = counters(llm)
        asked, found = (
            now[f"vllm:prefix_cache_{name}"] - before[f"vllm:prefix_cache_{name}"]
            for name in ("queries", "hits")
        )
        assert results == 0 or found / asked > 0.9


@pytest.mark.slow
def test_turns_of_one_batch_are_told_apart(llm):
    outputs = llm.chat([history(results) for results in range(10)], GREEDY, use_tqdm=False)
    assert [output.outputs[0].text for output in outputs] == [turn.answer for turn in TURNS]


def test_a_very_long_answer_ends_where_its_script_does(llm):
    question = [{"role": "user", "content": "[long]"}]
    (output,) = llm.chat(question, SamplingParams(temperature=0, max_tokens=4000), use_tqdm=False)
    assert output.outputs[0].text == LONG.turns[0].answer
    assert output.outputs[0].finish_reason == "stop"
