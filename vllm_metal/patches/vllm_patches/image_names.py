# SPDX-License-Identifier: Apache-2.0
"""Names images and videos by their owner as well as by their content.

vLLM finds a prepared image, and what the encoder made of it, by a hash of its content, or by the
`uuid` that a client sent. A request's `cache_salt` is in neither, so requests that must not share
K/V would share images.
"""

# Remove when vLLM mixes the salt into an image's hash. Read against vLLM 0.33.

from __future__ import annotations

import hmac
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from vllm_metal.patches.vllm_patches.replacing import replace

_OWNER: ContextVar[str | None] = ContextVar("image_owner", default=None)


class _OwnedNames(dict[str, Any]):
    """The names that a client sent, on their way to the thread that prepares its images."""

    owner: str


def set_owner(owner: str) -> None:
    """Makes all images of this task's request belong to an owner.

    Args:
        owner: a secret that requests of the same owner share. It takes precedence over the
            request's `cache_salt`, which some of vLLM's routes do not pass on.
    """
    _OWNER.set(owner)


def keep_apart() -> None:
    """Names each image of a request that has an owner by an HMAC-SHA256 under the owner.

    The owner is what `set_owner` said, else the request's `cache_salt`. A request with neither
    names images as vLLM does.
    """
    from vllm.multimodal.processing.inputs import ProcessorInputs
    from vllm.renderers.base import BaseRenderer

    replace(BaseRenderer, "_process_tokens", _with_owner)
    replace(BaseRenderer, "_process_tokens_async", _with_owner)
    replace(BaseRenderer, "_process_multimodal", _process_owned)
    replace(ProcessorInputs, "get_mm_hashes", _owned_hashes)


def _with_owner(process: Callable[..., Any], renderer: Any, prompt: Any, **options: Any) -> Any:
    owner = _OWNER.get() or prompt.get("cache_salt")
    if owner and prompt.get("multi_modal_data"):
        names = _OwnedNames(prompt.get("multi_modal_uuids") or {})
        names.owner = owner
        prompt = {**prompt, "multi_modal_uuids": names}
    return process(renderer, prompt, **options)


def _process_owned(
    process: Callable[..., Any],
    renderer: Any,
    prompt: Any,
    mm_data: Any,
    mm_uuids: Any,
    *args: Any,
    **options: Any,
) -> Any:
    # vLLM calls this in a thread of its own, which sees no variables of the request's task.
    before = _OWNER.set(mm_uuids.owner if isinstance(mm_uuids, _OwnedNames) else None)
    try:
        return process(renderer, prompt, mm_data, mm_uuids, *args, **options)
    finally:
        _OWNER.reset(before)


def _owned_hashes(make: Callable[..., Any], inputs: Any, *args: Any, **options: Any) -> Any:
    hashes = make(inputs, *args, **options)
    owner = _OWNER.get()
    if owner is None:
        return hashes
    given = inputs.mm_uuid_items or {}
    return {
        kind: [
            _owned(owner, name, uuid is not None)
            for name, uuid in zip(names, given.get(kind) or [None] * len(names), strict=True)
        ]
        for kind, names in hashes.items()
    }


def _owned(owner: str, name: object, from_client: bool) -> str:
    # A client may know the hash of an image, and send another one under it.
    text = f"{'client' if from_client else 'content'}\0{name}"
    key, message = (part.encode(errors="surrogatepass") for part in (owner, text))
    return hmac.new(key, message, "sha256").hexdigest()
