# SPDX-License-Identifier: Apache-2.0
"""Maps GGUF tensor names under `blk.N.` to mlx-lm's modules, by kind of layer.

Tensors with the same module are parts of one weight; their rows are concatenated as listed.
"""

from collections.abc import Mapping

Stems = Mapping[str, str]

_FFN = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
COMMON = {**_NORMS, **_ATTENTION, **_FFN}
QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
#: Norms before and after each half of a layer; here ffn_norm means another norm.
SANDWICH = {
    **COMMON,
    **QK_NORM,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
#: Norms only after each half of a layer.
POST_NORM = {
    **_ATTENTION,
    **_FFN,
    **QK_NORM,
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
#: One norm for attention and MLP, which run in parallel on the same input.
PARALLEL = {**_ATTENTION, **_FFN, **QK_NORM, "attn_norm": "input_layernorm"}
#: The MLP's norm is named as a norm after attention.
SECOND_NORM = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    **_ATTENTION,
    **_FFN,
}


def experts(module: str, router: str, switch: str = "switch_mlp") -> Stems:
    """Maps GGUF tensor stems of routed experts to mlx-lm's `module`; `switch` stacks experts."""
    return {
        "ffn_gate_inp": f"{module}.{router}",
        "ffn_gate_exps": f"{module}.{switch}.gate_proj",
        "ffn_up_exps": f"{module}.{switch}.up_proj",
        "ffn_down_exps": f"{module}.{switch}.down_proj",
    }


def shared(module: str) -> Stems:
    """Maps GGUF tensor stems of shared experts to mlx-lm's `module`."""
    return {
        "ffn_gate_shexp": f"{module}.gate_proj",
        "ffn_up_shexp": f"{module}.up_proj",
        "ffn_down_shexp": f"{module}.down_proj",
    }


def mamba(module: str) -> Stems:
    """Maps GGUF tensor stems of a Mamba 2 mixer to mlx-lm's `module`."""
    return {
        "ssm_in": f"{module}.in_proj",
        "ssm_conv1d": f"{module}.conv1d",
        "ssm_a": f"{module}.A_log",
        "ssm_d": f"{module}.D",
        "ssm_dt": f"{module}.dt_bias",
        "ssm_norm": f"{module}.norm",
        "ssm_out": f"{module}.out_proj",
    }


def mamba1(module: str) -> Stems:
    """Maps GGUF tensor stems of a Mamba mixer, with Jamba's norms, to mlx-lm's `module`."""
    return {
        **mamba(module),
        "ssm_x": f"{module}.x_proj",
        "ssm_dt": f"{module}.dt_proj",
        "ssm_dt_norm": f"{module}.dt_layernorm",
        "ssm_b_norm": f"{module}.b_layernorm",
        "ssm_c_norm": f"{module}.c_layernorm",
    }


EXPERTS = experts("mlp", "gate")
DEEPSEEK_EXPERTS = {
    **EXPERTS,
    **shared("mlp.shared_experts"),
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
}
QWEN_EXPERTS = {
    **EXPERTS,
    **shared("mlp.shared_expert"),
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_LATENT_INPUTS = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}
LATENT = {
    **_LATENT_INPUTS,
    "attn_k_b": "self_attn.embed_q",
    "attn_v_b": "self_attn.unembed_out",
}
#: Modules that expand keys and values of all heads from latents.
LATENT_HEADS = {
    **_LATENT_INPUTS,
    "attn_k_b": "self_attn.kv_b_proj",
    "attn_v_b": "self_attn.kv_b_proj",
}
GLM4 = {
    **{stem: path for stem, path in COMMON.items() if stem != "ffn_gate"},
    "post_attention_norm": "post_self_attn_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "post_ffw_norm": "post_mlp_layernorm",
}
GATED_DELTA = {
    **SECOND_NORM,
    **QK_NORM,
    "ssm_a": "linear_attn.A_log",
    "ssm_dt": "linear_attn.dt_bias",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
QWEN35 = {
    **GATED_DELTA,
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
}
QWEN3_NEXT = {
    **GATED_DELTA,
    "attn_qkv": "linear_attn.in_proj_qkvz",
    "attn_gate": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
    **QWEN_EXPERTS,
}
GPT_OSS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    **_ATTENTION,
    "attn_sinks": "self_attn.sinks",
    **experts("mlp", "router", "experts"),
}
PHI3 = {
    **_NORMS,
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
PHI2 = {
    "attn_norm": "input_layernorm",
    **_ATTENTION,
    "attn_output": "self_attn.dense",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
STARCODER2 = {**_NORMS, **_ATTENTION, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
APERTUS = {
    "attn_norm": "attention_layernorm",
    "ffn_norm": "feedforward_layernorm",
    **_ATTENTION,
    **QK_NORM,
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LFM2_LAYERS = {
    "attn_norm": "operator_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
}
LFM2 = {
    **_LFM2_LAYERS,
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}
_FEED_FORWARD = {stem: path.replace("mlp.", "feed_forward.") for stem, path in _FFN.items()}
LFM2_MOE = {
    **_LFM2_LAYERS,
    **_FEED_FORWARD,
    **experts("feed_forward", "gate"),
    "exp_probs_b": "feed_forward.expert_bias",
}
JAMBA = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "pre_ff_layernorm",
    **_ATTENTION,
    **mamba1("mamba"),
    **_FEED_FORWARD,
    **experts("feed_forward", "router"),
}
FALCON_H1 = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "pre_ff_layernorm",
    **_ATTENTION,
    **mamba("mamba"),
    **_FEED_FORWARD,
}
GRANITE_MOE = {**COMMON, **experts("block_sparse_moe", "router.layer")}
GRANITE_HYBRID = {
    **GRANITE_MOE,
    **mamba("mamba"),
    "ffn_gate_shexp": "shared_mlp.input_linear",
    "ffn_up_shexp": "shared_mlp.input_linear",
    "ffn_down_shexp": "shared_mlp.output_linear",
}
NEMOTRON_H = {
    "attn_norm": "norm",
    **{stem: path.replace("self_attn.", "mixer.") for stem, path in _ATTENTION.items()},
    **mamba("mixer"),
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b": "mixer.gate.e_score_correction_bias",
    "ffn_up_exps": "mixer.switch_mlp.fc1",
    "ffn_down_exps": "mixer.switch_mlp.fc2",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}
AFMOE = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_mlp_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    **_ATTENTION,
    **QK_NORM,
    "attn_gate": "self_attn.gate_proj",
    **_FFN,
    **experts("mlp", "router.gate", "experts"),
    **shared("mlp.shared_experts"),
    "exp_probs_b": "mlp.expert_bias",
}
GEMMA4 = {
    **SANDWICH,
    "layer_output_scale": "layer_scalar",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_gate_exps": "experts.switch_glu.gate_proj",
    "ffn_up_exps": "experts.switch_glu.up_proj",
    "ffn_gate_up_exps": "experts.gate_up_proj",
    "ffn_down_exps": "experts.switch_glu.down_proj",
    "ffn_down_exps.scale": "router.per_expert_scale",
}
#: Last parts of parameters that are plain arrays, without a suffix.
BARE = frozenset(
    (
        *("A_log", "D", "dt_bias", "e_score_correction_bias", "expert_bias", "sinks"),
        *("layer_scalar", "scale", "per_expert_scale", "experts.gate_up_proj"),
    )
)

TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
#: Hybrids with a module named backbone.
BACKBONE = {
    "token_embd": "backbone.embeddings",
    "output_norm": "backbone.norm_f",
    "output": "lm_head",
}
FINAL_NORM = {**TOP, "output_norm": "model.final_layernorm"}
LFM2_TOP = {"token_embd": "model.embed_tokens", "token_embd_norm": "model.embedding_norm"}
GEMMA4_TOP = {
    **TOP,
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
