# SPDX-License-Identifier: Apache-2.0
"""Small models of mlx-lm's modules that lack a usable class in transformers.

Their shapes are unusual: three query heads per K/V head, heads wider than hidden size / heads,
partially rotated heads, multipliers other than 1, biases, layers in no repeating pattern.
"""

from engine.models import further, nested
from engine.models.nested import EXPERTS, HEAD, LAYERS, ODD
from engine.models.recurrent import Family

_BIASES = {"attention_bias": True, "mlp_bias": True}
_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {
        "rope_type": "default",
        "rope_theta": 5000.0,
        "partial_rotary_factor": 0.5,
    },
}


def _family(module: str, architecture: str, **config) -> Family:
    return Family(module, architecture, ODD | config)


FAMILIES = {
    family.module: family
    for family in (
        _family(
            "Klear",
            "KlearMoeForCausalLM",
            **EXPERTS,
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
            **(EXPERTS | {"num_experts": 6}),
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
            **EXPERTS,
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
        # All layers twice: over the whole text, and also over a window.
        _family(
            "iquestloopcoder",
            "IQuestLoopCoderForCausalLM",
            **HEAD,
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
            **HEAD,
            sliding_window=7,
            layer_types=LAYERS,
            qk_scale_factor=1.7,
            output_multiplier=0.7,
            final_logit_softcapping=5.0,
        ),
        _family("nanbeige", "NanbeigeForCausalLM", **HEAD, **_BIASES, num_loops=2),
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
            **HEAD,
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
            **HEAD,
            **_BIASES,
            sliding_window=7,
            layer_types=LAYERS,
            rope_parameters=_ROPES,
            hidden_act="gelu",
        ),
        _family(
            "step3p5",
            "Step3p5ForCausalLM",
            **HEAD,
            num_attention_groups=2,
            sliding_window=7,
            layer_types=LAYERS,
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
        _family("talkie", "TalkieForCausalLM", **HEAD),
        _family("telechat3", "TeleChat3ForCausalLM", **HEAD, **_BIASES),
        # mlx-lm's modules cannot read what transformers writes for these.
        _family("bitnet", "BitNetForCausalLM", attention_bias=True),
        _family("nanochat", "NanoChatForCausalLM"),
        _family(
            "llama4_text",
            "Llama4ForCausalLM",
            **HEAD,
            intermediate_size_mlp=56,
            no_rope_layers=[1, 0, 0, 1],
            use_qk_norm=True,
        ),
        _family(
            "minimax",
            "MiniMaxM2ForCausalLM",
            **EXPERTS,
            **HEAD,
            shared_intermediate_size=0,
            rotary_dim=8,
        ),
    )
}


def all_families() -> dict[str, Family]:
    """Returns the families by mlx-lm module."""
    return {**FAMILIES, **nested.FAMILIES, nested.PACKED.module: nested.PACKED}


def with_those_of_states() -> dict[str, Family]:
    """Like `all_families`, with those whose layers keep states or latents."""
    return further.ALL | all_families()
