# SPDX-License-Identifier: Apache-2.0
"""Named changes of a transformers configuration: changes every key, and adds others.

Changes are large enough to affect a text of 40 tokens: a window of 5, an epsilon of 0.3. A key that
only matters with others brings them along.
"""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

#: Length of the text that a change must affect.
LENGTH = 40
#: Keys that identify the model, or set its dtype or the Python types of transformers'
#: results.
IDENTITY = frozenset(
    (
        "_name_or_path",
        "architectures",
        "dtype",
        "model_type",
        "return_dict",
        "transformers_version",
    )
)
#: Inner configurations' keys.
INNER = ("attn_config", "ffn_config")
#: Keys of all transformers configurations, which inner ones have too.
_OF_ALL = frozenset(PreTrainedConfig().to_dict()) | {"_name_or_path", "output_attentions"}
ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "relu", "relu2", "silu")
_GROUPS = {2: 3, 6: 3, 1: 2, 3: 1, 8: 4}
#: Other values by key. Other numbers are reduced by two fifths or by one.
VALUES: Mapping[str, tuple[Any, ...]] = {
    "activation_sparsity_pattern": ([0.9, 0.2, 0.0, 0.0, 0.0],),
    "altup_active_idx": (1,),
    "altup_coef_clip": (0.05,),
    "attn_logit_softcapping": (0.7, None),
    "attention_chunk_size": (5,),
    "attn_temperature_tuning": (True,),
    "beta_fast": (0.7,),
    "beta_slow": (0.1,),
    "block_multiple_of": (32,),
    "block_types": (["attention", "recurrent", "recurrent", "attention"],),
    "chunk_size_feed_forward": (7,),
    "clip_qkv": (0.4, None),
    "conv1d_width": (3,),
    "cross_attention_layers": ([1], []),
    "d_model": (144,),
    "decoder_sparse_step": (2, 1),
    "dim_model_base": (20,),
    "factor": (2.5,),
    "final_logit_softcapping": (1.5, None),
    "floor_scale": (4,),
    "gating": (False, "per-element"),
    "global_attn_every_n_layers": (2,),
    "head_dim": (24,),
    "hidden_size": (144,),
    "interleave_moe_layer_step": (1,),
    "layers_block_type": (["moe", "full_attention", "linear_attention", "moe", "mlp"],),
    "logits_soft_cap": (1.5,),
    "lru_width": (36,),
    "max_window_layers": (1, 3),
    "mlp_only_layers": ([2], [0, 1]),
    "moe_layers": ([0, 2],),
    "moe_norm_min": (2.0,),
    "moe_router_logit_softcapping": (0.5,),
    "mrope_section": ([2, 4, 6],),
    "n_embd": (144,),
    "n_group": (2,),
    "num_attention_heads": (2,),
    "num_attention_heads_per_layer": ([6, 12, 6, 12],),
    "num_expert_group": (2,),
    "num_kv_shared_layers": (0, 3),
    "num_logits_to_keep": (3,),
    "n_head": (12, 4, 3),
    "n_inner": (100,),
    "n_heads": (12,),
    "no_rope_layers": ([0, 1, 0, 1], [1, 1, 1, 1]),
    "no_rope_layer_interval": (2,),
    "per_layer_config": ({"1": {"head_dim": 32}, "3": {"head_dim": 32}, "5": {"head_dim": 32}},),
    "position_embedding_type": ("nope",),
    "q_lora_rank": (None, 16),
    "query_pre_attn_scalar": (90,),
    "rotary_dim": (4, 2),
    "routed_scaling_factor": (0.6, 1.0),
    "scoring_func": ("softmax", "sigmoid"),
    "sliding_window": (5, None),
    "sliding_window_pattern": (2, "LG"),
    "_sliding_window_pattern": (2,),
    "summary_activation": ("tanh",),
    "summary_type": ("mean",),
    "swiglu_limit": (0.5,),
    "time_step_limit": ([0.3, 0.6],),
    "time_step_floor": (0.3,),
    "time_step_init_scheme": ("constant",),
    "time_step_max": (0.3,),
    "time_step_min": (0.6,),
    "topk_group": (1, 3),
    "topk_method": ("greedy", "noaux_tc"),
    "use_bidirectional_attention": (True, "all"),
    "v_head_dim": (28,),
    "vocab_size": (104,),
    "zero_expert_num": (1,),
}
#: Keys that only matter with others.
BESIDE: Mapping[str, Mapping[str, Any]] = {
    "attn_temperature_tuning": {"floor_scale": 4},
    "floor_scale": {"attn_temperature_tuning": True},
    "attn_scale": {"attn_temperature_tuning": True, "floor_scale": 4},
    "block_auto_adjust_ff_dim": {"block_multiple_of": 16},
    "block_multiple_of": {"block_auto_adjust_ff_dim": True},
    "block_ffn_dim_multiplier": {"block_auto_adjust_ff_dim": True, "block_multiple_of": 16},
    "enable_moe_block": {"num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 40},
    "topk_group": {"num_experts_per_tok": 2, "num_experts_per_token": 2},
    "n_group": {"num_experts_per_tok": 2},
    "num_expert_group": {"num_experts_per_token": 2},
}
_OF_WINDOWS = ("max_window_layers", "sliding_window", "use_sliding_window")
#: Keys of some families, with values that would matter there.
FOREIGN: Mapping[str, Any] = {
    "attention_bias": True,
    "attention_chunk_size": 5,
    "attention_multiplier": 0.3,
    "attention_value_scale": 0.5,
    "attn_logit_softcapping": 0.7,
    "attn_temperature_tuning": True,
    "clip_qkv": 0.4,
    "embedding_multiplier": 3.0,
    "final_logit_softcapping": 1.5,
    "key_multiplier": 0.4,
    "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
    "lm_head_multiplier": 0.6,
    "logit_scale": 0.3,
    "logits_scaling": 1.5,
    "mlp_bias": True,
    "mup_enabled": True,
    "no_rope_layers": [1, 0, 0, 1],
    "norm_topk_prob": False,
    "num_kv_shared_layers": 2,
    "partial_rotary_factor": 0.5,
    "query_pre_attn_scalar": 90,
    "residual_multiplier": 0.7,
    "rope_scaling": {"rope_type": "linear", "factor": 3.0},
    "rope_theta": 123.0,
    "routed_scaling_factor": 0.6,
    "scale_emb": 3.0,
    "scoring_func": "softmax",
    "sliding_window": 5,
    "swiglu_limit": 0.5,
    "tomorrows_key": 3,
    "use_parallel_residual": True,
    "use_qk_norm": True,
}


@dataclass(frozen=True)
class Change:
    """A change of a configuration."""

    key: str  # a dot before each key of an inner dictionary
    value: Any
    keys: Mapping[str, Any]  # changed keys and their values
    added: bool = False  # whether transformers' class lacks the key
    absent: bool = False  # whether config.json lacks the key

    @property
    def name(self) -> str:
        return f"{self.key} absent" if self.absent else f"{self.key}={str(self.value)[:60]}"


def omissions(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[Change]:
    """Yields each key omitted, each null, and each at a different default of its class."""
    for key, value in config.items():
        # With the default depth, the result is mostly rounding errors of many random layers.
        if key in {*IDENTITY, "num_hidden_layers"} or key.startswith("_"):
            continue
        beside = {name: each for name, each in BESIDE.get(key, {}).items() if name in config}
        yield Change(key, value, beside, absent=True)
        if value is not None:
            yield Change(key, None, {**beside, key: None})
        if (default := defaults.get(key)) not in (None, value):
            yield Change(key, default, {**beside, key: deepcopy(default)})


def changes(config: Mapping[str, Any]) -> Iterator[Change]:
    """Yields all changes of a configuration, given as `to_dict` of transformers' class."""
    for key, value in config.items():
        if key in IDENTITY:
            continue
        if key == "rope_parameters":
            yield from _of_ropes(config)
        elif isinstance(value, Mapping) and key in INNER:
            for name, own in value.items():
                for other in _others(name, own):
                    yield Change(f"{key}.{name}", other, {key: {**value, name: other}})
        else:
            shares = key == "partial_rotary_factor"
            for other in _other_shares(value, config) if shares else _others(key, value):
                yield Change(key, other, {**_beside(key, other, config), key: other})
    for key, value in FOREIGN.items():
        if key not in config and not _of_a_list(key, config):
            yield Change(key, value, {key: deepcopy(value)}, added=True)


def inner(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys that are specific to an inner configuration."""
    return {key: value for key, value in config.items() if key not in _OF_ALL}


def _of_a_list(key: str, config: Mapping[str, Any]) -> bool:
    """Returns whether a per-layer list would get another length."""
    layers = config.get("num_hidden_layers")
    return isinstance(FOREIGN[key], list) and layers not in (None, len(FOREIGN[key]))


def _beside(key: str, value: Any, config: Mapping[str, Any]) -> Mapping[str, Any]:
    rope = config.get("rope_parameters") or {}
    if key in rope:  # they mean the same
        return {"rope_parameters": {**rope, key: value}}
    if key in _OF_WINDOWS and config.get("use_sliding_window") is False:
        window = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}
        return window | {"layer_types": None} if "layer_types" in config else window
    if key == "num_hidden_layers":
        return {
            name: each[:value]
            for name, each in config.items()
            if isinstance(each, list) and len(each) == config[key]
        }
    types, window = config.get("layer_types") or (), config.get("sliding_window")
    if key == "layer_types" and "sliding_attention" in value and not 0 < (window or 0) < LENGTH:
        return {"sliding_window": 5, "use_sliding_window": True}
    if key == "sliding_window" and value and set(types) == {"full_attention"}:
        return {"layer_types": ["sliding_attention", *types[1:]]}
    return {name: each for name, each in BESIDE.get(key, {}).items() if name in config}


def _others(key: str, value: Any) -> Iterator[Any]:
    """Yields other values of a key."""
    if key in VALUES:
        yield from (other for other in VALUES[key] if other != value)
    elif key.endswith(("hidden_act", "hidden_activation", "activation_function")):
        yield from (other for other in ACTIVATIONS if other != value)
    elif key.endswith(("_eps", "epsilon")):
        yield 0.3
    elif key == "num_key_value_heads" or key.endswith("kv_n_heads"):
        yield _GROUPS.get(value, value)
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, int) and key.endswith(("_size", "_dim", "_rank", "_state", "_width")):
        yield value + 16
    elif isinstance(value, int):
        yield value - 1 if value > 1 else value + 1
    elif isinstance(value, float):
        yield round(0.6 * value, 4) if value else 0.3
    elif isinstance(value, list):
        yield from _other_lists(value)
    elif value is None:
        yield 3
    elif isinstance(value, str):
        yield "other"


def _other_lists(value: list[Any]) -> Iterator[list[Any]]:
    numbers = [each for each in value if isinstance(each, int | float)]
    if numbers and len(numbers) == len(value):
        yield [round(each * (0.6 + 0.1 * index), 3) for index, each in enumerate(value)]
    elif len(set(map(str, value))) > 1:
        yield [*value[1:], value[0]]  # another order, which need not repeat
        yield [*value[:1], *value[:-1]]
    elif "full_attention" in value:
        yield ["sliding_attention", *value[1:]]
    elif "sparse" in value:
        yield ["dense", *value[1:]]


def _of_ropes(config: Mapping[str, Any]) -> Iterator[Change]:
    """Yields changes of the RoPE parameters, or those of each layer type."""
    ropes = config["rope_parameters"] or {}
    if not any(isinstance(rope, Mapping) for rope in ropes.values()):
        for name, value, rope, beside in _other_ropes(ropes, config):
            keys = {"rope_parameters": rope, **beside}
            yield Change(f"rope_parameters.{name}", value, keys, name not in ropes)
        return
    for kind, own in ropes.items():
        for name, value, rope, beside in _other_ropes(own or {}, config):
            keys = {"rope_parameters": {**ropes, kind: rope}, **beside}
            yield Change(f"rope_parameters.{kind}.{name}", value, keys, name not in (own or {}))


def _other_ropes(
    rope: Mapping[str, Any], config: Mapping[str, Any]
) -> Iterator[tuple[str, Any, dict[str, Any], dict[str, Any]]]:
    """Yields (key, value, RoPE parameters, other required configuration keys)."""
    for key, value in rope.items():
        if key == "rope_theta":
            yield key, 37.0, {**rope, key: 37.0}, {}
        elif key == "partial_rotary_factor":
            for other in _other_shares(value, config):
                yield key, other, {**rope, key: other}, {key: other} if key in config else {}
        elif key == "original_max_position_embeddings":
            yield key, 8, {**rope, key: 8}, {}
        elif key not in ("rope_type", "type"):
            for other in _others(key, value):
                yield key, other, {**rope, key: other}, {}
        elif value == "longrope":
            yield "factor", 4.0, {**rope, "factor": 4.0}, {}
    for kind, words in SCALINGS.items():
        if kind == rope.get("rope_type", "default"):
            continue
        base = {k: rope[k] for k in ("rope_theta", "partial_rotary_factor") if k in rope}
        scaled = base | {"rope_type": kind} | words
        if kind == "longrope":
            half = _rotated(rope, config) // 2
            scaled["short_factor"] = [1.0 + 0.1 * index for index in range(half)]
            scaled["long_factor"] = [2.0 + 0.3 * index for index in range(half)]
        beside = {"max_position_embeddings": 16} if kind == "dynamic" else {}
        yield "rope_type", kind, scaled, beside
    if "partial_rotary_factor" not in rope:
        yield "partial_rotary_factor", 0.5, {**rope, "partial_rotary_factor": 0.5}, {}


#: Parameters of scaled RoPE by type.
SCALINGS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "longrope": {"factor": 32.0, "original_max_position_embeddings": 16},  # of 512
}


def _other_shares(value: Any, config: Mapping[str, Any]) -> list[float]:
    """Returns shares of a head that rotate an even number of elements."""
    less = 0.25 if _rotated({}, config) % 8 == 0 else 1 / 3
    return [share for share in (less, 1.0) if share != value]


def _rotated(rope: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    """Returns the number of rotated elements in a head."""
    width = config.get("qk_rope_head_dim") or config.get("head_dim")
    if width is None and "hidden_size" in config:
        width = config["hidden_size"] // config["num_attention_heads"]
    return int((width or 12) * rope.get("partial_rotary_factor", 1.0))
