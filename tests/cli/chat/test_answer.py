# SPDX-License-Identifier: Apache-2.0
"""Requests of the chat page, and the events of an answer."""

import pytest

from vllm_metal.cli.chat import answer, markdown
from vllm_metal.cli.chat.answer import Progress
from vllm_metal.cli.chat.upstream import Model

SERVED = Model("served", None)
ASKED = {"messages": [{"role": "user", "content": "hi"}]}


def piece(text="", tokens=None, **more):
    usage = None if tokens is None else {"completion_tokens": tokens, "prompt_tokens": 7}
    return {"choices": [{"delta": {"content": text}}], "usage": usage} | more


def test_sampling_cannot_change_the_rest_of_a_request():
    asked = {
        "messages": [{"role": "user", "content": "hi", "name": "x"}],
        "sampling": {"temperature": 0, "top_p": None, "stream": False, "model": "other"},
    }
    made = answer.body(SERVED, asked)
    assert made["messages"] == [{"role": "user", "content": "hi"}]
    assert made["temperature"] == 0 and "top_p" not in made
    assert made["model"] == "served" and made["stream"] is True


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"messages": []},
        {"messages": ["hi"]},
        {"messages": [{"role": "user", "content": 3}]},
        {"messages": [{"role": "user", "content": "hi"}], "sampling": [1]},
    ],
)
def test_a_request_without_messages_is_refused_by_name(asked):
    with pytest.raises(ValueError, match=r"messages|sampling"):
        answer.body(SERVED, asked)


@pytest.mark.parametrize(
    ("name", "label", "millions"),
    [
        ("/cache/models/float32-v2/SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct", 135),
        ("/hub/models--mlx-community--Qwen3-4B-4bit/snapshots/0a1b", "Qwen3-4B-4bit", None),
        ("mlx-community/gemma-3-270m-it-4bit", "gemma-3-270m-it-4bit", 270),
        ("unsloth/Qwen3-0.6B-GGUF:Q4_K_M", "Qwen3-0.6B-GGUF:Q4_K_M", None),
        ("granite-4.0-h-350M", "granite-4.0-h-350M", 350),
        ("LFM2.5-1.2B-1M-context", "LFM2.5-1.2B-1M-context", None),
    ],
)
def test_a_model_has_a_plain_name_and_a_size_where_it_says_so(name, label, millions):
    model = Model(name, None)
    assert (model.label, model.millions) == (label, millions)


@pytest.mark.parametrize(
    ("name", "context", "asked", "given"),
    [
        ("a-135M", None, None, 1024),
        ("a-135M", 512, None, 512),
        ("a-135M", 512, 64, 64),
        ("a-4B", 512, None, None),  # one that reasons would be cut amid its reasoning
        ("a-4B", 512, 1024, 512),
    ],
)
def test_the_longest_answer_is_never_more_than_the_context(name, context, asked, given):
    request = answer.body(Model(name, context), ASKED | {"sampling": {"max_tokens": asked}})
    assert request.get("max_tokens") == given


@pytest.mark.parametrize(
    ("most", "prompt", "tokens", "name"),
    [
        (20, 7, 20, "max_tokens"),
        (20, 492, 20, "context"),
        (None, 500, 12, "context"),
        (None, 7, 16, "server"),  # a default of the model's files, or of the server
        (20, None, None, "max_tokens"),
    ],
)
def test_the_limit_that_cut_an_answer_is_known(most, prompt, tokens, name):
    request = {} if most is None else {"max_tokens": most}
    found = answer.limit(request, 512, {"prompt": prompt, "tokens": tokens})
    assert found["name"] == name


def test_events_add_up_to_the_text_and_its_html():
    pieces = ["# A", "\n\nsome", " *text*", "\n\n```\n", "x = 1\n", "```\n", "end"]
    progress, text, blocks = Progress(asked=0.0), "", []
    for part in pieces:
        progress.add(piece(part))
        event = progress.event()
        text += event["text"]
        blocks[event["from"] :] = event["blocks"]
    assert text == "".join(pieces)
    assert blocks == markdown.blocks(text)


def test_metrics_are_of_the_time_at_which_text_came():
    times = iter([12.0, 12.5, 13.0])
    progress = Progress(asked=11.5, clock=lambda: next(times))
    progress.add(piece("", tokens=1))  # half a character: no text yet
    progress.add(piece("é", tokens=2))
    progress.add(piece("t", tokens=5))
    progress.add(piece("é", tokens=8))
    details = {"cached_tokens": 4}
    usage = {"completion_tokens": 9, "prompt_tokens": 7, "prompt_tokens_details": details}
    drafts = {"num_draft_tokens": 6, "num_accepted_draft_tokens": 5}
    progress.add({"choices": [], "usage": usage, "metrics": {"speculative_decoding": drafts}})
    assert progress.metrics() == {
        "ttft": pytest.approx(0.5),
        "speed": pytest.approx(6.0),  # six tokens in a second
        "tokens": 9,
        "prompt": 7,
        "cached": 4,
        "drafted": 6,
        "accepted": 5,
    }


def test_thoughts_are_apart_from_the_text():
    progress = Progress(asked=0.0)
    progress.add({"choices": [{"delta": {"reasoning": "hm"}}]})
    event = progress.event()
    assert event["reasoning"] == "hm" and "text" not in event and "blocks" not in event
    assert event["metrics"]["ttft"] is not None
