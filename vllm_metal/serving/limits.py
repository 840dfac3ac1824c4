# SPDX-License-Identifier: Apache-2.0
"""Bounds what one request may take of a server's memory, with tenants and without any settings."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm_metal.patches.vllm_patches import media_loading, request_sizes
from vllm_metal.serving import config
from vllm_metal.serving.config import BodyLimits, ServingConfig

if TYPE_CHECKING:
    from starlette.types import ASGIApp

#: Of images, where the settings do not say: 16 times a photo of 16 megapixels. Decoding and
#: preparing takes up to 11 bytes a pixel, 3 GB.
_PIXELS = 2**28
#: With tenants, half of it.
_TENANTS_PIXELS = 2**27
#: Texts of a request to a server without settings: with more, /health takes over a second.
_CHOICES = 4096


def around(app: ASGIApp, state: Any) -> ASGIApp:
    """Bounds the requests of a server that starts; returns its application.

    Args:
        app: vLLM's, with its middlewares.
        state: that vLLM gave it.

    Raises:
        ValueError: as `config.read`.
    """
    settings = config.of_environment()
    limits = of(settings)
    assert limits.max_body_pixels is not None
    has_tenants = settings is not None and settings.tenants is not None
    media_loading.bound(limits.max_body_pixels, fetch_any_host=not has_tenants)
    request_sizes.bound(limits.max_body_choices, limits.max_body_grammar)
    return media_loading.around(app, state)


def of(settings: ServingConfig | None) -> BodyLimits:
    """Returns the limits of a server, with a value for each.

    Args:
        settings: of the server; None: it has none, and the limits protect its machine alone.
    """
    if settings is None:
        return BodyLimits(max_body_choices=_CHOICES, max_body_pixels=_PIXELS)
    if settings.body.max_body_pixels is not None:
        return settings.body
    pixels = _PIXELS if settings.tenants is None else _TENANTS_PIXELS
    return replace(settings.body, max_body_pixels=pixels)
