# SPDX-License-Identifier: Apache-2.0
"""Names images and videos by owner and content.

vLLM finds a processed image, and its encoder output, by a hash of its content or by the client's
`uuid`. Neither includes a request's `cache_salt`, so requests that must not share K/V would share
images.
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
    """The uuids that a request gives its images, with the owner of the request."""

    owner: str


def set_owner(owner: str) -> None:
    """Assigns all images of the current task's request to an owner.

    `owner` is a secret that requests of the same owner share. It takes precedence over the
    request's `cache_salt`, which some of vLLM's routes do not pass on.
    """
    _OWNER.set(owner)


def separate_owners() -> None:
    """Names each image of a request with an owner by an HMAC-SHA256 whose key is the owner.

    The owner is that of `set_owner`, or else `cache_salt`; with neither, vLLM's names are kept.
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
    # vLLM calls this in another thread, which does not see the request's context variables.
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
    # A client may know the hash of an image and send another image under it.
    text = f"{'client' if from_client else 'content'}\0{name}"
    key, message = (part.encode(errors="surrogatepass") for part in (owner, text))
    return hmac.new(key, message, "sha256").hexdigest()
