# SPDX-License-Identifier: Apache-2.0
"""Shows a server's prompts to who watches them; has messages rewritten before templating."""

# Remove when vLLM has a hook between a prompt's messages and its answer. Read against vLLM 0.33.

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from vllm_metal.patches.vllm_patches.replacing import replace

#: Numbers from here on, which have 32 bits, are no tokens.
IMAGES = 2**31
_WATCHER = "vllm_metal_watcher"  # an engine's attribute
_REWRITE = "vllm_metal_rewrite"  # a renderer's


class Watcher(Protocol):
    """What is told of an engine's prompts."""

    def asked(
        self,
        tokens: Sequence[int],
        salt: str | None,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
    ) -> Any:
        """A prompt goes to the engine.

        Args:
            tokens: of the prompt. Where an image is, there are numbers from IMAGES on, others for
                another image.
            salt: its `cache_salt`, and the name of its adapter if it has one.
            messages: that a chat template made it of; none of a plain text.
            tools: likewise.

        Returns:
            What `answered` gets.
        """

    def answered(self, question: Any, cached: int) -> None:
        """Its first token is there.

        Args:
            question: from `asked`.
            cached: tokens of the prompt that were found in the prefix cache.
        """


@dataclass
class _Chat:
    """What the newest prompt of a request was made of."""

    messages: Sequence[Any] = ()
    tools: Sequence[Any] = ()


#: Of the request that this task serves.
_CHAT: ContextVar[_Chat | None] = ContextVar("prompts_chat", default=None)


def begin_request() -> None:
    """Has all tasks that this one starts know what a prompt of its request was made of.

    vLLM makes the prompt of a Responses stream in another task than the one that asks the engine.
    """
    _CHAT.set(_Chat())


def _note(messages: Sequence[Any], tools: Sequence[Any]) -> None:
    if (chat := _CHAT.get()) is None:
        _CHAT.set(_Chat(messages, tools))
    else:
        chat.messages, chat.tools = messages, tools


def watch(engine: Any, watcher: Watcher) -> None:
    """Tells a watcher of all prompts that a server asks this engine."""
    _patch()
    setattr(engine, _WATCHER, watcher)


def rewrite(renderer: Any, change: Callable[[Sequence[Any]], Sequence[Any]]) -> None:
    """Has a server's renderer make prompts of what `change` makes of messages."""
    _patch()
    setattr(renderer, _REWRITE, change)


def _patch() -> None:
    """Nothing is another than before for renderers and engines without the attributes."""
    from vllm.renderers.online_renderer import OnlineRenderer
    from vllm.v1.engine.async_llm import AsyncLLM

    replace(OnlineRenderer, "preprocess_chat", _noting_chat)
    replace(OnlineRenderer, "_make_request_with_harmony", _noting_harmony)
    replace(OnlineRenderer, "preprocess_cmpl", _noting_text)
    replace(AsyncLLM, "generate", _telling)


async def _noting_chat(
    preprocess: Callable[..., Any],
    renderer: Any,
    request: Any,
    messages: Sequence[Any],
    *args: Any,
    tool_dicts: Sequence[Any] | None = None,
    **options: Any,
) -> Any:
    messages = _rewritten(renderer, messages)
    _note(messages, tool_dicts or ())
    return await preprocess(renderer, request, messages, *args, tool_dicts=tool_dicts, **options)


def _noting_harmony(
    make: Callable[..., Any], renderer: Any, request: Any, *args: Any, **options: Any
) -> Any:
    request.messages = _rewritten(renderer, request.messages)
    _note(request.messages, [tool.model_dump() for tool in request.tools or ()])
    return make(renderer, request, *args, **options)


def _rewritten(renderer: Any, messages: Sequence[Any]) -> list[Any]:
    change = getattr(renderer, _REWRITE, None)
    return list(messages if change is None else change(messages))


async def _noting_text(preprocess: Callable[..., Any], *args: Any, **options: Any) -> Any:
    _note((), ())
    return await preprocess(*args, **options)


def _telling(
    generate: Callable[..., AsyncGenerator[Any, None]],
    engine: Any,
    prompt: Any,
    *args: Any,
    **options: Any,
) -> AsyncGenerator[Any, None]:
    watcher: Watcher | None = getattr(engine, _WATCHER, None)
    outputs = generate(engine, prompt, *args, **options)
    tokens = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
    if watcher is None or not tokens:
        return outputs
    chat = _CHAT.get() or _Chat()
    owner = prompt.get("cache_salt")
    if (adapter := options.get("lora_request")) is not None:  # K/V of another one are no prefix
        owner = f"{owner or ''}\0{adapter.lora_name}"
    question = watcher.asked(_told_apart(tokens, prompt), owner, chat.messages, chat.tools)
    return _told(outputs, watcher, question)


def _told_apart(tokens: Sequence[int], prompt: Mapping[str, Any]) -> Sequence[int]:
    """Tokens of a prompt, with numbers of their own for its images.

    A placeholder's tokens say nothing of the image, which the prefix cache tells apart.
    """
    if not (kinds := prompt.get("mm_placeholders")):
        return tokens
    numbers = list(tokens)
    for kind, places in kinds.items():
        for place, name in zip(places, prompt["mm_hashes"][kind], strict=True):
            for index in range(place.length):
                numbers[place.offset + index] = IMAGES + hash((name, index)) % IMAGES
    return numbers


async def _told(
    outputs: AsyncGenerator[Any, None], watcher: Watcher, question: Any
) -> AsyncGenerator[Any, None]:
    told = False
    async with aclosing(outputs):
        async for output in outputs:
            if not told:
                watcher.answered(question, output.num_cached_tokens or 0)
                told = True
            yield output
