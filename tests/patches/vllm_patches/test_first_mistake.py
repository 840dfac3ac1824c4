# SPDX-License-Identifier: Apache-2.0
"""Invalid requests are rejected sooner; valid ones are read as before."""

import pytest
from pydantic import TypeAdapter, ValidationError
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.generate.generative_scoring.serving import GenerativeScoringRequest
from vllm.entrypoints.openai.chat_completion.protocol import (
    BatchChatCompletionRequest,
    ChatCompletionRequest,
)
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.pooling.classify.protocol import ClassificationCompletionRequest
from vllm.entrypoints.pooling.embed.protocol import EmbeddingCompletionRequest
from vllm.entrypoints.pooling.pooling.protocol import PoolingCompletionRequest
from vllm.entrypoints.pooling.scoring.protocol import RerankRequest, ScoreTextRequest
from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest

from vllm_metal.patches.vllm_patches.first_mistake import stop_at_the_first_mistake

PART = {"type": "text", "text": "a"}
USER = {"role": "user", "content": "Hello"}
WRONG = [
    (ResponsesRequest, {"model": "m"}, "input", {}),
    (ResponsesRequest, {"model": "m", "input": "x"}, "tools", {}),
    (ChatCompletionRequest, {"model": "m"}, "messages", {}),
    (ChatCompletionRequest, {"model": "m", "messages": [USER]}, "tools", {}),
    (CompletionRequest, {"model": "m"}, "prompt", [{}]),
    (AnthropicMessagesRequest, {"model": "m", "max_tokens": 1}, "messages", {}),
    (BatchChatCompletionRequest, {"model": "m"}, "messages", [{}]),
    (TokenizeChatRequest, {"model": "m"}, "messages", {}),
    (EmbeddingCompletionRequest, {"model": "m"}, "input", {}),
    (PoolingCompletionRequest, {"model": "m"}, "input", {}),
    (ClassificationCompletionRequest, {"model": "m"}, "input", {}),
    (RerankRequest, {"model": "m", "query": "a"}, "documents", 1),
    (ScoreTextRequest, {"model": "m", "text_1": "a"}, "text_2", 1),
    (GenerativeScoringRequest, {"query": "a", "label_token_ids": [1]}, "items", {}),
]


@pytest.fixture(scope="module", autouse=True)
def changed():
    stop_at_the_first_mistake()


def mistakes(read, body):
    with pytest.raises(ValidationError) as refused:
        read(body)
    return refused.value.error_count()


@pytest.mark.parametrize(("model", "fields", "name", "item"), WRONG)
def test_many_mistakes_cost_no_more_than_one(model, fields, name, item):
    """Also for FastAPI, which parses bodies with an adapter of the class."""
    for read in (model.model_validate, TypeAdapter(model).validate_python):
        one, many = (mistakes(read, fields | {name: [item] * count}) for count in (1, 1000))
        assert many == one


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (ResponsesRequest, {"model": "m", "input": [USER, {"role": "assistant", "content": "a"}]}),
        (ChatCompletionRequest, {"model": "m", "messages": [USER] * 3, "stop": ["a", "b"]}),
        (CompletionRequest, {"model": "m", "prompt": [[1, 2], [3]]}),
        (AnthropicMessagesRequest, {"model": "m", "max_tokens": 1, "messages": [USER, USER]}),
        (EmbeddingCompletionRequest, {"model": "m", "input": ["a", "b"]}),
        (EmbeddingCompletionRequest, {"model": "m", "input": [[1], [2]]}),
        (RerankRequest, {"query": "a", "documents": ["a", {"content": [PART, PART]}]}),
        (GenerativeScoringRequest, {"query": "a", "items": ["a"], "label_token_ids": [1]}),
    ],
)
def test_requests_without_mistakes_are_read_whole(model, body):
    read = model.model_validate(body).model_dump(exclude_unset=True)
    lists = [name for name, value in body.items() if isinstance(value, list)]
    assert {name: len(read[name]) for name in lists} == {name: len(body[name]) for name in lists}
