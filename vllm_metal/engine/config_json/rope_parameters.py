# SPDX-License-Identifier: Apache-2.0
"""What a config.json says of positions, in the words of transformers 5 or in older ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]
#: Keys of a rope's parameters that have keys of their own.
OF_THEIR_OWN = ("rope_theta", "partial_rotary_factor")


def rope(config: Config, layer_type: str = "full_attention") -> Config:
    """Parameters of the rope, or of the layers of a type; empty where the config has none."""
    parameters = config.get("rope_parameters") or {}
    if by_layer_type(parameters):
        return parameters.get(layer_type) or {}
    return parameters


def by_layer_type(parameters: Config) -> bool:
    return any(isinstance(value, Mapping) for value in parameters.values())


def scaling_of(config: Config) -> dict[str, Any] | None:
    """What `rope_parameters` say, as `rope_scaling` was: the type by both of its names."""
    found = {key: value for key, value in rope(config).items() if key not in OF_THEIR_OWN}
    rope_type = found.get("rope_type") or found.get("type") or "default"
    if rope_type == "default":
        return None
    return found | {"rope_type": rope_type, "type": rope_type}


def scaling(config: Config) -> dict[str, Any] | None:
    """How positions are scaled, in either spelling; None: they are not."""
    given = config.get("rope_scaling")
    return scaling_of({"rope_parameters": given} if given else config)


def stated_share(config: Config) -> float | None:
    """The share of each head that a rope turns; None: the config does not say."""
    stated = config.get("partial_rotary_factor")
    if stated is None:
        stated = rope(config).get("partial_rotary_factor")
    return None if stated is None else float(stated)


def rotated_share(config: Config) -> float:
    """The share of each head that a rope turns; all of it where the config does not say."""
    stated = stated_share(config)
    return 1.0 if stated is None else stated
