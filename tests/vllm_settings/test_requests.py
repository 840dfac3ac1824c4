# SPDX-License-Identifier: Apache-2.0
"""Every request field becomes a parameter, is handled by vLLM, or is rejected."""

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.exceptions import VLLMValidationError
from vllm.platforms import current_platform
from vllm.v1.engine.input_processor import InputProcessor
from vllm_settings.configured import configure
from vllm_settings.requests import TABLES
from vllm_settings.row import differences, of_kind

ASKED = {
    ChatCompletionRequest: {"messages": [{"role": "user", "content": "Hi"}]},
    CompletionRequest: {"prompt": "Hi"},
    ResponsesRequest: {"input": "Hi"},
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
TEXT = {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}}
#: A value of each field that becomes a parameter, with what it needs beside it.
VALUES = {
    "stream": {"stream": True},
    "temperature": {"temperature": 0.5},
    "top_p": {"top_p": 0.5},
    "top_k": {"top_k": 5},
    "min_p": {"min_p": 0.5},
    "presence_penalty": {"presence_penalty": 0.5},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "seed": {"seed": 5},
    "stop": {"stop": ["."]},
    "stop_token_ids": {"stop_token_ids": [5]},
    "ignore_eos": {"ignore_eos": True},
    "logit_bias": {"logit_bias": {"5": 1.0}},
    "skip_special_tokens": {"skip_special_tokens": False},
    "include_stop_str_in_output": {"include_stop_str_in_output": True},
    "structured_outputs": {"structured_outputs": {"regex": "a"}},
    "vllm_xargs": {"vllm_xargs": {"mine": 1}},
    "n": {"n": 2},
    "min_tokens": {"min_tokens": 2},
    "spaces_between_special_tokens": {"spaces_between_special_tokens": False},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "logprob_token_ids": {"logprobs": True, "logprob_token_ids": [5]},
    "allowed_token_ids": {"allowed_token_ids": [5]},
    "bad_words": {"bad_words": ["bad"]},
    "logprobs": {"logprobs": 1},
    "top_logprobs": {"logprobs": True, "top_logprobs": 2},
    "echo": {"echo": True, "logprobs": 1},
    "response_format": {"response_format": FORMAT},
    "text": {"text": TEXT},
    "include": {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    "repetition_detection": {
        "repetition_detection": {"max_pattern_size": 2, "min_pattern_size": 1, "min_count": 4}
    },
    "stream_interval": {"stream_interval": 5},
    "routed_experts_prompt_start": {"routed_experts_prompt_start": 1},
}
#: The same for parameters that are rejected.
REFUSED = {"watermarking": True, "thinking_token_budget": 5}
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


def rows(classes, wanted):
    return [
        pytest.param(kind, name, row, id=f"{kind.__name__}-{name}")
        for kind in classes
        for name, row in TABLES[kind].items()
        if wanted(name, row)
    ]


def parameters(kind, **fields):
    """Returns the parameters that a server makes of a request."""
    request = kind(**(ASKED[kind] | fields))
    return request.to_sampling_params(64, {})


@pytest.mark.parametrize("kind", TABLES, ids=lambda kind: kind.__name__)
def test_every_field_has_a_row(kind):
    lacking, unknown = differences(TABLES[kind], kind.model_fields)
    assert not lacking, f"say in tests/vllm_settings/requests.py what becomes of {lacking}"
    assert not unknown, f"vLLM has no such fields: {unknown}"


def becomes(name, row):
    return row.said.startswith("as `SamplingParams.") and name not in (*REFUSED, *LENGTHS)


@pytest.mark.parametrize(("kind", "name", "row"), rows(TABLES, becomes))
def test_a_field_becomes_a_parameter(kind, name, row):
    fields, field = dict(VALUES[name]), row.said.rpartition(".")[2].strip("`")
    if kind is ChatCompletionRequest and name in ("logprobs", "echo"):
        fields |= {"logprobs": True, "top_logprobs": 2}
    if kind is CompletionRequest and "logprob_token_ids" in fields:
        fields["logprobs"] = 1
    if kind is ResponsesRequest and name == "top_logprobs":
        fields = {"top_logprobs": 2, "include": ["message.output_text.logprobs"]}
    assert getattr(parameters(kind, **fields), field) != getattr(parameters(kind), field)


@pytest.mark.parametrize(("kind", "name", "row"), rows(TABLES, lambda name, row: name in REFUSED))
def test_a_refused_parameter_is_named(kind, name, row):
    assert row.kind == "refused"
    with pytest.raises(VLLMValidationError, match=name):
        current_platform.validate_request({}, parameters(kind, **{name: REFUSED[name]}))


def test_no_other_field_is_refused_but_by_vllm(folder):
    others = {(k, n) for k, table in TABLES.items() for n in of_kind(table, "refused")}
    others = {(kind, name) for kind, name in others if name not in REFUSED}
    assert others == {(CompletionRequest, "prompt_embeds"), (ResponsesRequest, "prompt")}
    with pytest.raises(VLLMValidationError, match="prompt template is not supported"):
        ResponsesRequest(input="Hi", prompt={"id": "a"})
    import torch

    renderer = InputProcessor(configure(folder)).renderer
    with pytest.raises(VLLMValidationError, match="--enable-prompt-embeds"):
        renderer.render_cmpl([{"prompt_embeds": torch.zeros(2, 64)}])
