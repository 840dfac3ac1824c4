# SPDX-License-Identifier: Apache-2.0
"""Errors for unsupported requests name the remedy."""

import asyncio
from types import SimpleNamespace

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.exceptions import VLLMValidationError
from vllm.renderers import chat_utils
from vllm.renderers.online_renderer import OnlineRenderer

from vllm_metal.patches.vllm_patches import error_remedies

TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {}}}


@pytest.mark.parametrize("keeps", [True, False])
def test_a_server_that_keeps_none_names_the_variable(monkeypatch, keeps):
    ask = OpenAIServingResponses._make_not_found_error
    monkeypatch.setattr(OpenAIServingResponses, "_make_not_found_error", ask)
    error_remedies.name_remedies()
    server = object.__new__(OpenAIServingResponses)
    server.enable_store = keeps
    server.create_error_response = lambda message, **more: SimpleNamespace(
        error=SimpleNamespace(message=message)
    )
    told = server._make_not_found_error("resp_1").error.message
    assert "Response with id 'resp_1' not found." in told
    assert ("VLLM_ENABLE_RESPONSES_API_STORE=1" in told) == (not keeps)


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_tools_are_refused_by_the_template_that_has_none(monkeypatch, choice):
    make = OnlineRenderer.create_error_response
    monkeypatch.setattr(OnlineRenderer, "create_error_response", make)
    error_remedies.name_remedies()
    server = object.__new__(OnlineRenderer)
    server.renderer, server.parser = SimpleNamespace(tokenizer=None), None
    server.use_harmony = server.enable_auto_tools = False
    asked = ChatCompletionRequest(messages=[], tools=[TOOL], tool_choice=choice)
    told = asyncio.run(server.render_chat(asked)).error.message
    assert "its chat template has none" in told
    assert server.create_error_response("else").error.message == "else"


@pytest.mark.parametrize("kind", ["image", "video", "audio"])
def test_a_model_that_reads_text_alone_says_so(monkeypatch, kind):
    tracker = chat_utils.BaseMultiModalItemTracker
    monkeypatch.setattr(tracker, "_validate_add", tracker._validate_add)
    error_remedies.name_remedies()
    config = SimpleNamespace(
        is_multimodal_model=False, served_model_name="small", multimodal_config=None
    )
    asked = SimpleNamespace(model_config=config)
    with pytest.raises(VLLMValidationError, match=f"^small reads only text, not {kind}: leave"):
        tracker._validate_add(asked, kind)
