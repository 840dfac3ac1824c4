# SPDX-License-Identifier: Apache-2.0
"""Limits of a server with tenants, other settings, and none."""

from pathlib import Path

import pytest

from vllm_metal.patches.vllm_patches import media_loading
from vllm_metal.serving import limits
from vllm_metal.serving.config import BodyLimits, ServingConfig, TenantsConfig

TENANTS = TenantsConfig(Path("/keys"), Path("/secret"))


def found(tenants=None, **given):
    settings = ServingConfig(tenants, None, None, BodyLimits(**given))
    of = limits.of(settings)
    return of.max_body_choices, of.max_body_pixels


def test_a_server_without_settings_has_bounds_that_protect_its_machine():
    of = limits.of(None)
    assert (of.max_body_choices, of.max_body_pixels) == (4096, 2**28)
    assert of.max_body_grammar == BodyLimits().max_body_grammar


@pytest.mark.parametrize("tenants", [None, TENANTS])
def test_settings_count(tenants):
    assert found(tenants) == (1024, 2**28 if tenants is None else 2**27)
    assert found(tenants, max_body_choices=5, max_body_pixels=6) == (5, 6)


@pytest.mark.parametrize(
    ("settings", "pixels", "choices", "fetches"),
    [
        (None, 2**28, 4096, True),
        (ServingConfig(TENANTS, None, None, BodyLimits()), 2**27, 1024, False),
        (ServingConfig(None, None, None, BodyLimits(max_body_pixels=6)), 6, 1024, True),
    ],
)
def test_a_server_is_bound_before_it_answers(monkeypatch, settings, pixels, choices, fetches):
    bound = []
    monkeypatch.setattr(limits.config, "of_environment", lambda: settings)
    for module in (limits.media_loading, limits.request_sizes):
        monkeypatch.setattr(module, "bound", lambda *given, **more: bound.append((given, more)))
    app = limits.around(lambda: None, None)
    grammar = BodyLimits().max_body_grammar
    assert bound == [((pixels,), {"fetch_any_host": fetches}), ((choices, grammar), {})]
    assert isinstance(app, media_loading.CountImages)
