# SPDX-License-Identifier: Apache-2.0
"""Which parameters of a rope are read, by mlx-lm's `initialize_rope` or by modules themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_metal.engine.config_json.inert_keys import names
from vllm_metal.engine.config_json.rope_parameters import Config, by_layer_type

KEYS = ("rope_parameters", "rope_scaling")
#: Judged with the keys of the same names, or of images alone.
_EVERY = names(
    "rope_type type rope_theta partial_rotary_factor mrope_section mrope_interleaved "
    "mrope_sections finetuned"
)
_YARN = names(
    "factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim "
    "attention_factor truncate"
)
#: By type, what is read; see `patches.ropes` for `attention_factor` and `truncate`.
_OF_TYPE: Mapping[str, frozenset[str]] = {
    "linear": names("factor"),
    # Computed from max_position_embeddings.
    "dynamic": names("factor original_max_position_embeddings"),
    "llama3": names("factor low_freq_factor high_freq_factor original_max_position_embeddings"),
    "yarn": _YARN,
    "deepseek_yarn": _YARN,
    "telechat3-yarn": _YARN,
    "longrope": names("short_factor long_factor original_max_position_embeddings"),
    "su": names("short_factor long_factor original_max_position_embeddings"),
    "proportional": names("factor"),
}
#: A rope that is not scaled has none of the others; transformers passes over them.
_PLAIN = frozenset().union(*_OF_TYPE.values())
#: What modules read that make ropes of their own, or more than the others.
_OF_MODULE: Mapping[tuple[str, str], frozenset[str]] = {
    ("deepseek_v2", "yarn"): _YARN - {"attention_factor", "truncate"},
    **{
        (module, "dynamic"): names("alpha factor beta_fast beta_slow mscale mscale_all_dim")
        for module in ("hunyuan", "hunyuan_v1_dense")
    },
    **{
        (module, rope_type): _OF_TYPE["yarn"] | {"llama_4_scaling_beta"}
        for module in ("ministral3", "mistral4")
        for rope_type in ("yarn", "default")
    },
    ("mellum", "linear"): frozenset(),
    ("phimoe", "longrope"): _OF_TYPE["longrope"] | {"short_mscale", "long_mscale"},
    ("phimoe", "su"): _OF_TYPE["longrope"] | {"short_mscale", "long_mscale"},
}
#: Modules that read the trained length beside the rope's parameters.
_BESIDE = names("phi3 phimoe")
_TRAINED = "original_max_position_embeddings"
#: Modules that rotate plainly, whatever `rope_parameters` say.
_ONLY_PLAIN = names("muse_glimmer muse_spark spark2_5")


def unread(config: Config, module: str, key: str) -> dict[tuple[str, ...], Any]:
    """Parameters of a rope that nobody reads, by the path to them.

    Args:
        config: of config.json.
        module: of mlx-lm, that reads it.
        key: one of `KEYS`.
    """
    parameters = config[key]
    if not by_layer_type(parameters):
        return _unread_of_one(config, module, parameters)
    return {
        (layer_type, *path): value
        for layer_type, own in parameters.items()
        if isinstance(own, Mapping)
        for path, value in _unread_of_one(config, module, own).items()
    }


def _unread_of_one(config: Config, module: str, parameters: Config) -> dict[tuple[str, ...], Any]:
    rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
    if module in _ONLY_PLAIN and rope_type != "default":
        return {("rope_type",): rope_type}
    read = _EVERY | _OF_MODULE.get((module, rope_type), _OF_TYPE.get(rope_type, _PLAIN))
    lost = {
        (name,): value
        for name, value in parameters.items()
        if value is not None and name not in read
    }
    trained, of_config = (each.get(_TRAINED) for each in (parameters, config))
    if module in _BESIDE and None not in (trained, of_config) and trained != of_config:
        lost[(_TRAINED,)] = trained
    if rope_type in ("longrope", "su") and _is_ratio(config, parameters):
        lost.pop(("factor",), None)
    return lost | _half_of_yarn(parameters, rope_type)


def _is_ratio(config: Config, parameters: Config) -> bool:
    """Whether LongRoPE's `factor` is that of the lengths, which modules compute with."""
    trained = parameters.get("original_max_position_embeddings") or config.get(
        "original_max_position_embeddings"
    )
    longest = config.get("max_position_embeddings")
    return bool(trained and longest and parameters.get("factor") == longest / trained)


def _half_of_yarn(parameters: Config, rope_type: str) -> dict[tuple[str, ...], Any]:
    """One of YaRN's two mscales alone, which transformers passes over and mlx-lm does not."""
    if rope_type not in ("yarn", "deepseek_yarn") or parameters.get("attention_factor") is not None:
        return {}
    mscale, all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if bool(mscale) == bool(all_dim):
        return {}
    if mscale and mscale != 1:
        return {("mscale",): mscale}
    return {("mscale_all_dim",): all_dim} if all_dim else {}
