# SPDX-License-Identifier: Apache-2.0
"""Counting of texts and grammars; ended requests compile nothing."""

import asyncio
import json
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from vllm import SamplingParams
from vllm.entrypoints.generate.generative_scoring.serving import (
    GenerativeScoringRequest,
    ServingGenerativeScoring,
)
from vllm.entrypoints.openai.chat_completion.batch_serving import OpenAIServingChatBatch
from vllm.entrypoints.openai.chat_completion.protocol import (
    BatchChatCompletionRequest,
    ChatCompletionRequest,
)
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.pooling.base.serving import PoolingBaseServing
from vllm.entrypoints.pooling.embed.protocol import EmbeddingCompletionRequest
from vllm.entrypoints.pooling.scoring.protocol import RerankRequest, ScoreTextRequest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_metal.patches.vllm_patches import request_sizes
from vllm_metal.serving.config import BodyLimits

PARTS = [{"type": "text", "text": "a"}]
MESSAGE = {"role": "user", "content": "a"}
SERVED = {
    CompletionRequest: (OpenAIServingCompletion, "create_completion"),
    ChatCompletionRequest: (OpenAIServingChat, "create_chat_completion"),
    BatchChatCompletionRequest: (OpenAIServingChatBatch, "create_batch_chat_completion"),
    GenerativeScoringRequest: (ServingGenerativeScoring, "create_generative_scoring"),
}


@pytest.fixture
def bounded():
    request_sizes.bound(choices=3, grammar=200)
    yield
    request_sizes.bound(10**9, 10**9)


@pytest.mark.parametrize(
    ("request_", "fits"),
    [
        (EmbeddingCompletionRequest(input=["a"] * 3), True),
        (EmbeddingCompletionRequest(input=["a"] * 4), False),
        (EmbeddingCompletionRequest(input=[[1]] * 4), False),
        (EmbeddingCompletionRequest(input=[1] * 400), True),
        (EmbeddingCompletionRequest(input="a" * 400), True),
        (ScoreTextRequest(text_1="a", text_2=["a"] * 3), True),
        (ScoreTextRequest(text_1="a", text_2=["a"] * 4), False),
        (ScoreTextRequest(text_1="a", text_2={"content": PARTS * 4}), False),
        (RerankRequest(query="a", documents=["a"] * 4), False),
        (CompletionRequest(prompt=["a"] * 3), True),
        (CompletionRequest(prompt=["a"] * 4), False),
        (CompletionRequest(prompt="a", n=4), False),
        (ChatCompletionRequest(messages=[MESSAGE] * 9, n=3), True),
        (ChatCompletionRequest(messages=[MESSAGE], n=4), False),
        (BatchChatCompletionRequest(messages=[[MESSAGE] * 9] * 3), True),
        (BatchChatCompletionRequest(messages=[[MESSAGE]] * 4), False),
        (GenerativeScoringRequest(query="a", items=["a"] * 4, label_token_ids=[1]), False),
    ],
)
def test_texts_are_counted_before_any_is_read(bounded, request_, fits):
    """Also without tenants, where nothing else reads bodies."""
    serve = getattr(*SERVED.get(type(request_), (PoolingBaseServing, "__call__")))
    # A request that gets past the count finds that this is no server.
    expected = AttributeError if fits else VLLMValidationError
    with pytest.raises(expected) as raised:
        asyncio.run(serve(SimpleNamespace(), request_, None))
    assert fits or "max_body_choices" in str(raised.value)


def chain(rules):
    return "root ::= r0\n" + "".join(f'r{n} ::= r{n + 1} "a" | "b"\n' for n in range(rules))


def references(count):
    """Makes the same as a schema."""
    rules = {f"r{n}": {"anyOf": [{"$ref": f"#/$defs/r{n + 1}"}, {}]} for n in range(count)}
    return {"$defs": rules, "$ref": "#/$defs/r0"}


def tool(depth):
    if depth == 0:
        return {"type": "string", "enum": ["a", "b"], "description": "What it is, in a sentence."}
    below = {f"name_{number}": tool(depth - 1) for number in range(4)}
    return {"type": "object", "properties": below, "required": [*below]}


@pytest.mark.parametrize(
    ("grammar", "fits"),
    [
        ({"grammar": chain(900)}, True),
        ({"grammar": chain(1500)}, False),
        ({"grammar": "start: a0\n" + "".join(f"a{n}: a{n + 1}\n" for n in range(1500))}, False),
        ({"grammar": 'root ::= "' + "a" * 2 * 10**6 + '"'}, False),
        ({"grammar": "root ::= " + " | ".join(f'"{n}"' for n in range(6000))}, False),
        ({"json": references(700)}, True),
        ({"json": references(1500)}, False),
        ({"json": json.dumps(references(1500))}, False),
        ({"json": {"enum": [f"text {n}" for n in range(4000)]}}, True),
        ({"json": {"enum": [f"text {n}" for n in range(6000)]}}, False),
        ({"json": {"anyOf": [tool(2) for _ in range(50)]}}, True),
        ({"json": {"anyOf": [tool(2) for _ in range(2000)]}}, False),
        ({"choice": [f"text {n}" for n in range(6000)]}, False),
        ({"regex": "|".join(f"text {n}" for n in range(6000))}, False),
        ({"structural_tag": json.dumps({"structures": [references(1500)]})}, False),
    ],
)
def test_grammars_are_sized_by_what_they_take(grammar, fits):
    (given,) = grammar.values()
    most = BodyLimits().max_body_grammar
    assert (request_sizes.size_of_grammar(given) <= most) is fits


def test_a_grammar_is_sized_before_it_is_looked_at(bounded):
    params = SamplingParams(structured_outputs=StructuredOutputsParams(grammar=chain(20)))
    with pytest.raises(VLLMValidationError, match="max_body_grammar"):
        params._validate_structured_outputs(None, None, None)
    SamplingParams()._validate_structured_outputs(None, None, None)


def test_a_request_that_ended_leaves_no_grammar_to_compile(monkeypatch):
    freed = []
    monkeypatch.setattr(Scheduler, "_free_request", lambda self, request: freed.append(request))
    request_sizes.drop_compilations()
    waiting, running = Future(), Future()
    running.set_running_or_notify_cancel()
    for grammar in (waiting, running, None):
        structured = SimpleNamespace(_grammar=grammar)
        request = SimpleNamespace(structured_output_request=structured)
        Scheduler._free_request(object.__new__(Scheduler), request)
    plain = SimpleNamespace(structured_output_request=None)
    Scheduler._free_request(object.__new__(Scheduler), plain)
    assert waiting.cancelled() and not running.cancelled() and len(freed) == 4
