# SPDX-License-Identifier: Apache-2.0
"""Small models of mlx-lm's modules for which transformers has no class, or not of such files.

Their shapes are odd: three query heads a K/V head, heads wider than hidden size / heads, a share of
each head rotated, multipliers that are not 1, biases, layers in no repeating pattern.
"""

from models.recurrent import Family

_ODD = {
    "hidden_size": 72,
    "intermediate_size": 88,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
_HEAD = {"head_dim": 16}
_BIASES = {"attention_bias": True, "mlp_bias": True}
_LAYERS = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
_EXPERTS = {
    "num_experts": 5,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "norm_topk_prob": True,
}
_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {
        "rope_type": "default",
        "rope_theta": 5000.0,
        "partial_rotary_factor": 0.5,
    },
}


def _family(module: str, architecture: str, **config) -> Family:
    return Family(module, architecture, _ODD | config)


FAMILIES = {
    family.module: family
    for family in (
        _family(
            "Klear",
            "KlearMoeForCausalLM",
            **_EXPERTS,
            attention_bias=True,
            mlp_only_layers=[1],
            decoder_sparse_step=1,
            n_shared_experts=1,
        ),
        # The last two layers read the K and V of the one before them.
        _family(
            "afm7",
            "AFMForCausalLM",
            hidden_dim=72,
            num_layers=5,
            num_kv_reuse_layers=2,
            num_heads=6,
            num_kv_heads=2,
            rope_theta=700.0,
        ),
        _family(
            "bailing_moe",
            "BailingMoeForCausalLM",
            **(_EXPERTS | {"num_experts": 6}),
            num_shared_experts=1,
            first_k_dense_replace=1,
            use_bias=True,
            use_qkv_bias=True,
            norm_head=True,
            use_qk_norm=True,
            partial_rotary_factor=0.5,
            moe_router_enable_expert_bias=True,
            routed_scaling_factor=1.7,
            score_function="sigmoid",
            n_group=3,
            topk_group=2,
        ),
        _family(
            "deepseek",
            "DeepseekForCausalLM",
            **_EXPERTS,
            n_shared_experts=1,
            n_routed_experts=5,
            moe_layer_freq=1,
            first_k_dense_replace=1,
            attention_bias=True,
            rope_scaling={"type": "linear", "factor": 3.0},
        ),
        _family(
            "exaone",
            "ExaoneForCausalLM",
            **_BIASES,
            num_layers=4,
            layer_norm_epsilon=1e-5,
        ),
        _family(
            "hunyuan",
            "HunYuanMoEV1ForCausalLM",
            attention_bias=True,
            moe_topk=2,
            num_experts=5,
            num_shared_expert=1,
            use_mixed_mlp_moe=True,
            use_qk_norm=True,
            use_cla=True,
            cla_share_factor=2,
            moe_intermediate_size=40,
            rope_scaling={"type": "dynamic", "factor": 1.0, "alpha": 50.0},
        ),
        _family(
            "internlm2",
            "InternLM2ForCausalLM",
            bias=True,
            rope_scaling={"type": "dynamic", "factor": 2.0},
        ),
        _family(
            "internlm3",
            "InternLM3ForCausalLM",
            bias=True,
            qkv_bias=True,
            rope_scaling={"rope_type": "dynamic", "factor": 2.0},
        ),
        # All layers twice: over the whole text, and over a window as well.
        _family(
            "iquestloopcoder",
            "IQuestLoopCoderForCausalLM",
            **_HEAD,
            **_BIASES,
            loop_num=2,
            loop_window_size=7,
        ),
        _family(
            "lille-130m",
            "LilleForCausalLM",
            block_size=512,
            layer_norm_eps=1e-5,
            n_embd=72,
            n_head=6,
            n_kv_heads=2,
            n_layer=4,
        ),
        _family("mimo", "MiMoForCausalLM"),
        _family(
            "minicpm",
            "MiniCPMForCausalLM",
            dim_model_base=48,
            scale_depth=1.7,
            scale_emb=3.0,
        ),
        _family(
            "muse_glimmer",
            "MuseGlimmerForCausalLM",
            **_HEAD,
            sliding_window=7,
            layer_types=_LAYERS,
            qk_scale_factor=1.7,
            output_multiplier=0.7,
            final_logit_softcapping=5.0,
        ),
        _family("nanbeige", "NanbeigeForCausalLM", **_HEAD, **_BIASES, num_loops=2),
        _family(
            "nemotron-nas",
            "DeciLMForCausalLM",
            **_BIASES,
            block_configs=[
                {"attention": {"n_heads_in_group": 3}, "ffn": {"ffn_mult": 1.3}},
                {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.3}},
                {"attention": {"n_heads_in_group": 2}, "ffn": {"no_op": True}},
                {"attention": {"n_heads_in_group": 6}, "ffn": {"replace_with_linear": True}},
            ],
        ),
        _family(
            "openelm",
            "OpenELMForCausalLM",
            head_dim=16,
            num_transformer_layers=4,
            model_dim=72,
            ffn_dim_divisor=8,
            num_query_heads=[3, 6, 6, 4],
            num_kv_heads=[1, 2, 1, 2],
            ffn_multipliers=[1.0, 2.0, 0.5, 1.5],
        ),
        _family(
            "phixtral",
            "PhiForCausalLM",
            num_vocab=64,
            model_dim=72,
            num_heads=6,
            num_layers=4,
            rotary_dim=6,
            num_experts_per_tok=2,
            num_local_experts=5,
        ),
        _family("plamo", "PlamoForCausalLM", n_shared_head=3),
        _family(
            "plamo3",
            "Plamo3ForCausalLM",
            **_HEAD,
            window_size=7,
            sliding_window_pattern=3,
            rope_local_theta=100.0,
        ),
        _family(
            "qwen",
            "QWenLMHeadModel",
            kv_channels=12,
            intermediate_size=176,
            layer_norm_epsilon=1e-5,
            no_bias=False,
        ),
        _family(
            "spark2_5",
            "Spark2_5ForCausalLM",
            **_HEAD,
            **_BIASES,
            sliding_window=7,
            layer_types=_LAYERS,
            rope_parameters=_ROPES,
            hidden_act="gelu",
        ),
        _family(
            "step3p5",
            "Step3p5ForCausalLM",
            **_HEAD,
            num_attention_groups=2,
            sliding_window=7,
            layer_types=_LAYERS,
            partial_rotary_factors=[1.0, 0.5, 0.5, 1.0],
            attention_other_setting={"num_attention_heads": 4, "num_attention_groups": 1},
            moe_num_experts=5,
            moe_top_k=2,
            moe_intermediate_size=40,
            share_expert_dim=40,
            moe_layers_enum="1,3",
            moe_router_scaling_factor=1.7,
            swiglu_limits=[0.0, 0.5, 0.0, 0.5],
            swiglu_limits_shared=[0.0, 0.5, 0.0, 0.5],
        ),
        _family("talkie", "TalkieForCausalLM", **_HEAD),
        _family("telechat3", "TeleChat3ForCausalLM", **_HEAD, **_BIASES),
        # What transformers writes of these, mlx-lm's modules cannot read.
        _family("bitnet", "BitNetForCausalLM", **_HEAD, attention_bias=True),
        _family("nanochat", "NanoChatForCausalLM"),
        _family(
            "llama4_text",
            "Llama4ForCausalLM",
            **_HEAD,
            intermediate_size_mlp=56,
            no_rope_layers=[1, 0, 0, 1],
            use_qk_norm=True,
        ),
        _family(
            "minimax",
            "MiniMaxM2ForCausalLM",
            **_EXPERTS,
            **_HEAD,
            shared_intermediate_size=0,
            rotary_dim=8,
        ),
        _family(
            "olmo",
            "OLMoForCausalLM",
            d_model=72,
            n_layers=4,
            mlp_hidden_size=88,
            n_heads=6,
            embedding_size=64,
        ),
        _family(
            "phi3small",
            "Phi3SmallForCausalLM",
            vocab_size=100352,  # of which the module leaves some out, by number
            dense_attention_every_n_layers=2,
            ff_intermediate_size=88,
            gegelu_limit=20.0,
            layer_norm_epsilon=1e-5,
            blocksparse_block_size=32,
            blocksparse_num_local_blocks=1,
            blocksparse_vert_stride=2,
        ),
        _family("deepseek_v41", "DeepseekV41ForCausalLM", head_dim=16),
    )
}
#: Multimodal files, of which the text model is served: it has another module, or its own.
_TEXT = {**_ODD, **_HEAD}
NESTED = {
    module: Family(module, architecture, {"text_config": config})
    for module, architecture, config in (
        (
            "gemma3",
            "Gemma3ForConditionalGeneration",
            _TEXT
            | {
                "model_type": "gemma3_text",
                "sliding_window": 7,
                "sliding_window_pattern": 2,
                "query_pre_attn_scalar": 20,
            },
        ),
        (
            "gemma4",
            "Gemma4ForConditionalGeneration",
            _TEXT
            | {
                "model_type": "gemma4_text",
                "global_head_dim": 24,
                "num_kv_shared_layers": 2,
                "vocab_size_per_layer_input": 64,
                "hidden_size_per_layer_input": 10,
                "sliding_window": 7,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "final_logit_softcapping": 5.0,
            },
        ),
        (
            "kimi_k25",
            "KimiK25ForConditionalGeneration",
            _TEXT
            | {
                "model_type": "kimi_k25",
                "num_key_value_heads": 6,
                "q_lora_rank": 24,
                "kv_lora_rank": 32,
                "qk_nope_head_dim": 16,
                "qk_rope_head_dim": 8,
                "v_head_dim": 20,
                "moe_intermediate_size": 40,
                "n_routed_experts": 6,
                "n_shared_experts": 1,
                "num_experts_per_tok": 3,
                "first_k_dense_replace": 1,
                "routed_scaling_factor": 1.7,
                "n_group": 3,
                "topk_group": 2,
            },
        ),
        (
            "lfm2-vl",
            "Lfm2VlForConditionalGeneration",
            _ODD
            | {
                "model_type": "lfm2",
                "conv_bias": True,
                "conv_L_cache": 3,
                "block_dim": 72,
                "block_ff_dim": 88,
                "block_multiple_of": 8,
                "block_ffn_dim_multiplier": 1.0,
                "block_auto_adjust_ff_dim": False,
                "layer_types": ["conv", "full_attention", "full_attention", "conv"],
            },
        ),
        (
            "llama4",
            "Llama4ForConditionalGeneration",
            _TEXT
            | {
                "model_type": "llama4_text",
                "attention_bias": True,
                "attention_chunk_size": 32,
                "interleave_moe_layer_step": 2,
                "intermediate_size_mlp": 56,
                "num_experts_per_tok": 1,
                "num_local_experts": 5,
                "rope_scaling": None,
                "use_qk_norm": True,
                "attn_temperature_tuning": 0,
            },
        ),
        (
            "minimax_m3_vl",
            "MiniMaxM3VLForConditionalGeneration",
            _TEXT
            | {
                "model_type": "minimax_m3",
                "dense_intermediate_size": 88,
                "intermediate_size": 40,
                "shared_intermediate_size": 40,
                "num_local_experts": 5,
                "num_experts_per_tok": 2,
                "partial_rotary_factor": 0.5,
                "routed_scaling_factor": 1.7,
                "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
            },
        ),
        (
            "mistral3",
            "Mistral3ForConditionalGeneration",
            _TEXT | {"model_type": "mistral"},
        ),
        ("pixtral", "PixtralForConditionalGeneration", _TEXT | {"model_type": "mistral"}),
        (
            "qwen2_vl",
            "Qwen2VLForConditionalGeneration",
            _ODD | {"model_type": "qwen2"},
        ),
        ("qwen3_vl", "Qwen3VLForConditionalGeneration", _TEXT | {"model_type": "qwen3"}),
        (
            "qwen3_vl_moe",
            "Qwen3VLMoeForConditionalGeneration",
            _TEXT
            | _EXPERTS
            | {"model_type": "qwen3_moe", "decoder_sparse_step": 1, "mlp_only_layers": [1]},
        ),
        (
            "muse_spark",
            "MuseSparkForConditionalGeneration",
            _TEXT
            | {
                "post_norm_eps": 1e-8,
                "rope_parameters": {"rope_theta": 10000.0},
                "layer_rope_theta": [10000.0, 0, 0, 10000.0],
                "layer_types": _LAYERS,
                "sliding_window": 7,
                "final_logit_softcapping": 5.0,
                "output_multiplier": 0.7,
                "num_local_experts": 5,
                "num_experts_per_tok": 2,
                "moe_hidden_size": 40,
                "moe_intermediate_size": 48,
                "qk_scale_factor": 1.7,
                "routed_scaling_factor": 1.7,
            },
        ),
    )
}
