# SPDX-License-Identifier: Apache-2.0
"""Reads RoPE settings of a config.json in the format of transformers 5 or of older versions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]
#: RoPE parameters that also exist as top-level keys.
OF_THEIR_OWN = ("rope_theta", "partial_rotary_factor")


def rope(config: Config, layer_type: str = "full_attention") -> Config:
    """Returns the RoPE parameters (of one layer type); empty if the config has none."""
    parameters = config.get("rope_parameters") or {}
    if by_layer_type(parameters):
        return parameters.get(layer_type) or {}
    return parameters


def by_layer_type(parameters: Config) -> bool:
    return any(isinstance(value, Mapping) for value in parameters.values())


def scaling_of(config: Config) -> dict[str, Any] | None:
    """Converts `rope_parameters` to the older `rope_scaling`, with both names of the type."""
    found = {key: value for key, value in rope(config).items() if key not in OF_THEIR_OWN}
    rope_type = found.get("rope_type") or found.get("type") or "default"
    if rope_type == "default":
        return None
    return found | {"rope_type": rope_type, "type": rope_type}


def scaling(config: Config) -> dict[str, Any] | None:
    """Returns the scaling, from either format; None if positions are not scaled."""
    given = config.get("rope_scaling")
    return scaling_of({"rope_parameters": given} if given else config)


def stated_share(config: Config) -> float | None:
    """Returns the configured share of each head to rotate; None if not configured."""
    stated = config.get("partial_rotary_factor")
    if stated is None:
        stated = rope(config).get("partial_rotary_factor")
    return None if stated is None else float(stated)


def rotated_share(config: Config) -> float:
    """Returns the share of each head to rotate, by default 1."""
    stated = stated_share(config)
    return 1.0 if stated is None else stated
