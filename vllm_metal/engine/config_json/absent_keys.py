# SPDX-License-Identifier: Apache-2.0
"""Fills in keys that config.json omits, and checks keys that only mlx-lm's module reads.

An omitted key takes the default of transformers' class, which may differ from the module's. A key
that only the module reads has no effect in the reference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from vllm_metal.engine.config_json import (
    fixed_values,
    implied_values,
    inert_keys,
    rope_keys,
    rope_parameters,
)
from vllm_metal.engine.config_json.reference_code import Reference, is_used
from vllm_metal.engine.config_json.rope_parameters import Config
from vllm_metal.identity.model_files import ModelLoadError

Fields = Iterable["dataclasses.Field[Any]"]


def values(
    config: Config, module: str, fields: Fields, reference: Reference
) -> tuple[dict[str, Any], set[str]]:
    """Returns omitted keys with the reference's values, and the keys that the values come from.

    `fields`: fields of the module's `ModelArgs`.
    """
    found: dict[str, Any] = {}
    used: set[str] = set()
    skipped = {*rope_keys.KEYS, *inert_keys.OF_MODULE.get(module, ())}
    names = {**reference.aliases, **{key: other for other, key in reference.aliases.items()}}
    for field in fields:
        key = field.name
        if key in config:
            if config[key] is None and isinstance(reference.declared.get(key), bool):
                found[key] = False  # modules may treat null like an omitted key
            continue
        if config.get(names.get(key, "")) is not None:
            found[key] = config[names[key]]
            used.add(names[key])
        elif key not in skipped:
            declared = next((k for k in (key, names.get(key)) if k in reference.declared), None)
            if declared is not None and reference.declared[declared] != _default(field):
                found[key] = reference.declared[declared]
    if "num_key_value_heads" in found or "num_key_value_heads" in config:
        stated = found.get("num_key_value_heads", config.get("num_key_value_heads"))
        heads = found.get("num_attention_heads", config.get("num_attention_heads"))
        if stated is None and heads is not None:
            found["num_key_value_heads"] = heads  # the default of all transformers' classes
    return found, used


#: Keys for a rope's base, and for the share of each head that it rotates.
_THETAS = ("rope_theta", "rotary_emb_base", "rope_local_base_freq", "swa_rope_theta")
_SHARES = ("partial_rotary_factor", "rotary_pct", "rope_pct", "rotary_dim", "qk_rope_head_dim")


def rope(config: Config, module: str, read: set[str], reference: Reference) -> dict[str, Any]:
    """Returns omitted RoPE keys with the values of transformers' class.

    Raises:
        ModelLoadError: the class has a default per layer type, and config.json sets only one value.
    """
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not reference.is_complete or not read & {*_THETAS, *rope_keys.KEYS}:
        return {}
    if rope_parameters.by_layer_type(parameters):
        return {}
    if not parameters and (taken := reference.absent_rope):
        stated = {key: config[key] for key in rope_parameters.OF_THEIR_OWN if config.get(key)}
        if not rope_parameters.by_layer_type(taken):
            return {"rope_parameters": {**reference.rope, **taken, **stated}}
        if not stated:
            return {"rope_parameters": dict(taken)}
        if "rope_parameters" in read:
            raise ModelLoadError(
                f"{' and '.join(stated)} without rope_parameters in config.json is not supported "
                f"with mlx-lm's module {module!r}: its kinds of layers have different values. Add "
                "rope_parameters to config.json"
            )
    found: dict[str, Any] = {}
    for key, default_names in (("rope_theta", _THETAS), ("partial_rotary_factor", _SHARES)):
        own = reference.rope_names.get(key)
        names: tuple[str, ...] = default_names if own is None else (own,)
        if parameters.get(key) is None and all(config.get(name) is None for name in names):
            if key == "partial_rotary_factor" and key in config and key in names:
                found[key] = 1.0  # null; the class's default is for an omitted key only
            elif key in reference.rope:
                found[key] = reference.rope[key]
            elif key == "rope_theta":
                raise ModelLoadError(
                    "config.json without rope_parameters and rope_theta is not supported with "
                    f"mlx-lm's module {module!r}: its kinds of layers have different values. Add "
                    "rope_parameters to config.json"
                )
    local = "rope_local_base_freq"
    if local in reference.rope:  # of sliding-window layers; modules read both by these names
        if local in read and config.get(local) is None:
            found[local] = reference.rope[local]
    elif found or ("rope_parameters" in read and not parameters):
        stated = {key: config[key] for key in rope_parameters.OF_THEIR_OWN if config.get(key)}
        found["rope_parameters"] = {"rope_type": "default", **parameters, **stated, **found}
    return found


def check(
    config: Config,
    module: str,
    args: type,
    changed: Mapping[str, Any],
    reference: Reference,
) -> None:
    """Checks keys that mlx-lm's module reads and a complete reference does not.

    Args:
        args: the module's `ModelArgs`.
        changed: keys whose value is replaced anyway.

    Raises:
        ModelLoadError: such a key differs from the module's default.
    """
    if not reference.is_complete:
        return
    fields: Any = dataclasses.fields(args)
    for field in fields:
        key, default = field.name, _default(field)
        if (
            default is not dataclasses.MISSING
            and key not in changed
            and config.get(key, default) != default
            and not reference.reads(key)
            and is_used(args, key)
            and key not in fixed_values.keys(module)
            and not implied_values.is_implied(config, module, key)
            and not inert_keys.is_inert(key, module, beside_text=False)
        ):
            raise ModelLoadError(
                f"config.json sets {key}={config[key]!r}, which mlx-lm's module {module!r} reads "
                "but transformers' class does not, so results would differ. To follow "
                f"transformers, set --hf-overrides '{{\"{key}\": null}}'"
            )


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default
