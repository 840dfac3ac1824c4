# SPDX-License-Identifier: Apache-2.0
"""Jina VLM's text model against mlx-vlm's, with settings in nested blocks."""

import importlib.util
import json
import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import torch
from engine.models import of_mlx_vlm
from engine.models.of_mlx_vlm import JINA
from engine.models.recurrent import VOCAB, Family, make_model, write_model
from engine.models.test_plain import prompts_of
from mlx.utils import tree_flatten
from vllm.engine.arg_utils import EngineArgs

from vllm_metal.engine.models import loader
from vllm_metal.identity.model_files import ModelLoadError
from vllm_metal.patches.mlx_patches import mlx_vlm_text
from vllm_metal.settings.mlx_vlm_models import MLX_VLM_MODELS

FAMILY = of_mlx_vlm.FAMILIES["jvlm"]
ATTENTION, FFN = "block_config.attn_config.", "block_config.ffn_config."


def changed(changes):
    """Returns the published text configuration with changes at dotted paths."""
    text = json.loads(json.dumps(JINA))
    for path, value in changes.items():
        *blocks, key = path.split(".")
        block = text
        for name in blocks:
            block = block[name]
        block[key] = value
    return text


def configure(folder, changes):
    config = of_mlx_vlm.AS_PUBLISHED["jvlm"] | {"text_config": changed(changes)}
    (folder / "config.json").write_text(json.dumps(config))


def unpatched():
    """Returns mlx-vlm's unpatched module of the text model."""
    patched = mlx_vlm_text.imported(MLX_VLM_MODELS["jvlm"]).language
    spec = importlib.util.spec_from_file_location(f"{patched.__name__}_as_is", patched.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_dense_forward_is_that_of_the_unpatched_module():
    model, added = make_model(FAMILY, seed=7, drawn=True), [VOCAB - 2, VOCAB - 1]
    assert model.args.vocab_size == added[0]
    tokens = mx.array([[*prompts_of()[0], *added]])
    plain = unpatched().LanguageModel(model.args)
    plain.lm_head = nn.Linear(model.args.hidden_size, model.args.vocab_size, bias=False)
    arrays = tree_flatten(model.language_model.parameters())
    plain.load_weights([(name.removeprefix("model."), array) for name, array in arrays])
    expected = np.array(plain(tokens).logits)
    np.testing.assert_allclose(np.array(model(tokens)), expected, atol=2e-5)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_norms_square_in_float32(dtype):
    make_model(FAMILY)
    norm = sys.modules["mlx_vlm.models.jina_vlm.language"].RMSNorm(72, eps=1e-3)
    x = np.random.default_rng(3).normal(scale=900, size=(4, 72)).astype(np.float32)
    expected = torch.nn.functional.rms_norm(torch.tensor(x), (72,), eps=1e-3)
    found = norm(mx.array(x).astype(getattr(mx, dtype))).astype(mx.float32)
    np.testing.assert_allclose(np.array(found), expected, atol=1e-5 if dtype == "float32" else 0.02)


@pytest.mark.more
def test_values_that_are_not_computed_are_rejected_by_name(tmp_path):
    write_model(FAMILY, tmp_path)
    for path, value in {
        "rope": None,
        "embedding_size": 128,
        "normalize_input_embeds": True,
        "partial_rotary_factor": 0.5,
        "num_hidden_layers": 3,
        "block_config.attn_lscale_init": 0.1,
        "block_config.postnorm": True,
        "block_config.window": 7,
        "block_config.lnorm_config.type": None,
        "block_config.lnorm_config.eps": 1e-6,
        "block_config.lnorm_config.bias": True,
        f"{ATTENTION}clip_qkv": 8.0,
        f"{ATTENTION}sliding_window": 7,
        f"{ATTENTION}softmax_scale": 0.5,
        f"{ATTENTION}k_bias": True,
        f"{ATTENTION}q_lnorm": False,
        f"{ATTENTION}v_lnorm": True,
        f"{ATTENTION}qkv_lnorm_on_heads": None,
        f"{ATTENTION}lnorm_config.eps": None,
        f"{ATTENTION}lnorm_config.with_affine": False,
        f"{ATTENTION}gate": "sigmoid",
        f"{FFN}activation_type": "gelu",
        f"{FFN}bias": True,
        f"{FFN}gated_activation": False,
        f"{FFN}inner_lnorm": True,
    }.items():
        configure(tmp_path, {path: value})
        named = "n_layers" if path == "num_hidden_layers" else path
        if path == "block_config.lnorm_config.eps":  # which that of the heads' norms must equal
            named = f"{ATTENTION}lnorm_config.eps"
        with pytest.raises(ModelLoadError, match=named.replace(".", r"\.")):
            loader.lazy_model(tmp_path, mx.float32)


@pytest.mark.more
def test_sizes_that_are_null_follow_from_others(tmp_path):
    heads = {"head_dim": 12, "num_key_value_heads": 6, "intermediate_size": 288}
    family = Family(
        "jvlm",
        FAMILY.architecture,
        {"text_config": FAMILY.config["text_config"] | heads | {"additional_vocab_size": 0}},
    )
    write_model(family, tmp_path, drawn=True)
    names = (f"{ATTENTION}head_dim", f"{ATTENTION}n_kv_heads", f"{FFN}size")
    configure(tmp_path, dict.fromkeys((*names, "additional_vocab_size", "embedding_size")))
    tokens = mx.array([[3, 5, 7]])
    expected = np.array(make_model(family, drawn=True)(tokens))
    found = loader.lazy_model(tmp_path, mx.float32)(tokens)
    np.testing.assert_allclose(np.array(found), expected, atol=1e-5)


@pytest.mark.more
def test_biases_of_the_familys_own_code_must_be_zero(tmp_path):
    file = Path(write_model(FAMILY, tmp_path)) / "model.safetensors"
    arrays = of_mlx_vlm.PUBLISHED_NAMES["jvlm"](mx.load(str(file)))
    name = "model.language_model.layers.1.attn.k_b"
    mx.save_safetensors(str(file), arrays | {name: mx.ones_like(arrays[name])})
    with pytest.raises(ModelLoadError, match=r"layers\.1\.attn\.qkv\.bias"):
        loader.lazy_model(tmp_path, mx.float32)


@pytest.mark.more
def test_vllm_reads_nested_heads_and_a_nested_key_is_taken_away_by_an_override(tmp_path):
    write_model(FAMILY, tmp_path)
    configure(tmp_path, {f"{ATTENTION}gate": "sigmoid"})

    def engine_config(**options):
        args = EngineArgs(str(tmp_path), skip_tokenizer_init=True, max_model_len=128, **options)
        return args.create_engine_config()

    config = engine_config()
    text = config.model_config.hf_text_config
    assert (text.num_attention_heads, text.num_hidden_layers) == (6, 4)
    with pytest.raises(ModelLoadError, match="--hf-overrides") as error:
        loader.load(config)
    overrides = json.loads(str(error.value).partition("--hf-overrides '")[2].partition("'")[0])
    assert overrides == {"text_config": {"block_config": {"attn_config": {"gate": None}}}}
    loader.load(engine_config(hf_overrides=overrides))
