# SPDX-License-Identifier: Apache-2.0
"""Limits the texts and grammars of requests before vLLM processes them.

vLLM makes an engine request of each text of a body, and an automaton of each grammar, without any
limit. Meanwhile its front end serves no other request, and memory grows to gigabytes.
"""

# Remove when vLLM limits texts and grammars of a request, and drops compilations. Read against
# vLLM 0.33.

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from vllm_metal.patches.vllm_patches.replacing import replace

#: Weights of the parts of a grammar. Time and memory grow with the square of the number of the
#: first ones, as for chains of rules that begin with each other.
_RULE, _ALTERNATIVE, _NAME, _BYTES = 16, 4, 1, 64
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
#: Fields of requests that hold texts; a request has one, or two with paired texts.
_TEXTS = (
    *("prompt", "items"),  # completions, and scores by generation
    *("input", "data_1", "data_2", "documents", "texts", "images", "inputs"),  # pooling
)
_choices = _grammar = 0


def bound(choices: int, grammar: int) -> None:
    """Limits requests of this process's server.

    `choices` limits the texts of a pooling request, or prompts times `n`; `grammar` limits the size
    of a grammar or schema, as `size_of_grammar` counts.
    """
    from vllm import SamplingParams
    from vllm.entrypoints.generate.generative_scoring.serving import ServingGenerativeScoring
    from vllm.entrypoints.openai.chat_completion.batch_serving import OpenAIServingChatBatch
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.entrypoints.pooling.base.serving import PoolingBaseServing

    global _choices, _grammar
    _choices, _grammar = choices, grammar
    replace(PoolingBaseServing, "__call__", _counted)
    replace(OpenAIServingCompletion, "create_completion", _counted)
    replace(OpenAIServingChat, "create_chat_completion", _counted)
    replace(OpenAIServingChatBatch, "create_batch_chat_completion", _counted)
    replace(ServingGenerativeScoring, "create_generative_scoring", _counted)
    replace(SamplingParams, "_validate_structured_outputs", _validate)


def drop_compilations() -> None:
    """Drops the compilation of a request that ends while it waits for its grammar."""
    # One thread, or half the cores, compile: abandoned grammars would hold up others.
    from vllm.v1.core.sched.scheduler import Scheduler

    replace(Scheduler, "_free_request", _free)


def _free(
    free: Callable[..., Any], scheduler: Any, request: Any, *args: Any, **options: Any
) -> Any:
    from concurrent.futures import Future

    structured = request.structured_output_request
    if structured is not None and isinstance(structured._grammar, Future):
        structured._grammar.cancel()  # no effect on a compilation that has begun
    return free(scheduler, request, *args, **options)


async def _counted(
    answer: Callable[..., Any], serving: Any, request: Any, *args: Any, **more: Any
) -> Any:
    from vllm.exceptions import VLLMValidationError

    if (count := num_choices(request)) > _choices:
        raise VLLMValidationError(
            f"The body has {count} texts or choices, and {_choices} are allowed "
            "(max_body_choices). Send several requests."
        )
    return await answer(serving, request, *args, **more)


def num_choices(request: Any) -> int:
    """Returns how many engine requests vLLM makes of a client's request."""
    texts = max(num_texts(getattr(request, name, None)) for name in _TEXTS)
    messages = getattr(request, "messages", None)
    if isinstance(messages, list) and messages and isinstance(messages[0], list):
        texts = max(texts, len(messages))  # conversations
    return max(texts, 1) * max(getattr(request, "n", None) or 1, 1)


def num_texts(field: object) -> int:
    """Returns how many texts a field has; a list of tokens is one text.

    A field is a text, its tokens, a list of either, or an object whose content is a list.
    """
    if isinstance(field, list | tuple):
        return 1 if field and isinstance(field[0], int) else len(field)
    if (content := getattr(field, "content", None)) is not None:
        return num_texts(content)
    if isinstance(field, Mapping) and isinstance(field.get("content"), list):
        return len(field["content"])
    return 0 if field is None else 1


def _validate(validate: Callable[..., None], params: Any, *args: Any, **options: Any) -> None:
    from vllm.exceptions import VLLMValidationError

    if (structured := params.structured_outputs) is not None:
        size = sum(
            size_of_grammar(getattr(structured, name))
            for name in ("json", "regex", "choice", "grammar", "structural_tag")
        )
        if size > _grammar:
            raise VLLMValidationError(
                f"The grammar or schema of a request may have a size of {_grammar}, and this one "
                f"has {size} (max_body_grammar): a rule or reference counts {_RULE}, an "
                f"alternative or item of a list {_ALTERNATIVE}, a name {_NAME}, and {_BYTES} bytes "
                "1. Send fewer tools, or a smaller schema."
            )
    validate(params, *args, **options)


def size_of_grammar(given: object) -> int:
    """Estimates the work to compile a grammar, schema, regular expression or choices.

    A schema may be JSON text, as vLLM takes it.
    """
    if isinstance(given, str):
        try:
            found = json.loads(given)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict | list):
            rules = given.count("::=") or given.count(":")  # EBNF or Lark
            return len(given) // _BYTES + rules * _RULE + given.count("|") * _ALTERNATIVE
        given = found
    size, num_bytes, waiting = 0, 0, [given]
    while waiting:
        found = waiting.pop()
        below: Iterable[Any] = ()
        if isinstance(found, Mapping):
            size += len(found) * _NAME
            size += sum(_RULE for name in _REFERENCES if name in found)
            num_bytes += sum(len(name) for name in found)
            below = found.values()
        elif isinstance(found, list | tuple):
            size += len(found) * _ALTERNATIVE
            below = found
        elif isinstance(found, str):
            num_bytes += len(found)
        waiting += below
    return size + num_bytes // _BYTES
