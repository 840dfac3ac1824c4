# SPDX-License-Identifier: Apache-2.0
"""Finds RoPE parameters that neither mlx-lm's `initialize_rope` nor the module reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_metal.engine.config_json.inert_keys import names
from vllm_metal.engine.config_json.rope_parameters import Config, by_layer_type

KEYS = ("rope_parameters", "rope_scaling")
#: Parameters that are checked under top-level names, or that only concern images.
_EVERY = names(
    "rope_type type rope_theta partial_rotary_factor mrope_section mrope_interleaved "
    "mrope_sections finetuned"
)
_YARN = names(
    "factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim "
    "attention_factor truncate"
)
#: Parameters read, by type. `families.positions` of the patches reads `attention_factor` and
#: `truncate`.
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
#: Scaling parameters; transformers ignores them in an unscaled RoPE.
_PLAIN = frozenset().union(*_OF_TYPE.values())
#: Parameters read by modules that build their own RoPE or read more than others.
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
#: Modules that also read the trained length next to the RoPE parameters.
_TRAINED_BESIDE = names("phi3 phimoe")
_TRAINED = "original_max_position_embeddings"
#: Modules that never scale, whatever `rope_parameters` say.
_ONLY_PLAIN = names("glm_ocr muse_glimmer muse_spark qwen4_exp spark2_5")


def unread(config: Config, module: str, key: str) -> dict[tuple[str, ...], Any]:
    """Returns parameters within `key` (one of `KEYS`) that the module does not read, by path."""
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
    trained, top_level = (each.get(_TRAINED) for each in (parameters, config))
    if module in _TRAINED_BESIDE and None not in (trained, top_level) and trained != top_level:
        lost[(_TRAINED,)] = trained
    if rope_type in ("longrope", "su") and _is_ratio(config, parameters):
        lost.pop(("factor",), None)
    return lost | _lone_yarn_mscale(parameters, rope_type)


def _is_ratio(config: Config, parameters: Config) -> bool:
    """Whether LongRoPE's `factor` is the ratio of both lengths, which modules use instead."""
    trained = parameters.get("original_max_position_embeddings") or config.get(
        "original_max_position_embeddings"
    )
    longest = config.get("max_position_embeddings")
    return bool(trained and longest and parameters.get("factor") == longest / trained)


def _lone_yarn_mscale(parameters: Config, rope_type: str) -> dict[tuple[str, ...], Any]:
    """Returns YaRN's `mscale` or `mscale_all_dim` if it is set alone: only mlx-lm applies it."""
    if rope_type not in ("yarn", "deepseek_yarn") or parameters.get("attention_factor") is not None:
        return {}
    mscale, all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if bool(mscale) == bool(all_dim):
        return {}
    if mscale and mscale != 1:
        return {("mscale",): mscale}
    return {("mscale_all_dim",): all_dim} if all_dim else {}
