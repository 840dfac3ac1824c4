# SPDX-License-Identifier: Apache-2.0
"""Rejects requests with token ids that have no embedding in the model.

MLX does not check bounds and would read past the embedding's array. vLLM accepts ids that only the
tokenizer has.
"""

# Remove when vLLM rejects ids beyond vocab_size. Read against vLLM 0.33.

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import compress
from typing import TYPE_CHECKING, Any

from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger

from vllm_metal.patches.vllm_patches.replacing import replace

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreRequest

logger = init_logger(__name__)

_MOST_NAMED = 5  # tokens in the log line of a start


def reject_unknown_tokens() -> None:
    """Makes vLLM check each request's token ids; call it where requests are admitted."""
    from vllm.v1.engine.input_processor import InputProcessor

    replace(InputProcessor, "__init__", _name_tokens_without_embedding)
    replace(InputProcessor, "_validate_params", _check_params)
    replace(InputProcessor, "_validate_model_input", _check_prompt)
    replace(InputProcessor, "process_inputs", _check_bad_words)


def _name_tokens_without_embedding(
    init: Callable[..., None], self: Any, *args: Any, **options: Any
) -> None:
    init(self, *args, **options)
    size, tokenizer = self.model_config.get_vocab_size(), self.tokenizer
    if tokenizer is None or tokenizer.max_token_id < size:
        return
    # Common, and no reason to reject a start: tokens of images, or a pad token.
    above = sorted((id, token) for token, id in tokenizer.get_vocab().items() if id >= size)
    named = ", ".join(f"{token!r} ({id})" for id, token in above[:_MOST_NAMED])
    more = f" and {len(above) - _MOST_NAMED} more" if len(above) > _MOST_NAMED else ""
    logger.info(
        "The tokenizer has tokens for which the model has no embedding: %s%s. Requests whose text "
        "contains them are rejected; the model has %d tokens",
        named,
        more,
        size,
    )


def _check_params(validate: Callable[..., Any], self: Any, params: Any, *args: Any) -> Any:
    for parameter in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
        if token_ids := getattr(params, parameter, None):
            _check(token_ids, self.model_config.get_vocab_size(), parameter)
    return validate(self, params, *args)


def _check_prompt(
    validate: Callable[..., None], self: Any, prompt: Mapping[str, Any], *args: Any, **options: Any
) -> None:
    if prompt["type"] != "embeds":
        _check(_embedded(prompt), self.model_config.get_vocab_size(), "prompt")
    validate(self, prompt, *args, **options)


def _embedded(prompt: Mapping[str, Any]) -> list[int]:
    # Leaves out placeholders: images and other inputs replace their embeddings.
    token_ids: list[int] = prompt["prompt_token_ids"]
    if prompt["type"] != "multimodal":
        return token_ids
    embedded = [True] * len(token_ids)
    for ranges in prompt["mm_placeholders"].values():
        for each in ranges:
            is_embed = [True] * each.length if each.is_embed is None else each.is_embed.tolist()
            embedded[each.offset : each.offset + each.length] = [not one for one in is_embed]
    return list(compress(token_ids, embedded))


def _check_bad_words(
    process: Callable[..., EngineCoreRequest], self: Any, *args: Any, **options: Any
) -> EngineCoreRequest:
    request = process(self, *args, **options)
    params = request.sampling_params
    words = (params.bad_words_token_ids if params else None) or ()
    size = self.model_config.get_vocab_size()
    _check([token_id for word in words for token_id in word], size, "bad_words")
    return request


def _check(token_ids: Iterable[int], size: int, parameter: str) -> None:
    """Raises VLLMValidationError (HTTP 400 at the server) for ids outside [0, size)."""
    ids = list(token_ids)
    if not ids or (min(ids) >= 0 and max(ids) < size):
        return
    unknown = next(token_id for token_id in ids if not 0 <= token_id < size)
    raise VLLMValidationError(
        f"{parameter}: token id {unknown} is not supported with this model: it has {size} tokens, "
        f"with ids from 0 to {size - 1}. Leave the token out.",
        parameter=parameter,
        value=unknown,
    )
