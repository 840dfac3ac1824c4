# SPDX-License-Identifier: Apache-2.0
"""An MTP layer loads like the target's layers; here it is a copy of one."""

import json
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import torch
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from vllm_metal.engine.models.mtp_families import MTP_FAMILIES
from vllm_metal.engine.models.mtp_weights import mtp_weights
from vllm_metal.engine.spec_decode.mtp import MTPHead
from vllm_metal.engine.weights.layers import dense_rows
from vllm_metal.engine.weights.placing import install
from vllm_metal.identity.model_files import ModelLoadError

HIDDEN, HEADS, RANK, NOPE, ROPE, VALUE, EXPERTS, LAYERS = 64, 2, 32, 16, 8, 24, 4, 2
CONFIG = {
    "vocab_size": 32,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "n_shared_experts": 1,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "kv_lora_rank": RANK,
    "q_lora_rank": 40,
    "qk_rope_head_dim": ROPE,
    "qk_nope_head_dim": NOPE,
    "v_head_dim": VALUE,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 128,
    "rope_scaling": None,
}


def mlp(name, size):
    return {
        f"{name}.gate_proj.weight": (size, HIDDEN),
        f"{name}.up_proj.weight": (size, HIDDEN),
        f"{name}.down_proj.weight": (HIDDEN, size),
    }


def layer(name, sparse):
    """Returns the shapes of an MLA layer as published."""
    attention = {
        "q_a_proj.weight": (40, HIDDEN),
        "q_a_layernorm.weight": (40,),
        "q_b_proj.weight": (HEADS * (NOPE + ROPE), 40),
        "kv_a_proj_with_mqa.weight": (RANK + ROPE, HIDDEN),
        "kv_a_layernorm.weight": (RANK,),
        "kv_b_proj.weight": (HEADS * (NOPE + VALUE), RANK),
        "o_proj.weight": (HIDDEN, HEADS * VALUE),
    }
    shapes = {f"{name}.self_attn.{part}": shape for part, shape in attention.items()}
    for norm in ("input_layernorm", "post_attention_layernorm"):
        shapes[f"{name}.{norm}.weight"] = (HIDDEN,)
    if not sparse:
        return shapes | mlp(f"{name}.mlp", 96)
    shapes |= mlp(f"{name}.mlp.shared_experts", 48)
    shapes[f"{name}.mlp.gate.weight"] = (EXPERTS, HIDDEN)
    shapes[f"{name}.mlp.gate.e_score_correction_bias"] = (EXPERTS,)
    for expert in range(EXPERTS):
        shapes |= mlp(f"{name}.mlp.experts.{expert}", 48)
    return shapes


def write(folder, model_type, fp8):
    """Writes a two-layer model, and an MTP layer that copies the second layer."""
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (32, HIDDEN), "lm_head.weight": (32, HIDDEN)}
    shapes |= {"model.norm.weight": (HIDDEN,)}
    shapes |= layer("model.layers.0", sparse=False) | layer("model.layers.1", sparse=True)
    arrays = {
        name: mx.array(rng.normal(size=shape).astype(np.float32)) for name, shape in shapes.items()
    }
    for name in [*arrays] if fp8 else []:
        if name.endswith("_proj.weight"):  # in blocks of 128 by 128, so here in one
            arrays[name] = mx.to_fp8(arrays[name])
            arrays[f"{name}_scale_inv"] = mx.array([[0.75]])
    mtp = {
        name.replace("layers.1.", f"layers.{LAYERS}."): array
        for name, array in arrays.items()
        if "layers.1." in name
    }
    own = f"model.layers.{LAYERS}"
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        mtp[f"{own}.{norm}.weight"] = mx.full((HIDDEN,), float(len(norm)))
    mtp[f"{own}.eh_proj.weight"] = mx.ones((HIDDEN, 2 * HIDDEN))
    mtp[f"{own}.embed_tokens.weight"] = arrays["model.embed_tokens.weight"]
    mtp[f"{own}.shared_head.head.weight"] = arrays["lm_head.weight"]
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config = CONFIG | {"model_type": model_type}
    config |= {"quantization_config": quantization} if fp8 else {}
    (folder / "config.json").write_text(json.dumps(config))
    # Apart, as mlx-lm leaves out layers 61 of DeepSeek-V3 and no others.
    mx.save_safetensors(str(folder / "model.safetensors"), arrays, {"format": "pt"})
    mx.save_safetensors(str(folder / "mtp.safetensors"), mtp, {"format": "pt"})


def configured(folder, dtype):
    """Returns the parts of vLLM's configuration that are read."""
    checkpoint = SimpleNamespace(model=str(folder), revision=None, hf_config=None)
    return SimpleNamespace(
        speculative_config=SimpleNamespace(draft_model_config=checkpoint),
        load_config=SimpleNamespace(download_dir=None),
        model_config=SimpleNamespace(dtype=dtype),
    )


@pytest.mark.parametrize(
    ("model_type", "architecture", "fp8"),
    [
        ("deepseek_v3", "DeepSeekMTPModel", False),
        ("deepseek_v3", "DeepSeekMTPModel", True),
        ("glm4_moe_lite", "Glm4MoeLiteMTPModel", False),
    ],
)
def test_a_layer_of_mla_is_read_as_the_targets_are(tmp_path, model_type, architecture, fp8):
    write(tmp_path, model_type, fp8)
    model, _ = load_model(tmp_path)
    family = MTP_FAMILIES[architecture]
    head = MTPHead(family, model.args, family.build_block(model.args, {}, 0)[0])
    placed = mtp_weights(configured(tmp_path, torch.float32), family, model, LAYERS, head)
    wanted = {f"block.{name}": a for name, a in tree_flatten(model.layers[1].parameters())}
    ends = {"embedding_norm.weight", "hidden_norm.weight", "norm.weight", "fc.weight"}
    if fp8:  # weights stay packed, in 8 bits; mlx-lm decodes them
        assert "block.mlp.switch_mlp.gate_proj" in placed.packings
        install(head, placed)
        for path in placed.packings:
            dense, of_model = dense_rows(module_at(head, path)), wanted[f"{path}.weight"]
            assert mx.abs(dense - of_model).max() < 0.02 * mx.abs(of_model).max()
        return
    found = placed.arrays
    assert found.keys() == wanted.keys() | ends
    for name, array in wanted.items():
        assert mx.array_equal(found[name], array.astype(mx.float32)), name
    assert [found[name][0].item() for name in sorted(ends - {"fc.weight"})] == [5, 5, 16]
    block, windows = family.build_block(model.args, {}, 0)
    block.load_weights([(n.removeprefix("block."), a) for n, a in found.items() if n not in ends])
    assert windows == (None,)
    hidden, mask = mx.random.normal((1, 6, HIDDEN), key=mx.random.key(0)), mx.tri(6) > 0
    assert mx.array_equal(block(hidden, mask), model.layers[1](hidden, mask))


def module_at(model, path):
    return dict(model.named_modules())[path]


def test_biases_that_choose_experts_keep_their_dtype(tmp_path):
    write(tmp_path, "deepseek_v3", fp8=False)
    model, _ = load_model(tmp_path)
    config = configured(tmp_path, torch.bfloat16)
    found = mtp_weights(config, MTP_FAMILIES["DeepSeekMTPModel"], model, LAYERS, nn.Module()).arrays
    kept = {name for name, array in found.items() if array.dtype == mx.float32}
    assert kept == {"block.mlp.gate.e_score_correction_bias"}
    assert {array.dtype for array in found.values()} == {mx.float32, mx.bfloat16}


def test_a_layer_that_two_files_have_is_named(tmp_path):
    write(tmp_path, "deepseek_v3", fp8=False)
    (tmp_path / "again.safetensors").write_bytes((tmp_path / "mtp.safetensors").read_bytes())
    model, _ = load_model(tmp_path)
    config = configured(tmp_path, torch.bfloat16)
    with pytest.raises(ModelLoadError, match="stored twice"):
        mtp_weights(config, MTP_FAMILIES["DeepSeekMTPModel"], model, LAYERS, nn.Module())
