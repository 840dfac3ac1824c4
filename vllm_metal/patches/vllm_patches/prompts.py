# SPDX-License-Identifier: Apache-2.0
"""Shows a server's prompts to a watcher, and rewrites messages before the chat template."""

# Remove when vLLM has a hook between a prompt's messages and its answer. Read against vLLM 0.33.

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from vllm_metal.patches.vllm_patches.replacing import replace

#: 32-bit numbers from here on are not tokens but stand for images.
IMAGES = 2**31
_WATCHER = "vllm_metal_watcher"  # an engine's attribute
_REWRITE = "vllm_metal_rewrite"  # a renderer's


class Watcher(Protocol):
    """Receives an engine's prompts and their prefix-cache hits."""

    def on_prompt(
        self,
        tokens: Sequence[int],
        salt: str | None,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
    ) -> Any:
        """Takes a prompt on its way to the engine; returns `pending` for `on_first_token`.

        Args:
            tokens: token ids. Positions of an image have numbers from IMAGES on, which differ
                between images.
            salt: its `cache_salt`, with the name of its adapter, if any.
            messages: input of the chat template; empty for plain text.
            tools: further input of the template.
        """

    def on_first_token(self, pending: Any, cached: int) -> None:
        """Takes the number of cached prompt tokens when the first token arrives."""


@dataclass
class _Chat:
    messages: Sequence[Any] = ()
    tools: Sequence[Any] = ()


#: The prompt of the request that this task serves.
_CHAT: ContextVar[_Chat | None] = ContextVar("prompts_chat", default=None)


def begin_request() -> None:
    """Makes the current task, and tasks that it starts, share the prompt of one request."""
    # vLLM makes the prompt of a Responses stream in a task other than that which calls the engine.
    _CHAT.set(_Chat())


def _record_prompt(messages: Sequence[Any], tools: Sequence[Any]) -> None:
    if (chat := _CHAT.get()) is None:
        _CHAT.set(_Chat(messages, tools))
    else:
        chat.messages, chat.tools = messages, tools


def watch(engine: Any, watcher: Watcher) -> None:
    """Notifies a watcher of all prompts that a server sends to this engine."""
    _patch()
    setattr(engine, _WATCHER, watcher)


def rewrite(renderer: Any, change: Callable[[Sequence[Any]], Sequence[Any]]) -> None:
    """Makes a server's renderer apply `change` to messages before it renders them."""
    _patch()
    setattr(renderer, _REWRITE, change)


def _patch() -> None:
    # No-op for renderers and engines without these attributes.
    from vllm.renderers.online_renderer import OnlineRenderer
    from vllm.v1.engine.async_llm import AsyncLLM

    replace(OnlineRenderer, "preprocess_chat", _record_chat)
    replace(OnlineRenderer, "_make_request_with_harmony", _record_harmony)
    replace(OnlineRenderer, "preprocess_cmpl", _record_text)
    replace(AsyncLLM, "generate", _watch_prompt)


async def _record_chat(
    preprocess: Callable[..., Any],
    renderer: Any,
    request: Any,
    messages: Sequence[Any],
    *args: Any,
    tool_dicts: Sequence[Any] | None = None,
    **options: Any,
) -> Any:
    messages = _rewritten(renderer, messages)
    _record_prompt(messages, tool_dicts or ())
    return await preprocess(renderer, request, messages, *args, tool_dicts=tool_dicts, **options)


def _record_harmony(
    make: Callable[..., Any], renderer: Any, request: Any, *args: Any, **options: Any
) -> Any:
    request.messages = _rewritten(renderer, request.messages)
    _record_prompt(request.messages, [tool.model_dump() for tool in request.tools or ()])
    return make(renderer, request, *args, **options)


def _rewritten(renderer: Any, messages: Sequence[Any]) -> list[Any]:
    change = getattr(renderer, _REWRITE, None)
    return list(messages if change is None else change(messages))


async def _record_text(preprocess: Callable[..., Any], *args: Any, **options: Any) -> Any:
    _record_prompt((), ())
    return await preprocess(*args, **options)


def _watch_prompt(
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
    if (adapter := options.get("lora_request")) is not None:  # its K/V are no other adapter's
        owner = f"{owner or ''}\0{adapter.lora_name}"
    pending = watcher.on_prompt(
        _with_image_numbers(tokens, prompt), owner, chat.messages, chat.tools
    )
    return _watch_answer(outputs, watcher, pending)


def _with_image_numbers(tokens: Sequence[int], prompt: Mapping[str, Any]) -> Sequence[int]:
    # A placeholder's tokens are the same for every image, but the prefix cache distinguishes them.
    if not (kinds := prompt.get("mm_placeholders")):
        return tokens
    numbers = list(tokens)
    for kind, placeholders in kinds.items():
        for placeholder, name in zip(placeholders, prompt["mm_hashes"][kind], strict=True):
            for index in range(placeholder.length):
                numbers[placeholder.offset + index] = IMAGES + hash((name, index)) % IMAGES
    return numbers


async def _watch_answer(
    outputs: AsyncGenerator[Any, None], watcher: Watcher, pending: Any
) -> AsyncGenerator[Any, None]:
    notified = False
    async with aclosing(outputs):
        async for output in outputs:
            if not notified:
                watcher.on_first_token(pending, output.num_cached_tokens or 0)
                notified = True
            yield output
