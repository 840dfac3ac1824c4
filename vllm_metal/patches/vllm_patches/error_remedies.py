# SPDX-License-Identifier: Apache-2.0
"""Corrects vLLM's request errors that give no remedy, or one that does not apply here."""

# Remove when vLLM's errors name these remedies. Read against vLLM 0.33.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_metal.patches.vllm_patches.replacing import replace

_STORE = "VLLM_ENABLE_RESPONSES_API_STORE"
_WANTS_A_PARSER = "--tool-call-parser to be set"


def name_remedies() -> None:
    """Adds the remedies to vLLM's errors; call it where a server's command line is made."""
    # vLLM stores no responses unless a variable is set, yet gives each an id and then answers that
    # the id does not exist. For an image it says that the model is not multimodal. For tools it
    # says that options are missing: here they are set if the model's chat template has tools.
    from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
    from vllm.renderers.chat_utils import BaseMultiModalItemTracker
    from vllm.renderers.online_renderer import OnlineRenderer

    replace(OpenAIServingResponses, "_make_not_found_error", _explain_stored_responses)
    replace(OnlineRenderer, "create_error_response", _explain_tools)
    replace(BaseMultiModalItemTracker, "_validate_add", _explain_media)


def _explain_stored_responses(make: Callable[..., Any], self: Any, response_id: str) -> Any:
    response = make(self, response_id)
    if not self.enable_store:
        response.error.message += (
            f" This server stores no responses: start it with {_STORE}=1, or send the "
            "whole conversation."
        )
    return response


def _explain_tools(
    make: Callable[..., Any], self: Any, message: Any, *args: Any, **options: Any
) -> Any:
    if isinstance(message, str) and message.endswith(_WANTS_A_PARSER):
        message = (
            "tools are not supported by this model: its chat template has none. Leave "
            "tools out, or serve a model whose template has them; if its template formats "
            "tool calls in an unknown way, name the parser with --tool-call-parser"
        )
    return make(self, message, *args, **options)


def _explain_media(validate: Callable[..., Any], self: Any, modality: str) -> Any:
    from vllm.exceptions import VLLMValidationError

    config = self.model_config
    if modality == "prompt_embeds" or config.is_multimodal_model:
        return validate(self, modality)
    name = config.served_model_name or config.model
    kind = modality.replace("_embeds", "").replace("_", " ")
    raise VLLMValidationError(
        f"{name} reads only text, not {kind}: leave it out, or serve a model that reads "
        f"{kind} input (docs/images.md)"
    )
