# SPDX-License-Identifier: Apache-2.0
"""GGUF model families with experts or recurrent layers."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from . import family_config as of
from . import recurrent_config as states
from . import stems
from .dense_families import GRANITE, WINDOW
from .family import Family, has_any, has_experts
from .source import GGUFSource

_SIGMOID = 2  # in GGUF's numbering of gating functions
_EXPERT_COUNTS = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
}
_EXPERTS = {**_EXPERT_COUNTS, "moe_intermediate_size": "expert_feed_forward_length"}
_LOCAL_EXPERTS = {
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
}
_SHARED_WIDTH = {"shared_expert_intermediate_size": "expert_shared_feed_forward_length"}
_NO_ATTENTION = {
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "rope_theta"), ""),
    "max_position_embeddings": "",
    "rms_norm_eps": "layer_norm_epsilon",
}
_SPARSE = {"decoder_sparse_step": 1, "mlp_only_layers": []}
#: llama.cpp's converter has multiplied the weights by these already.
_FALCON_H1_ONES: Mapping[str, Any] = {
    **dict.fromkeys(
        (
            *("attention_in_multiplier", "attention_out_multiplier", "embedding_multiplier"),
            *("key_multiplier", "lm_head_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"),
        ),
        1.0,
    ),
    "mlp_multipliers": [1.0, 1.0],
    "ssm_multipliers": [1.0] * 5,
}


def _has_shared_experts(source: GGUFSource) -> bool:
    return bool(source.arch("expert_shared_feed_forward_length"))


def _gates_by_sigmoid(source: GGUFSource) -> bool:
    return source.arch("expert_gating_func") == _SIGMOID or any(
        ".exp_probs_b." in name for name in source.tensors
    )


_moe = partial(Family, when=has_experts)
MIXED: tuple[Family, ...] = (
    _moe(
        "llama",
        "mixtral",
        "MixtralForCausalLM",
        {**stems.COMMON, **stems.experts("block_sparse_moe", "gate")},
        interleaved_rope=True,
        keys=_LOCAL_EXPERTS,
    ),
    _moe(
        "qwen2moe",
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        {**stems.COMMON, **stems.QWEN_EXPERTS},
        keys={**_EXPERTS, **_SHARED_WIDTH},
        fixed={"norm_topk_prob": False, **_SPARSE},
        renamed={"head_dim": ""},
    ),
    *(
        _moe(
            architecture,
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            {**stems.COMMON, **stems.QK_NORM, **stems.EXPERTS},
            keys=_EXPERTS,
            fixed={"norm_topk_prob": True, "attention_bias": False, **_SPARSE},
        )
        for architecture in ("qwen3moe", "qwen3vlmoe")
    ),
    _moe(
        "qwen3next",
        "qwen3_next",
        "Qwen3NextForCausalLM",
        stems.QWEN3_NEXT,
        keys={**_EXPERTS, **_SHARED_WIDTH},
        fixed={"norm_topk_prob": True, **_SPARSE},
        config=states.qwen3_next,
        rotates_part=True,
        default_dtype="bfloat16",
    ),
    Family(
        "qwen35",
        "qwen3_5_text",
        "Qwen3_5ForCausalLM",
        stems.QWEN35,
        prefix="language_model.",
        v_heads_tiled=True,
        config=states.qwen35,
        rotates_part=True,
        default_dtype="bfloat16",
    ),
    _moe(
        "qwen35moe",
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        {**stems.QWEN35, **stems.QWEN_EXPERTS},
        keys={**_EXPERTS, **_SHARED_WIDTH},
        prefix="language_model.",
        v_heads_tiled=True,
        config=states.qwen35,
        rotates_part=True,
        default_dtype="bfloat16",
    ),
    _moe(
        "gpt-oss",
        "gpt_oss",
        "GptOssForCausalLM",
        stems.GPT_OSS,
        keys={
            **_LOCAL_EXPERTS,
            **WINDOW,
            "intermediate_size": "expert_feed_forward_length",
        },
        fixed={"attention_bias": True},
        config=of.gpt_oss,
        default_dtype="bfloat16",
    ),
    _moe(
        "glm4moe",
        "glm4_moe",
        "Glm4MoeForCausalLM",
        {**stems.SECOND_NORM, **stems.QK_NORM, **stems.DEEPSEEK_EXPERTS},
        config=of.glm4_moe,
        states_bias=True,
        rotates_part=True,
    ),
    _moe(
        "deepseek2",
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        {**stems.COMMON, **stems.LATENT, **stems.DEEPSEEK_EXPERTS},
        when=_gates_by_sigmoid,
        config=of.deepseek,
        rotates_part=True,
        default_dtype="bfloat16",
    ),
    _moe(
        "deepseek2",
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        {**stems.COMMON, **stems.LATENT_HEADS, **stems.DEEPSEEK_EXPERTS},
        config=of.deepseek2,
        rotates_part=True,
        default_dtype="bfloat16",
    ),
    _moe(
        "dots1",
        "dots1",
        "Dots1ForCausalLM",
        {
            **stems.COMMON,
            **stems.QK_NORM,
            **stems.DEEPSEEK_EXPERTS,
            **stems.experts("mlp", "gate", "experts"),
        },
        config=of.deepseek_experts,
        default_dtype="bfloat16",
    ),
    Family(
        "lfm2",
        "lfm2",
        "Lfm2ForCausalLM",
        stems.LFM2,
        keys={"conv_L_cache": "shortconv.l_cache"},
        fixed={
            "block_multiple_of": 256,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": False,
        },
        renamed={"rms_norm_eps": "norm_eps"},
        config=states.lfm2_dense,
        top_names=stems.LFM2_TOP,
        layers_differ=True,
    ),
    _moe(
        "lfm2moe",
        "lfm2_moe",
        "Lfm2MoeForCausalLM",
        stems.LFM2_MOE,
        keys={
            **_EXPERTS,
            "conv_L_cache": "shortconv.l_cache",
            "num_dense_layers": ("leading_dense_block_count", 0),
        },
        fixed={"use_expert_bias": True, "norm_topk_prob": True, "routed_scaling_factor": 1.0},
        renamed={"rms_norm_eps": "norm_eps"},
        config=states.lfm2,
        top_names=stems.LFM2_TOP,
        layers_differ=True,
    ),
    _moe(
        "granitemoe",
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        stems.GRANITE_HYBRID,
        when=_has_shared_experts,
        keys=GRANITE,
        config=states.granite_shared,
        interleaved_rope=True,
        states_bias=True,
    ),
    _moe(
        "granitemoe",
        "granitemoe",
        "GraniteMoeForCausalLM",
        stems.GRANITE_MOE,
        keys={**GRANITE, **_LOCAL_EXPERTS},
        interleaved_rope=True,
        states_bias=True,
    ),
    Family(
        "granitehybrid",
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        stems.GRANITE_HYBRID,
        when=has_any,
        keys=GRANITE,
        config=states.granite_hybrid,
        interleaved_rope=True,
        states_bias=True,
        layers_differ=True,
        default_dtype="bfloat16",
    ),
    *(
        Family(
            architecture,
            "nemotron_h",
            "NemotronHForCausalLM",
            stems.NEMOTRON_H,
            when=has_any,
            fixed={"mlp_hidden_act": "relu2", "use_bias": False},
            renamed={"rms_norm_eps": "layer_norm_epsilon", "hidden_act": ""},
            config=config,
            top_names=stems.BACKBONE,
            layers="backbone.layers",
            rotates_part=True,
            layers_differ=True,
            default_dtype="bfloat16",
        )
        for architecture, config in (
            ("nemotron_h", states.nemotron_h),
            ("nemotron_h_moe", states.nemotron_h_moe),
        )
    ),
    _moe(
        "jamba",
        "jamba",
        "JambaForCausalLM",
        stems.JAMBA,
        keys={
            **_EXPERT_COUNTS,
            "mamba_d_conv": "ssm.conv_kernel",
            "mamba_d_state": "ssm.state_size",
            "mamba_dt_rank": "ssm.time_step_rank",
        },
        config=states.jamba,
        top_names=stems.FINAL_NORM,
        layers_differ=True,
        default_dtype="bfloat16",
    ),
    Family(
        "falcon-h1",
        "falcon_h1",
        "FalconH1ForCausalLM",
        stems.FALCON_H1,
        fixed={"mamba_norm_before_gate": False, "mamba_use_mlp": True, **_FALCON_H1_ONES},
        config=states.falcon_h1,
        top_names=stems.FINAL_NORM,
        states_bias=True,
        default_dtype="bfloat16",
    ),
    Family(
        "mamba",
        "mamba",
        "MambaForCausalLM",
        {"attn_norm": "norm", **stems.mamba1("mixer")},
        keys={
            "intermediate_size": "ssm.inner_size",
            "state_size": "ssm.state_size",
            "conv_kernel": "ssm.conv_kernel",
            "time_step_rank": "ssm.time_step_rank",
        },
        fixed={"use_bias": False, "use_conv_bias": True},
        renamed={**_NO_ATTENTION, "head_dim": ""},
        top_names=stems.BACKBONE,
        layers="backbone.layers",
        default_dtype="bfloat16",
    ),
    Family(
        "mamba2",
        "mamba2",
        "Mamba2ForCausalLM",
        {"attn_norm": "norm", **stems.mamba("mixer")},
        keys={"intermediate_size": "ssm.inner_size"},
        fixed={"time_step_limit": [0.0, math.inf], "time_step_rank": "auto"},
        renamed=_NO_ATTENTION,
        config=states.mamba2,
        top_names=stems.BACKBONE,
        layers="backbone.layers",
        default_dtype="bfloat16",
    ),
    _moe(
        "olmoe",
        "olmoe",
        "OlmoeForCausalLM",
        {**stems.COMMON, **stems.QK_NORM, **stems.EXPERTS},
        keys=_EXPERT_COUNTS,
        fixed={"norm_topk_prob": False},
    ),
    _moe(
        "exaone-moe",
        "exaone_moe",
        "ExaoneMoeForCausalLM",
        {**stems.COMMON, **stems.QK_NORM, **stems.DEEPSEEK_EXPERTS},
        keys=WINDOW,
        config=of.exaone_moe,
        default_dtype="bfloat16",
    ),
    _moe(
        "ernie4_5-moe",
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        {
            **stems.COMMON,
            **stems.DEEPSEEK_EXPERTS,
            "exp_probs_b": "mlp.moe_statics.e_score_correction_bias",
        },
        keys={
            "moe_num_experts": "expert_count",
            "moe_k": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "moe_num_shared_experts": ("expert_shared_count", 0),
            "moe_layer_start_index": "leading_dense_block_count",
            "moe_layer_interval": "interleave_moe_layer_step",
        },
        config=of.ernie_moe,
    ),
    _moe(
        "minimax-m2",
        "minimax_m2",
        "MiniMaxM2ForCausalLM",
        {
            **stems.COMMON,
            **stems.QK_NORM,
            **stems.experts("block_sparse_moe", "gate"),
            "exp_probs_b": "block_sparse_moe.e_score_correction_bias",
        },
        keys={**_LOCAL_EXPERTS, "intermediate_size": "expert_feed_forward_length"},
        fixed={"use_qk_norm": True, "scoring_func": "sigmoid"},
        config=of.minimax,
        rotates_part=True,
        default_dtype="bfloat16",
    ),
    _moe(
        "afmoe",
        "afmoe",
        "AfmoeForCausalLM",
        stems.AFMOE,
        keys={
            **_EXPERTS,
            **WINDOW,
            "num_shared_experts": ("expert_shared_count", 0),
            "num_dense_layers": ("leading_dense_block_count", 0),
            "route_scale": ("expert_weights_scale", 1.0),
            "route_norm": ("expert_weights_norm", True),
        },
        fixed={"mup_enabled": True, "score_func": "sigmoid", "n_group": 1, "topk_group": 1},
        config=of.every_fourth_sees_all,
        default_dtype="bfloat16",
    ),
)
