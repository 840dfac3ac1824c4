# SPDX-License-Identifier: Apache-2.0
"""Derives keys that mlx-lm's modules read from other keys of config.json.

transformers 5 renamed keys and omits derivable ones, for which most modules take their own default.
Each row derives one key that modules read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_metal.engine.config_json import derived_values as derived
from vllm_metal.engine.config_json.rope_parameters import Config, scaling_of


@dataclass(frozen=True)
class Row:
    """A key that modules read, and the function that derives it from other keys."""

    key: str
    value: Callable[[Config], Any]  # returns None if the config does not determine it
    families: tuple[str, ...] = ()  # modules of mlx-lm; empty: all that read the key
    always: bool = False  # also if the config has a value, which may be outdated or in another form
    no_default: bool = False  # only for modules that require the key; others have a better default


#: By module, settings that are fixed in transformers' class and therefore absent from its files.
_CHOICES: Mapping[str, Mapping[str, Any]] = {
    "apertus": {"mlp_bias": False, "post_norm": False, "qk_norm": True},
    "ernie4_5_moe": {"moe_use_aux_free": True},
    "glm_moe_dsa": {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1},
    "kimi_linear": {"rope_theta": 10000.0},  # positions are not used
    "longcat_flash": {
        "attention_method": "MLA",
        "zero_expert_type": "identity",
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
    },
    "minimax": {"shared_intermediate_size": 0},
    "mimo_v2_flash": {
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "n_shared_experts": derived.NOTHING,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    },
    # All of its layers have experts.
    "solar_open": {
        "partial_rotary_factor": 1.0,
        "first_k_dense_replace": 0,
        "intermediate_size": 0,
    },
}
#: Older names, by module and the key that it reads.
_OTHER_NAMES: Mapping[str, Mapping[str, str]] = {
    "falcon_ocr": {
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "num_key_value_heads": "n_kv_heads",
        "intermediate_size": "ffn_dim",
        "rms_norm_eps": "norm_eps",
        "max_position_embeddings": "max_seq_len",
    },
    "jina_vlm": {
        "num_hidden_layers": "n_layers",
        "max_position_embeddings": "max_sequence_length",
    },
    "molmo": {  # mlx-vlm's names are those of the code that trained it
        "d_model": "hidden_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "n_kv_heads": "num_key_value_heads",
        "mlp_hidden_size": "intermediate_size",
        "max_sequence_length": "max_position_embeddings",
    },
    "llama": {  # Meta's params.json, in files from MLX's first examples
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "num_key_value_heads": "n_kv_heads",
        "rms_norm_eps": "norm_eps",
    },
    "olmo": {
        "d_model": "hidden_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "n_kv_heads": "num_key_value_heads",
        "embedding_size": "vocab_size",
    },
    "qwen": {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "intermediate_size": "ffn_hidden_size",
        "vocab_size": "padded_vocab_size",
        "max_position_embeddings": "n_positions",
    },
}
#: For modules that do not read `rope_parameters` themselves.
ROPE_ROWS: Sequence[Row] = (
    Row("rope_theta", derived.from_rope("rope_theta")),
    Row("rope_scaling", scaling_of),
    Row("partial_rotary_factor", derived.from_rope("partial_rotary_factor")),
    Row("rotary_pct", derived.from_rope("partial_rotary_factor"), ("gpt_neox",)),
    Row("rotary_emb_base", derived.from_rope("rope_theta"), ("gpt_neox",)),
    Row(
        "original_max_position_embeddings",
        derived.from_rope("original_max_position_embeddings"),
        ("phi3", "phimoe"),
    ),
    Row("rope_local_base_freq", derived.from_rope("rope_theta", "sliding_attention")),
    Row("swa_rope_theta", derived.from_rope("rope_theta", "sliding_attention")),
)
ROWS: Sequence[Row] = (
    Row("head_dim", derived.head_dim, no_default=True),
    Row("head_dim", derived.head_dim, ("glm_ocr",)),
    Row("sliding_window_pattern", derived.window_letters, ("exaone4",), always=True),
    Row("first_k_dense_replace", derived.num_dense_layers),
    # transformers' classes of these read the list alone if a file has both.
    Row(
        "first_k_dense_replace",
        derived.num_dense_layers,
        ("deepseek_v32", "glm_moe_dsa", "hy_v4"),
        always=True,
    ),
    # transformers' class has as many without the list, whatever this key says.
    Row("first_k_dense_replace", derived.constant(3), ("glm5_next",), always=True),
    Row("is_moe_layer", derived.sparse_layers),
    Row("mlp_only_layers", derived.constant([])),
    Row("num_experts", derived.copy_of("num_local_experts")),
    Row("vocab_size", derived.text_vocab_size, ("gemma3", "gemma4")),
    Row("n_ctx", derived.copy_of("n_positions"), ("gpt2",)),
    Row("block_dim", derived.copy_of("hidden_size"), ("lfm2",)),
    Row("full_attn_idxs", derived.lfm2_attention_layers, ("lfm2", "lfm2_moe")),
    # transformers' default; no file has mlx-lm's, which differs.
    Row("time_step_limit", derived.constant((0.0, math.inf)), ("granitemoehybrid",)),
    Row(
        "position_embedding_type",
        derived.position_embedding_type,
        ("granitemoehybrid",),
        always=True,
    ),
    Row("mlp_multipliers", derived.ones("mlp_multipliers", 2), ("falcon_h1",)),
    Row("ssm_multipliers", derived.ones("ssm_multipliers", 5), ("falcon_h1",)),
    Row("layer_types", derived.granite_layer_types, ("granitemoehybrid",), always=True),
    Row("global_head_dim", derived.full_attention_head_dim, ("gemma4_text",)),
    Row("intermediate_size", derived.expanded_width, ("mamba2",)),
    Row("intermediate_size", derived.inkling_expert_width, ("inkling",), always=True),
    Row("dense_intermediate_size", derived.inkling_dense_width, ("inkling",)),
    Row("moe_layer_end_index", derived.last_layer_of_experts, ("ernie4_5_moe",), always=True),
    Row("moe_layer_start_index", derived.ernie_vl_expert_layer(0), ("ernie4_5_moe_vl",)),
    Row("moe_layer_end_index", derived.ernie_vl_expert_layer(-1), ("ernie4_5_moe_vl",)),
    Row(
        "mamba_d_head",
        derived.mamba_head_dim,
        ("falcon_h1", "granitemoehybrid"),
        always=True,
    ),
    Row("rotary_dim", derived.rotated_width, ("minimax",)),
    Row("rotary_dim", derived.rotated_width, ("minimax_m3_vl",), always=True),
    # As transformers' MiMoV2FlashAttention has it.
    Row("swa_num_key_value_heads", derived.twice_the_kv_heads, ("mimo_v2_flash",)),
    Row("hybrid_layer_pattern", derived.layers_with_windows, ("mimo_v2_flash",)),
    Row("moe_layer_freq", derived.layers_of_experts, ("mimo_v2_flash",)),
    *(
        Row(key, derived.copy_of(name), ("mimo_v2_flash",))
        for key, name in {
            "sliding_window_size": "sliding_window",
            "layernorm_epsilon": "rms_norm_eps",
            "swa_num_attention_heads": "num_attention_heads",
            "swa_head_dim": "head_dim",
            "swa_v_head_dim": "v_head_dim",
        }.items()
    ),
    *(
        Row(key, derived.copy_of(name), (module,))
        for module, other_names in _OTHER_NAMES.items()
        for key, name in other_names.items()
    ),
    Row("intermediate_size", derived.meta_mlp_width, ("llama",)),
    *(
        Row(key, value, ("jina_vlm",), always=True)  # the module has other defaults
        for key, value in {
            "additional_vocab_size": derived.copy_of("additional_vocab_size"),
            "head_dim": derived.jina_head_dim,
            "intermediate_size": derived.jina_mlp_width,
            "num_attention_heads": derived.copy_of("block_config.attn_config.n_heads"),
            "num_key_value_heads": derived.jina_kv_heads,
            "rms_norm_eps": derived.copy_of("block_config.lnorm_config.eps"),
        }.items()
    ),
    Row("partial_rotary_factor", derived.no_shared_factor, ("laguna",), always=True),
    # transformers' class only clips these weights in training.
    Row(
        "altup_coef_clip",
        derived.constant(derived.NOTHING),
        ("gemma3n",),
        always=True,
    ),
    Row("cross_attention_layers", derived.mllama_image_layers, ("mllama",)),
    Row("mlp_hidden_size", derived.both_mlp_widths, ("olmo",)),
    Row("attn_config", derived.dbrx_attention, ("dbrx",), always=True),
    Row("linear_attn_config", derived.kimi_linear_attention, ("kimi_linear",)),
    *(
        Row(key, derived.constant(value), (module,), always=True)
        for module, choices in _CHOICES.items()
        for key, value in choices.items()
    ),
)
