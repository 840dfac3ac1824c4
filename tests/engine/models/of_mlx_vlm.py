# SPDX-License-Identifier: Apache-2.0
"""Small text models of the families that only mlx-vlm has, by `model_type`."""

from typing import Any

import mlx.core as mx
from engine.models.nested import EXPERTS, HEAD, LAYERS, ODD
from engine.models.recurrent import VOCAB, Family

Arrays = dict[str, mx.array]

_ROUTED = {
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "routed_scaling_factor": 1.7,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "n_group": 3,
    "topk_group": 2,
}
_LATENTS = {
    "num_key_value_heads": 6,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 20,
}


def _family(model_type: str, architecture: str, **config: Any) -> Family:
    return Family(model_type, architecture, ODD | config)


#: Text of GLM-5.3 as published: states beside latents without RoPE, of which groups are chosen.
GLM5: dict[str, Any] = (
    ODD
    | _LATENTS
    | _ROUTED
    | {
        "model_type": "glm5_next_text",
        "hc_mult": 3,
        "index_head_dim": 12,
        "index_kpool": 3,
        "index_kpool_always_select_tail": True,
        "index_kpool_compress": True,
        "index_n_heads": 16,
        "index_topk": 9,
        "indexer_rope_interleave": True,
        "indexer_types": ["full", "full", "shared", "full"],
        "layer_types": [
            "linear_attention",
            *["deepseek_sparse_attention"] * 2,
            "linear_attention",
        ],
        "linear_attn_config": {
            "full_attn_layers": [1, 2],
            "gate_lower_bound": -5.0,
            "head_dim": 8,
            "kda_layers": [0, 3],
            "num_heads": 4,
            "short_conv_kernel_size": 4,
        },
        "mhc": True,
        "mla_use_nope": True,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "moe_router_dtype": "float32",
        "num_nextn_predict_layers": 1,
        "qk_head_dim": 16,
        "qk_rope_head_dim": 0,
        "scoring_func": "sigmoid",
        "swiglu_limit": 1.2,
        "tie_word_embeddings": False,
        "topk_method": "noaux_tc",
        "vocab_size": VOCAB,
    }
)
#: Inkling's layers: windows of 4 x 16 and global layers of 2 x 16 numbers of K a token, and scores
#: that grow amid the prompts.
INKLING: dict[str, Any] = {
    "hidden_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 16,
    "layer_types": ["hybrid_sliding", "hybrid", "hybrid", "hybrid_sliding"],
    "d_rel": 6,
    "log_scaling_n_floor": 20,
    "log_scaling_alpha": 0.5,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "route_scale": 1.7,
    "logits_mup_width_multiplier": 0.7,
}


#: Qwen4-Exp's text as published: states beside layers that choose groups, tables of n-grams in two
#: of the former, and streams of hyper-connections.
QWEN4: dict[str, Any] = (
    {key: size for key, size in ODD.items() if key != "intermediate_size"}
    | HEAD
    | {
        "model_type": "qwen4_exp_text",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "eos_token_id": 2,
        "full_attention_interval": 2,
        "hc_count": 3,
        "hc_lowrank": 20,
        "heads_per_ngram": 3,
        "hidden_act": "silu",
        "indexer_budget": 12,
        "indexer_compress_ratio": 3,
        "indexer_head_dim": 24,
        "indexer_kv_heads": 1,
        "indexer_n_heads": 16,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_value_head_dim": 12,
        "make_ngram_vocab_size_divisible_by": 8,
        "moe_intermediate_size": 40,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "ngram_size": 3,
        "ngram_vocab_size_base": 50,
        "norm_topk_prob": True,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "output_gate_type": "sigmoid",
        "output_router_logits": False,
        "ple_conv_kernel_size": 3,
        "ple_embed_dim": 24,
        "ple_layer_ids": [1, 3],
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [1, 1, 2],
            "partial_rotary_factor": 0.5,
            "rope_theta": 700.0,
            "rope_type": "default",
        },
        "router_aux_loss_coef": 0.001,
        "seed": 1234,
        "shared_expert_intermediate_size": 48,
        "split_ngram_parts": 4,
        "tie_word_embeddings": False,
    }
)


def _inkling(model_type: str) -> Family:
    # The MLP widths have the names in Inkling's own files.
    text = INKLING | {
        "model_type": "inkling_text",
        "sliding_window_size": 7,
        "rel_extent": 19,
        "dense_intermediate_size": 56,
        "intermediate_size": 24,
        "unpadded_vocab_size": 61,
    }
    return Family(model_type, "InklingForConditionalGeneration", {"text_config": text})


_RMS = {"bias": False, "eps": 1e-3, "type": "rms", "with_affine": True}
#: Jina VLM's text model as published.
JINA: dict[str, Any] = {
    "model_type": "jvlm",
    "additional_vocab_size": 128,
    "block_config": {
        "attn_config": {
            "clip_qkv": None,
            "dropout": 0.0,
            "fp32": False,
            "head_dim": 16,
            "inner_lnorm": False,
            **{f"{kind}_bias": False for kind in "qkvo"},
            **{f"{kind}_lnorm": kind in "qk" for kind in "qkvo"},
            "lnorm_config": _RMS,
            "n_heads": 6,
            "n_kv_heads": 2,
            "qkv_lnorm_on_heads": True,
            "sliding_window": -1,
            "softmax_scale": None,
        },
        "attn_lscale_init": None,
        "ffn_config": {
            "activation_type": "silu",
            "bias": False,
            "gated_activation": True,
            "inner_lnorm": False,
            "lnorm_config": {"bias": None, "eps": None, "type": "default", "with_affine": True},
            "ratio": 4,
            "size": 88,
        },
        "ffn_lscale_init": None,
        "lnorm_config": _RMS,
        "postnorm": False,
        "residual_dropout": 0.0,
        "residual_path_dropout": 0.0,
        "residual_response_dropout": 0.1,
    },
    "embedding_dropout": 0.0,
    "embedding_size": VOCAB - 2,
    "hidden_size": 72,
    "max_position_embeddings": None,
    "max_sequence_length": 4096,
    "n_layers": 4,
    "normalize_input_embeds": False,
    "num_hidden_layers": 4,
    "partial_rotary_factor": 1.0,
    "rope": True,
    "rope_scaling": None,
    "rope_theta": 700.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "vocab_size": VOCAB - 2,
}

#: DeepSeek V4's keys, as published.
V4: dict[str, Any] = {
    "hidden_size": 72,
    "moe_intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 48,
    "o_groups": 3,
    "o_lora_rank": 10,
    "n_routed_experts": 5,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "num_hash_layers": 1,
    "num_nextn_predict_layers": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.7,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "hidden_act": "silu",
    "swiglu_limit": 1.2,
    "compress_ratios": [0, 4, 128, 4],
    "compress_rope_theta": 900.0,
    "rope_theta": 700.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 256,
    "sliding_window": 12,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 6,
    "hc_mult": 3,
    "hc_eps": 1e-3,
    "hc_sinkhorn_iters": 20,
    "rms_norm_eps": 1e-3,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "vocab_size": VOCAB,
}
FAMILIES = {
    family.module: family
    for family in (
        # First a dense layer; layers without windows have no RoPE.
        _family(
            "cohere2_moe",
            "Cohere2MoeForCausalLM",
            **HEAD,
            num_experts=5,
            num_experts_per_tok=2,
            num_shared_experts=2,
            expert_selection_fn="sigmoid",
            shared_expert_combination_strategy="average",
            first_k_dense_replace=1,
            prefix_dense_intermediate_size=56,
            logit_scale=0.25,
            sliding_window=7,
            layer_types=LAYERS,
            attention_bias=True,
        ),
        Family(
            "cohere_compass",
            "CohereCompassForConditionalGeneration",
            {
                "text_config": ODD
                | {
                    "model_type": "cohere_compass_text",
                    "head_dim": 12,
                    "layer_types": LAYERS,
                    "sliding_window": 7,
                    "logit_scale": 0.25,
                    "rope_parameters": {
                        "full_attention": None,
                        "sliding_attention": {
                            "rope_type": "default",
                            "rope_theta": 700.0,
                            "mrope_section": [2, 2, 2],
                        },
                    },
                },
                "vision_config": {"model_type": "cohere_compass_vision", "depth": 1},
                "tie_word_embeddings": False,
            },
        ),
        # Pairs of elements for text and images.
        _family(
            "ernie4_5_moe_vl",
            "Ernie4_5_VLMoeForConditionalGeneration",
            moe_num_experts=[5, 5],
            moe_intermediate_size=[40, 24],
            moe_k=2,
            moe_num_shared_experts=1,
            moe_layer_start_index=[1, 1],
            moe_layer_end_index=[2, 3],
            rope_theta=700.0,
            rope_scaling={"type": "default", "mrope_section": [2, 2, 2]},
            vision_config={"model_type": "DFNRope_vision_transformer"},
        ),
        Family(
            "ernie4_5_vl_moe",
            "Ernie4_5_VLMoeForConditionalGeneration",
            {
                "text_config": ODD
                | {
                    "model_type": "ernie4_5_vl_moe_text",
                    "moe_num_experts": 5,
                    "moe_intermediate_size": [40, 24],
                    "moe_k": 2,
                    "moe_num_shared_experts": 1,
                    "moe_layer_start_index": 1,
                    "moe_layer_end_index": 3,
                    "mrope_section": [2, 2, 2],
                },
                "vision_config": {"model_type": "ernie4_5_vl_moe_vision"},
            },
        ),
        # Half of each head is rotated; with sinks.
        _family(
            "falcon_ocr",
            "FalconOCRForCausalLM",
            head_dim=16,
            tie_word_embeddings=False,
            rope_theta=700.0,
        ),
        # Sinks, and layers without RoPE.
        _family(
            "flint",
            "FlintForCausalLM",
            **HEAD,
            **EXPERTS,
            shared_expert_intermediate_size=40,
            mlp_only_layers=[0],
            no_rope_layer_indices=[1],
            layer_types=LAYERS,
            sliding_window=7,
        ),
        Family(
            "glm_ocr",
            "GlmOcrForConditionalGeneration",
            {
                "text_config": ODD
                | HEAD
                | {
                    "model_type": "glm_ocr_text",
                    "attention_bias": False,
                    "hidden_act": "silu",
                    "num_nextn_predict_layers": 1,
                    "rope_parameters": {
                        "rope_type": "default",
                        "rope_theta": 700.0,
                        "partial_rotary_factor": 0.5,
                        "mrope_section": [1, 1, 2],
                    },
                },
                "vision_config": {"model_type": "glm_ocr_vision", "depth": 2},
            },
        ),
        # The same layers in several cycles, each with its own K and V.
        _family(
            "hrm_text",
            "HrmTextForCausalLM",
            **HEAD,
            num_hidden_layers=12,
            num_layers_per_stack=2,
            H_cycles=2,
            L_cycles=2,
            prefix_lm=False,
            embedding_scale=3.0,
        ),
        # A window alone, and beside entries of 4 positions, chosen ones, and of 128.
        Family("deepseek_v4", "DeepseekV4ForCausalLM", V4),
        # Latents of positions that an indexer chooses, sinks, and streams of hyper-connections.
        _family(
            "hy_v4",
            "HYV4ForCausalLM",
            **_LATENTS,
            **{key: value for key, value in _ROUTED.items() if key != "first_k_dense_replace"},
            index_n_heads=16,
            index_head_dim=16,
            index_topk=8,
            indexer_types=["full", "shared", "full", "shared"],
            mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
            hc_mult=3,
            swiglu_limit=0.3,
            rope_theta=700.0,
        ),
        Family(
            "glm5_next",
            "Glm5NextForConditionalGeneration",
            {"text_config": GLM5, "vision_config": {"model_type": "glm5_next_vision"}},
        ),
        Family("glm5_next_text", "Glm5NextForCausalLM", GLM5),
        # Two of the tokens are added to the embedding's. Sizes are in nested blocks.
        Family(
            "jvlm",
            "JinaVLMForConditionalGeneration",
            {
                "text_config": ODD | HEAD | JINA | {"rms_norm_eps": 1e-3},
                "vision_config": {"model_type": "jvlm"},
            },
        ),
        _family("k2_horizon", "K2HorizonForCausalLM", **HEAD, attention_bias=True),
        _family(
            "kolibri1",
            "Kolibri1ForCausalLM",
            **HEAD,
            **EXPERTS,
            shared_expert_intermediate_size=40,
            layer_types=LAYERS,
            sliding_window=7,
        ),
        # Windows without the query's own position; value embeddings; mixtures of earlier layers.
        _family(
            "limite",
            "LimiteForCausalLM",
            **HEAD,
            hidden_size=96,
            tie_word_embeddings=True,
            ve_layers=[0, 2],
            ve_dim=8,
            xsa_layers=[1, 3],
            global_layers=[1],
            sliding_window=7,
            rope_n_pairs=4,
            attn_gate_channels=8,
            mudd_inter=8,
            mudd_layers=[2],
            mudd_tap_idx={"2": [0, 1, 2]},
            softcap_logits={"kind": "sigmoid", "a": 20.0, "b": 1.0, "c": 5.0},
        ),
        _family(
            "mimo_v2",
            "MiMoV2ForCausalLM",
            **HEAD,
            v_head_dim=12,
            swa_head_dim=16,
            swa_v_head_dim=12,
            swa_num_attention_heads=4,
            swa_num_key_value_heads=1,
            partial_rotary_factor=0.5,
            sliding_window_size=7,
            hybrid_layer_pattern=[1, 0, 0, 1],
            moe_layer_freq=[0, 1, 1, 1],
            moe_intermediate_size=40,
            n_routed_experts=6,
            num_experts_per_tok=2,
            n_group=3,
            topk_group=2,
            vision_config={"model_type": "mimovl"},
            audio_config={},
        ),
        Family(
            "mistral_large3",
            "MistralLarge3ForCausalLM",
            {
                "vocab_size": VOCAB,
                "text_config": ODD
                | _LATENTS
                | _ROUTED
                | {"model_type": "mistral_large3", "rms_norm_eps": 1e-3},
                "vision_config": {"model_type": "pixtral"},
            },
        ),
        Family(
            "mllama",
            "MllamaForConditionalGeneration",
            {
                "text_config": ODD
                | {
                    "model_type": "mllama_text_model",
                    "num_hidden_layers": 5,
                    "cross_attention_layers": [0, 3],
                    "rope_scaling": {
                        "rope_type": "llama3",
                        "factor": 4.0,
                        "low_freq_factor": 1.0,
                        "high_freq_factor": 4.0,
                        "original_max_position_embeddings": 64,
                    },
                },
                "vision_config": {"model_type": "mllama_vision_model", "hidden_size": 16},
            },
        ),
        # Adds two tokens' embeddings.
        Family(
            "molmo",
            "MolmoForCausalLM",
            {
                "text_config": ODD
                | {
                    "model_type": "molmo",
                    "d_model": 72,
                    "n_layers": 4,
                    "n_heads": 6,
                    "n_kv_heads": 2,
                    "mlp_hidden_size": 88,
                    "vocab_size": VOCAB,
                    "embedding_size": VOCAB - 2,
                    "additional_vocab_size": 128,
                    "layer_norm_eps": 1e-3,
                    "rope_theta": 700.0,
                    "tie_word_embeddings": False,
                },
            },
        ),
        Family(
            "molmo2",
            "Molmo2ForConditionalGeneration",
            {
                "text_config": ODD
                | HEAD
                | {
                    "model_type": "molmo2_text",
                    "layer_norm_eps": 1e-3,
                    "additional_vocab_size": 128,
                    "hidden_act": "silu",
                    "qkv_bias": True,
                    "qk_norm_type": "qwen3",
                    "use_qk_norm": True,
                    "norm_after": False,
                    "rope_scaling": None,
                    "rope_scaling_layers": None,
                },
                "vit_config": {"model_type": "molmo2"},
                "adapter_config": {"model_type": "molmo2"},
                "image_patch_id": 50,
            },
        ),
        # Queries and values are scaled by content and position; half of each head is rotated.
        Family(
            "moondream3",
            "Moondream3ForCausalLM",
            {
                "text_config": {
                    "hidden_size": 96,
                    "intermediate_size": 88,
                    "num_hidden_layers": 3,
                    "vocab_size": VOCAB,
                    "num_attention_heads": 6,
                    "num_key_value_heads": 6,
                    "head_dim": 16,
                    "rope_theta": 700.0,
                    "rope_dim": 8,
                    "rms_norm_eps": 1e-3,
                    "num_experts": 5,
                    "num_experts_per_tok": 2,
                    "moe_intermediate_size": 40,
                    "moe_start_layer": 1,
                },
                "vision_config": {"model_type": "moondream3_vision"},
            },
        ),
        Family(
            "qwen4_exp",
            "Qwen4ExpForConditionalGeneration",
            {"text_config": QWEN4, "vision_config": {"model_type": "qwen4_exp"}},
        ),
        Family("qwen4_exp_text", "Qwen4ExpForCausalLM", QWEN4),
        Family(
            "step3p7",
            "Step3p7ForConditionalGeneration",
            {
                "vocab_size": VOCAB,
                "text_config": {key: n for key, n in ODD.items() if key != "num_key_value_heads"}
                | HEAD
                | {
                    "model_type": "step3p5",
                    "num_attention_groups": 2,
                    "sliding_window": 7,
                    "layer_types": LAYERS,
                    "partial_rotary_factors": [1.0, 0.5, 0.5, 1.0],
                    "use_head_wise_attn_gate": True,
                    "attention_other_setting": {
                        "num_attention_heads": 4,
                        "num_attention_groups": 1,
                    },
                    "moe_num_experts": 5,
                    "moe_top_k": 2,
                    "moe_intermediate_size": 40,
                    "share_expert_dim": 40,
                    "moe_layers_enum": "1,3",
                    "moe_router_scaling_factor": 1.7,
                    "swiglu_limits": [0.0, 0.5, 0.0, 0.5],
                    "swiglu_limits_shared": [0.0, 0.5, 0.0, 0.5],
                },
                "vision_config": {"model_type": "perception_encoder"},
            },
        ),
        # Latents, and streams mixed by hyper-connections.
        _family("xing4_0", "Xing4ForCausalLM", **_LATENTS, **_ROUTED, hc_mult=2),
        _family(
            "youtu_vl",
            "YoutuVLForConditionalGeneration",
            **_LATENTS,
            rope_theta=700.0,
            rope_interleave=True,
            attention_bias=True,
            mlp_bias=True,
            vision_config={"model_type": "siglip2_vision_model"},
        ),
        # Sums over all tokens instead of attention, positions in a table, linear layers with few
        # inputs.
        Family(
            "z1t",
            "Z1TForCausalLM",
            {
                "num_hidden_layers": 3,
                "hidden_size": 96,
                "aft_heads": 4,
                "mlp_fan_in": 32,
                "max_position_embeddings": 37,
                "tanh_linear": True,
                "tanh_mlp": True,
            },
        ),
        # Convolutions of queries and keys, values of the previous token, and a skipping expert.
        Family(
            "zaya1_vl",
            "Zaya1VLForConditionalGeneration",
            {
                "hidden_size": 72,
                "num_hidden_layers": 3,
                "num_attention_heads": 6,
                "num_key_value_heads": 2,
                "num_query_groups": 2,
                "intermediate_size": None,  # only the vision tower has it
                "head_dim": 16,
                "ffn_hidden_size": 80,
                "num_experts": 3,
                "zaya_mlp_expansion": 24,
                "rope_theta": 700.0,
                "norm_epsilon": 1e-3,
                "tie_word_embeddings": True,
                "vision_lora_rank_attn": 2,
                "vision_lora_rank_mlp": 2,
                "vision_config": {"model_type": "qwen2_5_vl"},
            },
        ),
        _inkling("inkling"),
        _inkling("inkling_mm_model"),
        _inkling("inkling_text"),
    )
}
#: Published config.json keys that differ from the small model's.
AS_PUBLISHED: dict[str, dict[str, Any]] = {
    "hy_v4": ODD
    | _LATENTS
    | _ROUTED
    | {
        "model_type": "hy_v4",
        "architectures": ["HYV4ForCausalLM"],
        "enable_ihc": True,
        "enable_lm_head_fp32": True,
        "first_k_dense_replace": None,
        "gated_mla": True,
        "gating_type": "elementwise",
        "hc_eps": 1e-6,
        "hc_magnitude": 2.0,
        "hc_mult": 3,
        "head_dim": 8,
        "hidden_act": "silu",
        "index_head_dim": 16,
        "index_n_heads": 16,
        "index_topk": 8,
        "indexer_types": ["full", "shared", "full", "shared"],
        "layer_types": ["deepseek_sparse_attention"] * 4,
        "learnable_sink": True,
        "learnable_sink_init": 0.0,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "mtp_loss_factor": 0.1,
        "num_key_value_heads": 6,
        "num_local_experts": 6,
        "num_nextn_predict_layers": 1,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 700.0},
        "swiglu_limit": 0.3,
        "tie_word_embeddings": False,
        "vocab_size": VOCAB,
    },
    "falcon_ocr": {
        "model_type": "falcon_ocr",
        "architectures": ["FalconOCRForCausalLM"],
        "torch_dtype": "float32",
        "dim": 72,
        "n_layers": 4,
        "n_heads": 6,
        "head_dim": 16,
        "n_kv_heads": 2,
        "vocab_size": VOCAB,
        "ffn_dim": 88,
        "norm_eps": 1e-5,
        "max_seq_len": 4096,
        "rope_theta": 700,
        "channel_size": 3,
        "spatial_patch_size": 16,
        "temporal_patch_size": 1,
        "eos_id": 11,
        "img_id": 27,
        "image_cls_token_id": 44,
        "image_reg_1_token_id": 45,
        "image_reg_2_token_id": 46,
        "image_reg_3_token_id": 47,
        "image_reg_4_token_id": 48,
        "img_end_id": 30,
    },
    "jvlm": {
        "model_type": "jvlm",
        "architectures": ["JinaVLMForConditionalGeneration"],
        "auto_map": {"AutoConfig": "configuration_jvlm.JinaVLMConfig"},
        "bos_token_id": 1,
        "image_token_index": 50,
        "text_config": JINA,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "vision_config": {"model_type": "jvlm", "n_layers": 2, "output_size": 72},
    },
    "limite": ODD
    | FAMILIES["limite"].config
    | {
        "model_type": "limite",
        "architectures": ["LimiteForCausalLM"],
        "attention_softmax_scale": 0.1,
        "attn_gate_applied": "per_head_before_o_proj",
        "checkpoint_step": 7,
        "final_softcap": 0.0,
        "global_every": 4,
        "global_window": -1,
        "lm_head_precision_mode": "oracle_exact",
        "mlp_formula": "(silu(gate_proj(h)) * up_proj(h)) @ down_proj",
        "mlp_ratio": 4,
        "mudd": True,
        "mudd_accumulation": "ordered_left_to_right",
        "mudd_at": [2],
        "mudd_r_site": "resid",
        "padded_vocab_size": VOCAB,
        "pos_mode": "rope",
        "qk_norm": "rms_pre_rope",
        "rms_norm_eps_mode": "torch_finfo_default",
        "rms_norm_has_weight": False,
        "rope_base_global": 1024.0,
        "rope_cos_sin_dtype": "bfloat16",
        "rope_frac": 0.5,
        "rope_style": "interleaved_pairs_odd_lane_sign_flip",
        "sliding_window_convention": "k >= q - sliding_window",
        "source_format": "torch",
        "tokenizer_vocab_size": VOCAB,
        "torch_dtype": "float32",
        "ve_applied_before_qk_norm": True,
        "ve_head_slice": "first_num_key_value_heads",
        "vocab_size": VOCAB,
    },
    "molmo": ODD
    | {
        "model_type": "molmo",
        "architectures": ["MolmoForCausalLM"],
        "attention_layer_norm": False,
        "clip_qkv": None,
        "embedding_size": VOCAB - 2,
        "initializer_range": 0.02,
        "layer_norm_eps": 1e-3,
        "layer_norm_type": "rms",
        "max_position_embeddings": 4096,
        "norm_after": False,
        "qkv_bias": True,
        "rope_theta": 700.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "use_cache": True,
        "use_position_ids": True,
        "vocab_size": VOCAB,
        "weight_tying": False,
    },
    "zaya1_vl": FAMILIES["zaya1_vl"].config
    | {
        "model_type": "zaya1_vl",
        "architectures": ["Zaya1VLForConditionalGeneration"],
        "activation_func": "swiglu",
        "activation_func_fp8_input_store": False,
        "add_bias_linear": False,
        "apply_rope_fusion": True,
        "attention_bias": False,
        "bias_activation_fusion": True,
        "cca": True,
        "cca_time0": 2,
        "cca_time1": 2,
        "clamp_temp": False,
        "fused_add_norm": False,
        "gated_linear_unit": True,
        "image_token_id": 50,
        "lm_head_bias": False,
        "lora_rank": 0,
        "max_position_embeddings": 4096,
        "moe_router_topk": 1,
        "normalization": "RMSNorm",
        "partial_rotary_factor": 0.5,
        "projector_hidden_act": "gelu",
        "residual_in_fp32": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 700.0,
            "partial_rotary_factor": 0.5,
        },
        "scale_residual_merge": True,
        "sliding_window": None,
        "swa_layers": None,
        "torch_dtype": "float32",
        "use_lora_att": False,
        "vision_lora": True,
        "vocab_size": VOCAB,
        "zaya_high_prec": True,
        "zaya_use_eda": True,
        "zaya_use_mod": True,
    },
    "youtu_vl": ODD
    | _LATENTS
    | {
        "model_type": "youtu_vl",
        "architectures": ["YoutuVLForConditionalGeneration"],
        "attention_bias": True,
        "mlp_bias": True,
        "qk_head_dim": 24,
        "rms_norm_eps": 1e-5,
        "rope_interleave": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 700.0},
        "tie_word_embeddings": False,
        "vocab_size": VOCAB,
        "vision_config": {"model_type": "siglip2_vision_model"},
    },
}


def _falcon_ocr(arrays: Arrays) -> Arrays:
    found = {}
    for name, array in arrays.items():
        for ours, published in (
            ("language_model.", ""),
            ("model.", ""),
            ("embed_tokens.", "tok_embeddings."),
            ("lm_head.", "output."),
            (".self_attn.", ".attention."),
            (".mlp.", ".feed_forward."),
        ):
            name = name.replace(ours, published, 1)
        if ".w13." in name:  # gate and up alternate
            array = mx.stack(mx.split(array, 2), axis=1).reshape(array.shape)
        found[name] = array
    return found


def _zaya1_vl(arrays: Arrays) -> Arrays:
    found = {}
    for name, array in arrays.items():
        name = name.removeprefix("language_model.")
        if "conv_qk" in name and array.ndim == 3:
            array = array.swapaxes(1, 2)
        path, experts, rest = name.partition(".experts.")
        if not experts:
            found[name] = array
            continue
        for number, of_expert in enumerate(array):
            found[f"{path}.experts.local_experts.{number}.{rest}"] = of_expert
    return found


def _jvlm(arrays: Arrays) -> Arrays:
    found = {"model.vision_model.patch_embed.proj.bias": mx.zeros(3)}
    for name, array in arrays.items():
        name = name.removeprefix("language_model.").replace(".qkv.", ".qkv_w.", 1)
        name = name.replace("_norm.", "_lnorm.").replace(".gate_up.", ".up.")
        found[name.replace("model.", "model.language_model.", 1)] = array
        if ".qkv_w." in name:
            path = name.replace("model.", "model.language_model.", 1).partition("qkv_w")[0]
            found |= {f"{path}{kind}_b": mx.zeros(96 if kind == "q" else 32) for kind in "qkv"}
    return found


def _z1t(arrays: Arrays) -> Arrays:
    names = {"model.pe": "pe.pe", "model.layers.": "blocks.", "model.norm.": "norm."}
    names |= {"model.embed_tokens.": "embedding.", "lm_head.": "clf."}
    found = {}
    for name, array in arrays.items():
        name = name.removeprefix("language_model.")
        start = next(each for each in names if name.startswith(each))
        found[names[start] + name.removeprefix(start)] = array
    return found


def _moondream3(arrays: Arrays) -> Arrays:
    named = {f"model.text.{name.split('.', 1)[1]}": array for name, array in arrays.items()}
    named = {name.replace("text.model.", "text."): array for name, array in named.items()}
    named["model.text.wte"] = named.pop("model.text.wte.weight")
    towers = ("model.region.coord_decoder.weight", "model.vision.pos_emb")
    return named | {name: mx.zeros((2, 3)) for name in towers}


#: By model_type: converts the small model's arrays to those of a published file.
PUBLISHED_NAMES = {
    "falcon_ocr": _falcon_ocr,
    "jvlm": _jvlm,
    "limite": lambda arrays: {
        name.removeprefix("language_model."): array for name, array in arrays.items()
    },
    "moondream3": _moondream3,
    "z1t": _z1t,
    "zaya1_vl": _zaya1_vl,
}
