# SPDX-License-Identifier: Apache-2.0
"""Encoders compute the same as transformers' in any batch, or are rejected."""

import functools
import json

import mlx.core as mx
import numpy as np
import pytest
import torch
from engine.pooling.encoders import checkpoints
from safetensors.torch import load_file, save_file

from vllm_metal.engine.pooling.encoders.executor import EncoderExecutor
from vllm_metal.engine.pooling.encoders.loading import lazy_encoder
from vllm_metal.engine.pooling.encoders.networks import TOKEN_TYPES
from vllm_metal.engine.pooling.encoders.profile import rows_of
from vllm_metal.engine.pooling.encoders.served import ARCHITECTURES
from vllm_metal.identity.model_files import ModelLoadError

#: Longer than the windows, shorter than the tables of positions.
LENGTHS = [1, 5, 100, 17, 40, 41, 3, 128]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """transformers' model and the checkpoint folder, by architecture."""

    @functools.cache
    def make(architecture):
        folder = tmp_path_factory.mktemp(architecture)
        return checkpoints.make(architecture, folder), folder

    return make


def load(folder, architecture, dtype=mx.float32, **overrides):
    return lazy_encoder(folder, ARCHITECTURES[architecture], dtype, overrides)


def hidden(encoder, texts, types=None):
    """Returns [n, H] of each text, computed in one step."""
    rows = rows_of([len(text) for text in texts], np.concatenate(texts).astype(np.int32))
    inputs = rows.inputs
    if types is not None:
        inputs = inputs.with_extras({TOKEN_TYPES: mx.array(np.concatenate(types))})
    states = np.array(EncoderExecutor(encoder, 16).forward_hidden(rows, None, inputs)[:, 0])
    return np.split(states, rows.query_start_loc_np[1:-1])


@pytest.mark.parametrize("architecture", checkpoints.CONFIGS)
def test_hidden_states_are_those_of_transformers(made, architecture):
    reference, folder = made(architecture)
    encoder, _ = load(folder, architecture)
    texts = checkpoints.texts(LENGTHS)
    for text, states in zip(texts, hidden(encoder, texts), strict=True):
        assert np.allclose(states, checkpoints.hidden_states(reference, text), atol=1e-4)


@pytest.mark.parametrize("architecture", ["BertModel", "ModernBertModel", "Gemma3TextModel"])
def test_a_text_alone_is_the_same(made, architecture):
    encoder, _ = load(made(architecture)[1], architecture)
    texts = checkpoints.texts(LENGTHS)
    for text, states in zip(texts, hidden(encoder, texts), strict=True):
        (alone,) = hidden(encoder, [text])
        assert np.allclose(states, alone, atol=1e-5)


@pytest.mark.parametrize(
    "architecture", [name for name in checkpoints.CONFIGS if ARCHITECTURES[name].classifies]
)
def test_scores_are_those_of_transformers(made, architecture):
    reference, folder = made(architecture)
    encoder, head = load(folder, architecture)
    texts = checkpoints.texts([2, 40, 9])
    mean = architecture.startswith("ModernBert")  # as the toy's configuration says
    for text, states in zip(texts, hidden(encoder, texts), strict=True):
        pooled = states.mean(0) if mean else states[0]
        with torch.no_grad():
            expected = reference(torch.tensor([text])).logits[0]
            found = head(torch.from_numpy(pooled)[None])[0]
        assert torch.allclose(found, expected, atol=1e-4)


def test_a_pair_has_two_token_types(made):
    reference, folder = made("BertForSequenceClassification")
    encoder, _ = load(folder, "BertForSequenceClassification")
    texts = checkpoints.texts([6, 30])
    types = [np.array([0, 0, 1, 1, 1, 1], np.int32), np.repeat([0, 1], 15).astype(np.int32)]
    for text, of, states in zip(texts, types, hidden(encoder, texts, types), strict=True):
        expected = checkpoints.hidden_states(reference, text, of.tolist())
        assert np.allclose(states, expected, atol=1e-4)
        assert not np.allclose(states, checkpoints.hidden_states(reference, text), atol=0.1)


def test_old_names_and_prefixes_are_read(made, tmp_path):
    """Google's files and those of models for other tasks have them."""
    reference, folder = made("BertModel")
    arrays = load_file(folder / "model.safetensors")
    old = {
        "bert."
        + name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): array
        for name, array in arrays.items()
    }
    save_file(old | {"cls.predictions.bias": torch.zeros(3)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    encoder, _ = load(tmp_path, "BertModel")
    (text,) = checkpoints.texts([20])
    (states,) = hidden(encoder, [text])
    assert np.allclose(states, checkpoints.hidden_states(reference, text), atol=1e-4)


@pytest.mark.parametrize("every", [1, 2])
def test_files_of_before_say_the_angles_of_modernbert(made, tmp_path, every):
    """transformers 4 wrote two keys for what 5 writes in `rope_parameters`.

    With `every` 1 no layer has a window.
    """
    _, folder = made("ModernBertModel")
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"], config["layer_types"]
    old = {"global_rope_theta": 700.0, "local_rope_theta": 30.0}
    old["global_attn_every_n_layers"] = every
    reference = checkpoints.make("ModernBertModel", tmp_path, **old)
    (tmp_path / "config.json").write_text(json.dumps(config | old))
    encoder, _ = load(tmp_path, "ModernBertModel")
    (text,) = checkpoints.texts([60])
    (states,) = hidden(encoder, [text])
    assert np.allclose(states, checkpoints.hidden_states(reference, text), atol=1e-4)


def test_weights_have_the_dtype_that_was_asked_for(made):
    name = "XLMRobertaForSequenceClassification"
    encoder, head = load(made(name)[1], name, mx.bfloat16)
    out = EncoderExecutor(encoder, 16).forward_hidden(rows_of([3]), None)
    assert out.dtype == mx.bfloat16
    assert all(parameter.dtype == torch.float32 for parameter in head.parameters())


@pytest.mark.parametrize(
    ("architecture", "key", "value"),
    [
        ("BertModel", "hidden_act", "gelu_new"),
        ("BertModel", "position_embedding_type", "relative_key"),
        ("BertModel", "is_decoder", True),
        ("XLMRobertaModel", "hidden_act", "silu"),
        ("XLMRobertaModel", "attention_chunk_size", 5),
        ("ModernBertModel", "hidden_activation", "silu"),
        ("ModernBertModel", "rope_scaling", {"type": "linear", "factor": 2}),
        ("ModernBertModel", "rope_parameters", {"full_attention": {"rope_type": "yarn"}}),
        ("ModernBertModel", "layer_types", ["linear_attention"] * 4),
        ("Gemma3TextModel", "is_causal", False),
    ],
)
def test_what_is_not_computed_is_refused(made, architecture, key, value):
    with pytest.raises(ModelLoadError, match=key.rstrip("s").split("_")[0]):
        load(made(architecture)[1], architecture, **{key: value})


def test_missing_weights_are_refused(made, tmp_path):
    _, folder = made("BertModel")
    arrays = load_file(folder / "model.safetensors")
    arrays.pop("encoder.layer.1.output.dense.weight")
    save_file(arrays, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(ModelLoadError, match=r"layer\.1\.output\.dense\.weight"):
        load(tmp_path, "BertModel")


def test_part_of_a_text_is_refused(made):
    encoder, _ = load(made("BertModel")[1], "BertModel")
    rows = rows_of([4, 5])
    rows.positions_np[4:] += 2
    with pytest.raises(RuntimeError, match="part of a text"):
        EncoderExecutor(encoder, 16).forward_hidden(rows, None)
