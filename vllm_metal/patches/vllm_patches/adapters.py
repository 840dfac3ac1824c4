# SPDX-License-Identifier: Apache-2.0
"""Makes vLLM identify LoRA adapters by content: in requests, in its limit and in block hashes."""

# Remove when vLLM hashes an adapter's content. Read against vLLM 0.33.

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Protocol

from vllm.v1.core import kv_cache_utils
from vllm.v1.engine.core import EngineCore

from vllm_metal.patches.vllm_patches.replacing import replace

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.request import Request


class _Contents(Protocol):
    """Maps an adapter to the number and digest of its content (lora.versions)."""

    def of(self, request: LoRARequest, anew: bool = False) -> LoRARequest:
        """Returns the request with its content's number and digest."""

    def forget(self, asked_id: int) -> None:
        """Makes the adapter's files be read again."""


def identify_by_content(make: Callable[[], _Contents]) -> None:
    """Makes engines identify adapters by the content of their files.

    Args:
        make: called once per engine, when it first sees an adapter.
    """
    # vLLM hashes blocks with an adapter's name and path. An adapter retrained under the same name
    # and path would get K/V of its predecessor, from the pool, from disk and from peers.

    def contents(core: Any) -> _Contents:
        known: dict[str, Any] = vars(core)
        if "_adapter_contents" not in known:
            known["_adapter_contents"] = make()
        found: _Contents = known["_adapter_contents"]
        return found

    def with_content(
        preprocess: Callable[..., tuple[Request, int]], self: Any, request: EngineCoreRequest
    ) -> tuple[Request, int]:
        if request.lora_request is not None:
            request.lora_request = contents(self).of(request.lora_request)
        return preprocess(self, request)

    def adding(add: Callable[..., bool], self: Any, lora_request: LoRARequest) -> bool:
        anew = bool(lora_request.load_inplace)
        return add(self, contents(self).of(lora_request, anew))

    def removing(remove: Callable[..., bool], self: Any, lora_id: int) -> bool:
        contents(self).forget(lora_id)
        return remove(self, lora_id)

    replace(EngineCore, "preprocess_add_request", with_content)
    replace(EngineCore, "add_lora", adding)
    replace(EngineCore, "remove_lora", removing)
    replace(kv_cache_utils, "_gen_lora_extra_hash_keys", _by_content)


def reject_bad_adapters() -> None:
    """Makes `/v1/load_lora_adapter` answer 400 if an adapter cannot be served."""
    # vLLM answers 500 to any error of the engine, and clients retry a 500.
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels

    replace(OpenAIServingModels, "load_lora_adapter", _naming_bad_adapters)


async def _naming_bad_adapters(
    load: Callable[..., Awaitable[Any]], serving: Any, request: Any, *args: Any, **options: Any
) -> Any:
    found = await load(serving, request, *args, **options)
    error = getattr(found, "error", None)
    # The engine is another process, so its AdapterError (lora.files) arrives only as text.
    if error is not None and f"LoRA adapter {request.lora_name!r} " in error.message:
        error.code, error.type = HTTPStatus.BAD_REQUEST.value, "BadRequestError"
    return found


def _by_content(
    keys: Callable[[Request], list[tuple[str, str, str]]], request: Request
) -> list[tuple[str, str, str]]:
    digest = getattr(request.lora_request, "digest", None)
    if request.lora_request is None or digest is None:
        return keys(request)
    return [("lora", request.lora_request.lora_name, digest)]
