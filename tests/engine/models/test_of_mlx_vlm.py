# SPDX-License-Identifier: Apache-2.0
"""Text models that only mlx-vlm has a module for: paged equals mlx-vlm's own dense forward."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import torch
from engine.models import doubles, of_mlx_vlm
from engine.models.cases import cases
from engine.models.nested import HEAD, ODD
from engine.models.of_mlx_vlm import V4
from engine.models.recurrent import VOCAB, draw, make_model, write_model
from engine.models.test_executor import chunk_by_chunk, of_states
from engine.models.test_plain import TOLERANCE, prompts_of
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from vllm_metal.engine.models.loader import lazy_model
from vllm_metal.identity.model_files import ModelLoadError
from vllm_metal.patches.mlx_patches import mlx_vlm_text, registry
from vllm_metal.settings.mlx_vlm_models import MLX_VLM_MODELS, TextModel

pytestmark = pytest.mark.usefixtures("unfused")
QUICK = ("cohere2_moe",)


def test_every_row_has_a_small_model():
    assert set(of_mlx_vlm.FAMILIES) == set(MLX_VLM_MODELS)


@pytest.mark.parametrize("name", cases(of_mlx_vlm.FAMILIES, QUICK))
def test_chunks_of_a_mixed_batch_equal_the_dense_forward(name, monkeypatch):
    doubles.install(monkeypatch)
    model, prompts = make_model(of_mlx_vlm.FAMILIES[name], seed=7, drawn=True), prompts_of()
    expected = [
        np.array(model(mx.array([p]), cache=make_prompt_cache(model))[0].astype(mx.float32))
        for p in prompts
    ]
    assert len(set(np.concatenate(expected).argmax(-1).tolist())) > 8, "texts do not vary"
    blocks = np.random.default_rng(5).permutation(np.arange(1, 40))
    parts = chunk_by_chunk(model, name, prompts, blocks, of_states)
    found = [np.concatenate([np.array(part, np.float32) for part in one]) for one in parts]
    worst = max(np.abs(one - other).max() for one, other in zip(found, expected, strict=True))
    assert worst <= TOLERANCE


@pytest.mark.more
@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("limite", {"lm_head_precision_mode": "fp32_accumulate"}, r"lm_head_precision_mode="),
        ("limite", {"ve_mix": 0.5}, r"ve_mix \(0.5\)"),
        ("cohere_compass", {"hidden_act": "gelu"}, r"hidden_act='gelu'"),
        ("cohere_compass", {"rope_on_all_layers": False}, r"rope_on_all_layers=False"),
        (
            "cohere_compass",
            {
                "rope_parameters": {
                    "full_attention": None,
                    "sliding_attention": {"rope_type": "yarn", "rope_theta": 700.0, "factor": 2.0},
                }
            },
            r"another rope_type for sliding_attention",
        ),
        ("ernie4_5_moe_vl", {"moe_gate_act": "sigmoid"}, r"moe_gate_act='sigmoid'"),
        ("ernie4_5_moe_vl", {"use_bias": True}, r"use_bias=True"),
        ("glm_ocr", {"attention_bias": True}, r"attention_bias=True.*supports only False"),
        ("glm_ocr", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, r"rope_type"),
        ("mllama", {"hidden_act": "gelu"}, r"hidden_act='gelu'"),
        ("mllama", {"head_dim": 16}, r"head_dim"),
        ("molmo", {"norm_after": True}, r"norm_after=True.*supports only False"),
        ("molmo", {"moe_num_experts": 64}, r"moe_num_experts=64"),
        ("molmo2", {"rope_scaling_layers": [1]}, r"rope_scaling_layers=\[1\]"),
        ("molmo2", {"hidden_act": "gelu"}, r"hidden_act='gelu'"),
        ("youtu_vl", {"rope_interleave": False}, r"rope_interleave=False"),
        ("deepseek_v4", {"norm_topk_prob": False}, r"norm_topk_prob=False.*supports only True"),
        ("deepseek_v4", {"index_block": 32}, r"index_block=32"),
        ("deepseek_v4", {"vision_n_layers": 2}, r"vision_n_layers=2.*supports only 0"),
        ("deepseek_v4", {"swiglu_limit": 0.0}, r"swiglu_limit=0.0.*Set a positive limit"),
        ("deepseek_v4", {"compress_ratios": [0, 4, 64, 4]}, r"compress ratios: \[64\]"),
        (
            "deepseek_v4",
            {"compress_rates": {"compressed_sparse_attention": 8}},
            r"compress_rates=.*Choose another checkpoint",
        ),
        ("deepseek_v4", {"mlp_layer_types": ["moe", "hash_moe"] * 2}, r"mlp_layer_types="),
        (
            "deepseek_v4",
            {"rope_scaling": V4["rope_scaling"] | {"attention_factor": 1.2}},
            r"attention_factor=1.2",
        ),
        ("deepseek_v4", {"rope_scaling": {"type": "linear", "factor": 2.0}}, r"type='linear'"),
        ("deepseek_v4", {"o_groups": 4}, r"o_groups=4.*num_attention_heads=6"),
        ("deepseek_v4", {"sliding_window": None}, r"sliding_window=None"),
        (
            "deepseek_v4",
            {"rope_parameters": {"main": {"rope_type": "yarn"}, "compress": {"factor": 2.0}}},
            r"rope_type='yarn' in rope_parameters.main",
        ),
        ("hy_v4", {"gated_mla": False}, r"gated_mla=False.*supports only True"),
        ("hy_v4", {"layer_types": ["full_attention"] * 4}, r"layer_types"),
        ("hy_v4", {"moe_layer_freq": 2}, r"moe_layer_freq=2.*supports only 1"),
        ("hy_v4", {"swiglu_limit": 0.0}, r"swiglu_limit=0.0.*Set a positive limit"),
        ("hy_v4", {"indexer_types": ["shared", *["full"] * 3]}, r"indexer_types.*'full' for the"),
        ("glm5_next", {"index_kpool_always_select_tail": False}, r"always_select_tail=False"),
        ("glm5_next", {"index_kpool_compress": False}, r"index_kpool_compress=False"),
        ("glm5_next", {"scoring_func": "softmax"}, r"scoring_func='softmax'"),
        ("glm5_next", {"mhc": False}, r"mhc=False.*supports only True"),
        ("glm5_next", {"hidden_act": "gelu"}, r"hidden_act='gelu'"),
        ("glm5_next", {"num_experts_per_tok": 1}, r"num_experts_per_tok"),
        ("glm5_next", {"qk_rope_head_dim": 8}, r"qk_rope_head_dim=8.*supports only 0"),
        ("glm5_next", {"index_kpool": 4}, r"index_topk"),
        ("glm5_next", {"layer_types": ["sliding_attention"] * 4}, r"layer_types.*linear_attention"),
        (
            "glm5_next",
            {"indexer_types": ["full", "shared", *["full"] * 2]},
            r"indexer_types.*'full'",
        ),
        ("glm5_next_text", {"mla_use_nope": False}, r"mla_use_nope=False"),
        ("qwen4_exp", {"hidden_act": "gelu"}, r"hidden_act='gelu'"),
        ("qwen4_exp", {"output_gate_type": "relu"}, r"output_gate_type"),
        ("qwen4_exp", {"indexer_kv_heads": 2}, r"indexer_kv_heads=1"),
        ("qwen4_exp", {"layer_types": ["sliding_attention"] * 4}, r"sliding_attention"),
        ("qwen4_exp", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, r"rope_type"),
        ("zaya1_vl", {"swa_layers": [1]}, r"swa_layers=\[1\]"),
        ("zaya1_vl", {"residual_gain": 2.0}, r"residual_gain \(2.0\)"),
        ("moondream3", {"moe": {"n_experts": 9}}, r"moe \("),
        ("falcon_ocr", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, r"rope_type='yarn'"),
        ("z1t", {"aft_kind": "full"}, r"aft_kind='full'.*supports only 'conv'"),
        ("kolibri1", {"hidden_act": "gelu"}, r"hidden_act='gelu'.*supports only silu"),
    ],
)
def test_a_value_that_is_not_computed_is_rejected(name, keys, message, tmp_path):
    folder = Path(write_model(of_mlx_vlm.FAMILIES[name], tmp_path))
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    text |= keys
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=message):
        lazy_model(folder, mx.float32)


@pytest.mark.parametrize("name", cases(of_mlx_vlm.FAMILIES, QUICK))
def test_a_folder_is_read(name, tmp_path):
    family = of_mlx_vlm.FAMILIES[name]
    model = make_model(family, drawn=True)
    read = lazy_model(Path(write_model(family, tmp_path, drawn=True)), mx.float32)
    tokens = mx.array([[3, 5, 7]])
    np.testing.assert_allclose(np.array(read(tokens)), np.array(model(tokens)), atol=1e-5)


@pytest.mark.more
@pytest.mark.parametrize("name", of_mlx_vlm.AS_PUBLISHED)
def test_a_published_file_is_read(name, tmp_path):
    tokens, folder = mx.array([[3, 5, VOCAB - 1]]), tmp_path / "model"
    model = make_model(of_mlx_vlm.FAMILIES[name], drawn=True)
    write_model(of_mlx_vlm.FAMILIES[name], folder, drawn=True)
    (folder / "config.json").write_text(json.dumps(of_mlx_vlm.AS_PUBLISHED[name]))
    read = lazy_model(folder, mx.float32)
    np.testing.assert_allclose(np.array(read(tokens)), np.array(model(tokens)), atol=1e-5)


@pytest.mark.more
@pytest.mark.parametrize("name", of_mlx_vlm.PUBLISHED_NAMES)
def test_published_names_are_read(name, tmp_path):
    tokens, family = mx.array([[3, 5, VOCAB - 1]]), of_mlx_vlm.FAMILIES[name]
    model = make_model(family, drawn=True)
    file = Path(write_model(family, tmp_path, drawn=True)) / "model.safetensors"
    arrays = of_mlx_vlm.PUBLISHED_NAMES[name](mx.load(str(file)))
    mx.save_safetensors(str(file), {n: mx.contiguous(array) for n, array in arrays.items()})
    read = lazy_model(tmp_path, mx.float32)
    np.testing.assert_allclose(np.array(read(tokens)), np.array(model(tokens)), atol=1e-5)


@pytest.mark.more
@pytest.mark.parametrize(
    ("name", "array"), [("limite", "xsa_alpha"), ("zaya1_vl", "balancing_biases")]
)
def test_arrays_that_are_read_in_float32_stay_so(name, array, tmp_path):
    written = write_model(of_mlx_vlm.FAMILIES[name], tmp_path)
    parameters = tree_flatten(lazy_model(Path(written), mx.bfloat16).parameters())
    found = {a.dtype for full, a in parameters if full.endswith(array)}
    assert found == {mx.float32}
    assert {a.dtype for full, a in parameters if full.endswith("proj.weight")} == {mx.bfloat16}


@pytest.mark.more
@pytest.mark.parametrize("name", ["molmo", "molmo2"])
def test_added_tokens_have_embeddings_of_their_own(name):
    embedding = make_model(of_mlx_vlm.FAMILIES[name], drawn=True).language_model.model.wte
    both = np.concatenate([np.array(embedding.embedding), np.array(embedding.new_embedding)])
    tokens = np.array([[0, 61, 62, 63, 64, 65, len(both) - 1]])
    np.testing.assert_array_equal(np.array(embedding(mx.array(tokens))), both[tokens])


def test_norms_of_limite_have_torchs_epsilon():
    x = np.random.default_rng(3).normal(scale=0.02, size=(4, 96)).astype(np.float32)
    code = mlx_vlm_text.imported(MLX_VLM_MODELS["limite"]).language
    registry.install()
    for name in ("float32", "bfloat16", "float16"):
        expected = torch.nn.functional.rms_norm(torch.tensor(x).to(getattr(torch, name)), (96,))
        found = code.rms_norm(mx.array(x).astype(getattr(mx, name)))
        worst = np.abs(np.array(found.astype(mx.float32)) - expected.float().numpy()).max()
        assert worst <= (1e-5 if name == "float32" else 0.02)


@pytest.mark.more
def test_sums_in_states_equal_those_that_the_module_of_z1t_makes_of_whole_texts():
    model = make_model(of_mlx_vlm.FAMILIES["z1t"], drawn=True)
    tokens, cache = mx.array([prompts_of()[0]]), make_prompt_cache(model)
    parts = [model(part, cache=cache) for part in mx.split(tokens, [1, 2, 9, 10], axis=1)]
    np.testing.assert_allclose(
        np.array(mx.concatenate(parts, 1)), np.array(model(tokens)), atol=1e-5
    )


def test_sparse_layers_of_z1t_gather_few_tokens_at_once(monkeypatch):
    code = mlx_vlm_text.imported(MLX_VLM_MODELS["z1t"]).language
    registry.install()
    take, found = mx.take, []

    def noted(x, indices, axis):
        found.append(x.shape)
        return take(x, indices, axis)

    monkeypatch.setattr(mx, "take", noted)
    outputs = 4_000_000  # never computed
    assert code.SparseLinear(8, outputs, 2)(mx.zeros((5, 1, 8))).shape == (5, 1, outputs)
    assert found == [(1, 2, 8), (1, 2, 8), (1, 1, 8)]


def with_positions(axes):
    """Makes a text model whose module keeps the newest text's positions, in three coordinates."""
    row = TextModel("glm_ocr", position_axes=axes)
    mlx_vlm_text.imported(row)
    registry.install()
    model_class, arguments = mlx_vlm_text.classes(row)
    rope = {"rope_type": "default", "rope_theta": 700.0, "mrope_section": [2, 3, 3]}
    text = (
        ODD | HEAD | {"vocab_size": VOCAB, "rope_parameters": rope | {"partial_rotary_factor": 1}}
    )
    config = {"model_type": "glm_ocr", "text_config": text, "vision_config": {}}
    mx.random.seed(7)
    model = model_class(arguments.from_dict(config))
    draw(model)
    return model


def test_positions_are_handed_in_where_a_module_would_keep_them(monkeypatch):
    doubles.install(monkeypatch)
    model, prompts = with_positions("cbt"), prompts_of()
    expected = [np.array(model.language_model(mx.array([p])).logits[0]) for p in prompts[:1]]
    blocks = np.random.default_rng(5).permutation(np.arange(1, 40))
    parts = chunk_by_chunk(model, "glm_ocr", prompts, blocks, of_states)
    np.testing.assert_allclose(np.concatenate(parts[0]), expected[0], atol=TOLERANCE)
    with pytest.raises(NotImplementedError, match="glm_ocr keeps _position_ids of one text"):
        with_positions("")
