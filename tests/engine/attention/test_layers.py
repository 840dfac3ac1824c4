# SPDX-License-Identifier: Apache-2.0
"""Layer properties read from models, and rejected models."""

import importlib

import mlx.core as mx
import pytest
from mlx_lm.models.base import BaseModelArgs

from metal_kernels.kv_write import RotationKind
from vllm_metal.engine.attention.layers import AttentionLayer, attention_layers
from vllm_metal.engine.attention.paged_cache import LayerRotation
from vllm_metal.patches.mlx_patches import seam

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "vocab_size": 128,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
}


def build(model_type, **changes):
    seam.install()
    module = importlib.import_module(f"mlx_lm.models.{model_type}")
    seam.install()
    args: type[BaseModelArgs] = module.ModelArgs
    return module.Model(args.from_dict(SMALL | changes | {"model_type": model_type}))


def test_full_and_window_layers_are_told_apart():
    gemma3 = build(
        "gemma3_text", sliding_window=24, sliding_window_pattern=2, query_pre_attn_scalar=16
    )
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_size": 16}
    heads["rotation"] = LayerRotation(RotationKind(16), queries=True)
    assert attention_layers(gemma3, "gemma3_text") == [
        AttentionLayer("layers.0", window=24, **heads),
        AttentionLayer("layers.1", window=None, **heads),
        AttentionLayer("layers.2", window=24, **heads),
        AttentionLayer("layers.3", window=None, **heads),
    ]


DYNAMIC = {"type": "dynamic", "alpha": 1.0, "factor": 1.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("model_type", "changes", "rotation"),
    [
        ("llama", {}, LayerRotation(RotationKind(16), True)),
        ("llama", {"rope_traditional": True}, LayerRotation(RotationKind(16, 0, True), True)),
        (
            "llama",
            {"head_dim": 32, "rope_scaling": LLAMA3},
            LayerRotation(RotationKind(32, listed=True), True),
        ),
        # Norms follow the rotation, so that it is done before.
        (
            "hunyuan_v1_dense",
            {"rope_scaling": {"type": "dynamic", "alpha": 1.0, "factor": 1.0}},
            None,
        ),
        ("gpt2", {"n_ctx": 64, "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 64}, None),
        (
            "deepseek_v3",
            {
                "qk_nope_head_dim": 16,
                "qk_rope_head_dim": 8,
                "v_head_dim": 16,
                "kv_lora_rank": 32,
                "q_lora_rank": 24,
                "n_routed_experts": None,
                "first_k_dense_replace": 4,
            },
            LayerRotation(RotationKind(8, 0, True), False),
        ),
    ],
)
def test_rotations_are_noted_that_a_write_may_do(model_type, changes, rotation):
    model = build(model_type, **{"layer_norm_epsilon": 1e-5} | changes)
    assert {layer.rotation for layer in attention_layers(model, model_type)} == {rotation}


def test_sinks_are_noted_with_their_dtype():
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24}
    gpt_oss = build("gpt_oss", **experts)
    gpt_oss.set_dtype(mx.float16)
    assert {layer.sinks for layer in attention_layers(gpt_oss, "gpt_oss")} == {mx.float16}


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        (
            "phi3small",
            {
                "dense_attention_every_n_layers": 2,
                "ff_intermediate_size": 64,
                "gegelu_limit": 20.0,
                "layer_norm_epsilon": 1e-5,
                "vocab_size": 100352,
            },
            "'phi3small' computes attention in layers.0 with code of its own",
        ),
    ],
)
def test_what_the_seam_does_not_cover_is_refused_by_name(model_type, changes, reason):
    with pytest.raises(NotImplementedError, match=reason):
        attention_layers(build(model_type, **changes), model_type)
