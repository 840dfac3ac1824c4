# SPDX-License-Identifier: Apache-2.0
"""Settings that mlx-lm's modules do not read, with the values that the modules assume."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_metal.engine.config_json.rope_parameters import OF_THEIR_OWN, rope
from vllm_metal.identity.model_files import ModelLoadError


@dataclass(frozen=True)
class AtMost:
    """Accepts numbers up to a bound."""

    bound: float

    def __repr__(self) -> str:
        return f"at most {self.bound}"


_LARGEST_FLOAT32 = 3.5e38
#: Modules that use the embedding as head, and modules with a separate head.
_TIED = {"tie_word_embeddings": (True,)}
_UNTIED = {"tie_word_embeddings": (False,)}
#: Norms of Jina VLM.
_RMS: Mapping[str, tuple[Any, ...]] = {"bias": (False,), "type": ("rms",), "with_affine": (True,)}


def _in_block(prefix: str, **computed: tuple[Any, ...]) -> dict[str, tuple[Any, ...]]:
    # Keys as `nested_blocks` gives them.
    return {f"block_config.{prefix}{key}": values for key, values in computed.items()}


#: Supported values by module and key of config.json; if empty, the key must be absent.
FIXED: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "afm7": _TIED,
    "afmoe": {"attention_bias": (False,)},
    "apertus": {"attention_bias": (False,), "post_norm": (False,), "qk_norm": (True,)},
    "bailing_moe": {"norm_softmax": (False,), "use_rmsnorm": (True,)},
    "bailing_moe_linear": {"norm_softmax": (False,), "use_rmsnorm": (True,)},
    "bailing_moe_v3": {
        "norm_topk_prob": (True,),
        "score_function": ("sigmoid",),
        "use_qk_norm": (True,),
    },
    "cohere": _TIED,
    "cohere2": _TIED,
    "cohere2_moe": _TIED,
    "dbrx": _UNTIED,
    "deepseek": _UNTIED | {"norm_topk_prob": (False,), "scoring_func": ("softmax",)},
    "deepseek_v2": _UNTIED
    | {
        "mlp_bias": (False,),
        "norm_topk_prob": (False,),
        "scoring_func": ("softmax",),
    },
    "deepseek_v3": _UNTIED | {"rope_interleave": (True,), "scoring_func": ("sigmoid",)},
    "deepseek_v32": _UNTIED | {"rope_interleave": (True,), "scoring_func": ("sigmoid",)},
    # transformers' class does not read scoring_func; the published files say "noaux_tc".
    "dots1": {"attention_bias": (False,), "scoring_func": ("noaux_tc", "sigmoid")},
    "ernie4_5_moe": {
        "moe_norm_min": (1e-12,),
        "moe_use_aux_free": (True,),
        "use_bias": (False,),
    },
    "ernie4_5_moe_vl": {
        "moe_gate_act": ("softmax",),
        "moe_use_aux_free": (True,),
        "use_bias": (False,),
    },
    "exaone_moe": {"scoring_func": ("sigmoid",)},
    "falcon_h1": {"mamba_use_mlp": (True,), "time_step_limit": ((0.0, math.inf),)},
    "falcon_ocr": _UNTIED,
    "gemma": _TIED | {"attention_bias": (False,)},
    "gemma2": _TIED | {"attention_bias": (False,)},
    "gemma3_text": {
        "attention_bias": (False,),
        "attn_logit_softcapping": (),
        "final_logit_softcapping": (),
    },
    "gemma3n": _TIED | {"attention_bias": (False,)},
    "gemma4_text": {"attention_bias": (False,)},
    "glm4": _UNTIED,
    "glm4_moe": _UNTIED | {"scoring_func": ("sigmoid",)},
    "glm4_moe_lite": _UNTIED
    | {
        "partial_rotary_factor": (1.0,),
        "rope_interleave": (True,),
        "scoring_func": ("sigmoid",),
    },
    "glm5_next": {
        "index_kpool_always_select_tail": (True,),  # without it, the first tokens attend to nothing
        "index_kpool_compress": (True,),
        "mhc": (True,),
        "mla_use_nope": (True,),
        "qk_rope_head_dim": (0,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
    },
    # transformers' class has neither biases nor other sums of weights; its indexer scores every
    # entry, without blocks.
    "deepseek_v4": _UNTIED
    | {
        "attention_bias": (False,),
        "index_block": (),
        "index_keep": (),
        "mlp_bias": (False,),
        "n_shared_experts": (1,),
        "norm_topk_prob": (True,),
        "num_key_value_heads": (1,),
        "scoring_func": ("sqrtsoftplus", "sigmoid"),
        "topk_method": ("noaux_tc",),
        "vision_n_layers": (0,),
    },
    "deepseek_v41": _UNTIED
    | {
        "attention_bias": (False,),
        "n_shared_experts": (1,),
        "num_key_value_heads": (1,),
        "scoring_func": ("sqrtsoftplus", "sigmoid", "softmax"),
        "topk_method": ("noaux_tc",),
    },
    "glm_moe_dsa": _UNTIED | {"rope_interleave": (True,), "scoring_func": ("sigmoid",)},
    "gpt2": _TIED | {"scale_attn_by_inverse_layer_idx": (False,), "scale_attn_weights": (True,)},
    "gpt_bigcode": {"multi_query": (True,), "scale_attn_weights": (True,)},
    "gpt_neox": _UNTIED | {"attention_bias": (True,)},
    "glm_ocr": _UNTIED | {"attention_bias": (False,)},
    "gpt_oss": _UNTIED
    | {"attention_bias": (True,), "swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)},
    "gptj": _UNTIED,
    "hunyuan": _TIED,
    "hunyuan_v1_dense": {"num_experts": (1,)},
    "hy_v4": _UNTIED
    | {
        "enable_ihc": (True,),
        "gated_mla": (True,),
        "gating_type": ("elementwise",),
        "indexer_rope_interleave": (True,),
        "learnable_sink": (True,),
        "moe_layer_freq": (1,),
        "rope_interleave": (True,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
    },
    "inkling": _UNTIED
    | {
        "final_logit_softcapping": (),
        "gate_activation": ("sigmoid",),
        "hidden_act": ("silu",),
        "inference_moe_w13_interleaved": (True,),
        "norm_after_topk": (True,),
        "o_bias": (False,),
        "q_bias": (False,),
        "shared_expert_sink": (True,),
        "use_embed_norm": (True,),
        "use_gate_bias": (True,),
        "use_global_scale": (True,),
        "use_sconv": (True,),
    },
    "jina_vlm": _UNTIED
    | {"normalize_input_embeds": (False,), "rope": (True,)}
    | _in_block("", attn_lscale_init=(), ffn_lscale_init=(), postnorm=(False,))
    | _in_block("lnorm_config.", **_RMS)
    | _in_block(
        "attn_config.",
        **dict.fromkeys(("q_bias", "k_bias", "v_bias", "o_bias"), (False,)),
        **dict.fromkeys(("q_lnorm", "k_lnorm", "qkv_lnorm_on_heads"), (True,)),
        **dict.fromkeys(("v_lnorm", "o_lnorm", "inner_lnorm"), (False,)),
        clip_qkv=(),
        sliding_window=(-1,),
        softmax_scale=(),
    )
    | _in_block("attn_config.lnorm_config.", **_RMS)
    | _in_block(
        "ffn_config.",
        activation_type=("silu", "swish"),
        bias=(False,),
        gated_activation=(True,),
        inner_lnorm=(False,),
    ),
    "kimi_k3": {"use_grouped_topk": (True,)},
    "kimi_linear": _UNTIED
    | {
        "attention_bias": (False,),
        "mla_use_nope": (True,),
        "q_lora_rank": (),
        "use_grouped_topk": (True,),
    },
    "kimi_vl": _UNTIED | {"scoring_func": ("sigmoid",)},
    "laguna": {"moe_apply_router_weight_on_input": (False,)},
    "lfm2": _TIED,
    "lfm2_moe": _TIED,
    "lille-130m": _TIED,
    "limite": _TIED
    | {
        "attn_gate_applied": ("per_head_before_o_proj",),
        "lm_head_precision_mode": ("oracle_exact",),
        "mudd_accumulation": ("ordered_left_to_right",),
        "mudd_r_site": ("resid",),
        "pos_mode": ("rope",),
        "qk_norm": ("rms_pre_rope",),
        "rms_norm_eps_mode": ("torch_finfo_default",),
        "rms_norm_has_weight": (False,),
        "rope_cos_sin_dtype": ("bfloat16",),
        "rope_style": ("interleaved_pairs_odd_lane_sign_flip",),
        "ve_applied_before_qk_norm": (True,),
        "ve_head_slice": ("first_num_key_value_heads",),
    },
    "llama4_text": {"attention_bias": (False,)},
    "longcat_flash": _UNTIED | {"attention_method": ("MLA",)},
    "longcat_flash_ngram": _UNTIED | {"attention_method": ("MLA",)},
    "mamba": {"layer_norm_epsilon": (1e-5,)},
    "mellum": {"attention_bias": (False,)},
    "mimo": {"attention_bias": (True,)},
    "mimo_v2_flash": _UNTIED | {"attention_bias": (False,), "scoring_func": ("sigmoid",)},
    "minimax_m3_vl": {
        "attention_output_gate": (False,),
        "n_shared_experts": (1,),
        "qk_norm_type": ("per_head",),
        "scoring_func": ("sigmoid",),
        "swiglu_beta": (1.0,),
        "use_gemma_norm": (True,),
        "use_qk_norm": (True,),
        "use_routing_bias": (True,),
    },
    # mlx-lm's module of this name implements MiniMax-M2.
    "minimax": {
        "linear_attn_alpha_factor": (),
        "scoring_func": ("sigmoid",),
        "shared_intermediate_size": (0,),
        "use_routing_bias": (True,),
    },
    "mimo_v2": _UNTIED | {"attention_bias": (False,), "scoring_func": ("sigmoid",)},
    "mistral_large3": _UNTIED | {"moe_layer_freq": (1,), "scoring_func": ("sigmoid",)},
    "molmo": _UNTIED
    | {
        "attention_layer_norm": (False,),
        "clip_qkv": (),
        "layer_norm_type": ("rms",),
        "moe_num_experts": (),
        "norm_after": (False,),
        "qkv_bias": (True,),
        "rope": (True,),
        "weight_tying": (False,),
    },
    "molmo2": _UNTIED
    | {
        "norm_after": (False,),
        "qk_norm_type": ("qwen3",),
        "rope_scaling_layers": (),
        "use_qk_norm": (True,),
    },
    "moondream3": _UNTIED,
    "minicpm3": _UNTIED | {"mlp_bias": (False,), "rope_traditional": (False,)},
    "ministral3": {"sliding_window": ()},
    "mistral4": {"moe_layer_freq": (1,), "scoring_func": ("softmax",)},
    "muse_glimmer": {"hidden_activation": ("silu",)},
    "nanochat": _UNTIED | {"attention_bias": (False,)},
    "nemotron": {"hidden_act": ("relu2",), "rope_traditional": (False,)},
    # transformers 5 clips steps by time_step_min; the published code and mlx-lm clip them by
    # time_step_limit. Published files set 0.001 and no limit.
    "nemotron_h": _UNTIED
    | {
        "mamba_hidden_act": ("silu",),
        "time_step_limit": ((0.0, math.inf),),
        "time_step_min": (AtMost(0.001),),
        "use_bias": (False,),
    },
    # Files with d_model are of another package, with settings that nobody reads.
    "olmo": {"attention_bias": (False,), "d_model": ()},
    "olmoe": {"clip_qkv": ()},
    "openelm": {"ffn_with_glu": (True,)},
    "phi": _UNTIED | {"qk_layernorm": (False,)},
    "phi3": {"attention_bias": (False,)},
    "phi3small": _TIED,
    "phimoe": _UNTIED
    | {"attention_bias": (True,), "lm_head_bias": (True,), "num_experts_per_tok": (2,)},
    "phixtral": _UNTIED,
    "qwen": _UNTIED
    | {
        "activation": ("swiglu",),
        "apply_residual_connection_post_layernorm": (False,),
        "pos_emb": ("rotary",),
        "rotary_emb_base": (10000,),
        "rotary_pct": (1.0,),
        "scale_attn_weights": (True,),
    },
    "qwen2_moe": _UNTIED
    | {
        "decoder_sparse_step": (1,),
        "mlp_only_layers": ([],),
        "norm_topk_prob": (False,),
        "qkv_bias": (True,),
    },
    "qwen3": {"attention_bias": (False,)},
    "qwen3_5": {
        "attention_bias": (False,),
        "attn_output_gate": (True,),
        "mlp_only_layers": ([],),
        "norm_topk_prob": (True,),
    },
    "qwen3_moe": {"attention_bias": (False,)},
    "recurrent_gemma": {
        "attention_bias": (False,),
        "conv1d_width": (4,),
        "num_key_value_heads": (1,),
        "rope_theta": (10000.0,),
    },
    "solar_open": _UNTIED | {"scoring_func": ("sigmoid",)},
    "stablelm": _UNTIED,
    "starcoder2": {"use_bias": (True,)},
    "step3p5": _UNTIED,
    "step3p7": _UNTIED | {"norm_expert_weight": (True,), "use_head_wise_attn_gate": (True,)},
    "youtu_vl": {
        "moe_layer_freq": (1,),
        "rope_interleave": (True,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
    },
    "xing4_0": _UNTIED | {"rope_interleave": (True,), "scoring_func": ("sigmoid",)},
    "z1t": _UNTIED | {"aft_kind": ("conv",)},
    "zaya1_vl": {
        "activation_func": ("swiglu",),
        "cca": (True,),
        "clamp_temp": (False,),
        "gated_linear_unit": (True,),
        "lora_rank": (0,),
        "normalization": ("RMSNorm",),
        "sliding_window": (),
        "swa_layers": (),
        "swa_rotary_base": (),
        "use_lora_att": (False,),
    },
}
#: By module and key, values that the module computes differently from transformers' class; None
#: is null.
NOT_COMPUTED: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "afmoe": {"num_experts_per_tok": (1,)},  # does not normalize a single expert's weight
    "gemma2": {"attn_logit_softcapping": (None,), "final_logit_softcapping": (None,)},
    "glm5_next": {"num_experts_per_tok": (1,)},  # as afmoe
    "hy_v4": {"num_experts_per_tok": (1,)},  # as afmoe
}
#: Supported values for all modules.
EVERYWHERE: Mapping[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "tie_encoder_decoder": (False,),
    "use_mrope": (False,),
    # "vision": between the tokens of an image.
    "use_bidirectional_attention": (False, "vision"),
}


def keys(module: str) -> set[str]:
    """Returns the keys that `check` examines."""
    return {*EVERYWHERE, *FIXED.get(module, ())}


def check(config: Mapping[str, Any], module: str) -> None:
    """Raises ModelLoadError if a setting has another value than the module assumes."""
    for key, computed in {**EVERYWHERE, **FIXED.get(module, {})}.items():
        value = config.get(key, rope(config).get(key) if key in OF_THEIR_OWN else None)
        null_is_no = key in config and computed == (True,)
        if value is None and not null_is_no:
            continue
        if any(_same(value, each) for each in computed):
            continue
        served = " or ".join(map(repr, computed))
        raise ModelLoadError(
            f"config.json sets {key}={value!r}, but mlx-lm's module {module!r} "
            + (f"supports only {served}" if served else "has no such parameter")
            + ". Choose another checkpoint"
        )
    for key, lacking in NOT_COMPUTED.get(module, {}).items():
        if key in config and config[key] in lacking:
            raise ModelLoadError(
                f"config.json sets {key}={config[key]!r}, which mlx-lm's module {module!r} "
                "does not support. Choose another checkpoint"
            )


def _same(value: Any, other: Any) -> bool:
    """Compares values; lists equal tuples, and infinity equals any value beyond float32."""
    if isinstance(other, AtMost):
        return bool(value <= other.bound)
    if isinstance(value, list) and isinstance(other, tuple):
        return len(value) == len(other) and all(map(_same, value, other))
    if other == math.inf and isinstance(value, float):
        return value > _LARGEST_FLOAT32
    return bool(value == other)
