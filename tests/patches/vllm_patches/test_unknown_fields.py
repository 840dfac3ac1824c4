# SPDX-License-Identifier: Apache-2.0
"""Unknown fields are listed in the response, or rejected if they have a meaning."""

import pytest
from fastapi import FastAPI
from pydantic import TypeAdapter, ValidationError
from starlette.testclient import TestClient
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

from vllm_metal.patches.vllm_patches import unknown_fields

USER = {"role": "user", "content": "Hello"}
BODIES = {
    AnthropicMessagesRequest: {"model": "m", "max_tokens": 8, "messages": [USER]},
    ChatCompletionRequest: {"model": "m", "messages": [USER], "max_tokens": 8},
    CompletionRequest: {"model": "m", "prompt": "Hello", "max_tokens": 8},
    ResponsesRequest: {"model": "m", "input": "Hello"},
}


@pytest.fixture(scope="module", autouse=True)
def changed():
    for _ in range(2):  # as where a process makes two servers
        unknown_fields.report_unknown_fields()


@pytest.fixture(scope="module")
def client():
    """A client of a server with a route per class that returns the parsed body."""
    app = FastAPI()
    for model in BODIES:

        def answer(body):
            return {"model": body.model}

        answer.__annotations__ = {"body": model}
        app.post(f"/{model.__name__}")(answer)
    return TestClient(unknown_fields.around(app, None))


@pytest.mark.parametrize("model", BODIES)
def test_fields_without_effect_are_listed_and_others_are_not(client, model):
    path, body = f"/{model.__name__}", BODIES[model]
    told = client.post(path, json=body)
    assert told.status_code == 200 and unknown_fields.HEADER not in told.headers
    told = client.post(path, json=body | {"made_up": 1, "x": None, "temperature": 0.5})
    assert told.status_code == 200
    assert told.headers[unknown_fields.HEADER] == "made_up, x"


def test_a_header_has_nothing_in_it_but_a_few_printable_names(client):
    names = {f"{'n' * 99}{number}": 1 for number in range(40)} | {"a\r\nb: c": 1, "é": 1}
    told = client.post("/CompletionRequest", json=BODIES[CompletionRequest] | names)
    listed = told.headers[unknown_fields.HEADER]
    assert listed.isascii() and "\n" not in listed and len(listed) < 4000


@pytest.mark.parametrize("name", unknown_fields.MEANT)
@pytest.mark.parametrize("model", BODIES)
def test_a_name_that_means_something_elsewhere_says_what_to_use(model, name):
    for read in (model.model_validate, TypeAdapter(model).validate_python):
        with pytest.raises(ValidationError, match=f"{name} is not supported: ") as refused:
            read(BODIES[model] | {name: 1})
        assert refused.value.error_count() == 1


@pytest.mark.parametrize("model", BODIES)
def test_no_field_that_vllm_knows_is_refused(model):
    assert not model.model_fields.keys() & unknown_fields.MEANT.keys()
