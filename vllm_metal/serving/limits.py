# SPDX-License-Identifier: Apache-2.0
"""Limits the memory that one request may use, also on servers without tenants or settings."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm_metal.patches.vllm_patches import media_loading, request_sizes
from vllm_metal.serving import config
from vllm_metal.serving.config import BodyLimits, ServingConfig

if TYPE_CHECKING:
    from starlette.types import ASGIApp

#: Default pixels of a request's images: 16 photos of 16 megapixels. Decoding and preprocessing take
#: up to 11 bytes per pixel, 3 GB.
_PIXELS = 2**28
_TENANTS_PIXELS = 2**27  # the default with tenants
#: Choices per request on a server without settings: with more, /health takes over a second.
_CHOICES = 4096


def around(app: ASGIApp, state: Any) -> ASGIApp:
    """Limits the requests of a starting server; returns vLLM's application `app`, wrapped.

    Raises ValueError as `config.read` does.
    """
    settings = config.of_environment()
    limits = of(settings)
    assert limits.max_body_pixels is not None
    # Tenants must not reach the server's network through it, unless --allowed-media-domains is set.
    has_tenants = settings is not None and settings.tenants is not None
    media_loading.bound(limits.max_body_pixels, fetch_any_host=not has_tenants)
    request_sizes.bound(limits.max_body_choices, limits.max_body_grammar)
    return media_loading.around(app, state)


def of(settings: ServingConfig | None) -> BodyLimits:
    """Returns a server's limits with all defaults filled in.

    Without settings, the defaults are wider: they only protect the machine.
    """
    if settings is None:
        return BodyLimits(max_body_choices=_CHOICES, max_body_pixels=_PIXELS)
    if settings.body.max_body_pixels is not None:
        return settings.body
    pixels = _PIXELS if settings.tenants is None else _TENANTS_PIXELS
    return replace(settings.body, max_body_pixels=pixels)
