# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with DeepSeek V4.1's n-gram memory by the names of publishers and of mlx-vlm."""

import json

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import torch
from engine.models.recurrent import VOCAB, config_of, draw
from engine.models.test_sparse import farthest, normalized
from engine.models.v41_formulas import MEMORY, TOKEN_MAP, of_v41
from engine.weights.published_formats import FORMATS
from engine.weights.toys import as_deepseek, change_config
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from safetensors.torch import save_file

from vllm_metal.engine.models.loader import lazy_model
from vllm_metal.engine.weights.disk_tables import TableRule, tables_of
from vllm_metal.patches.mlx_patches.mlx_vlm_families import family

pytestmark = pytest.mark.usefixtures("unfused")

VISION = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 2}
VISION |= {"intermediate_size": 64}
SIZES = {"engram_head_dim": 32, "q_lora_rank": 32}  # groups of 32 divide them
CONFIG = config_of(of_v41(**MEMORY | SIZES)) | {"vision_config": VISION}
FORM = {"group_size": 32, "bits": 4, "mode": "affine"}
TEXT = np.random.default_rng(5).integers(0, VOCAB, 40).tolist()


@pytest.fixture
def theirs():
    """mlx-vlm's model, which rounds inputs of products only if it is told to."""
    found = family("deepseek_v41", "a test")
    found.fakequant.DISABLE = True
    config = found.ModelConfig.from_dict(CONFIG)
    mx.random.seed(4)
    model = found.Model(config)
    draw(model)
    text = model.language_model
    text.engram_hash = found.engram.NgramHashState(config, text.layout, token_map=TOKEN_MAP)
    yield model
    found.fakequant.DISABLE = False


def write(folder, arrays, tensors=None, **keys):
    """Writes a folder with MLX's arrays, or torch's tensors."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | keys))
    (folder / "engram_token_map.json").write_text(json.dumps(TOKEN_MAP))
    path = folder / "model.safetensors"
    if tensors is None:
        mx.save_safetensors(str(path), arrays, {"format": "mlx"})
    else:
        save_file(tensors, path, {"format": "pt"})
    return folder


def published(arrays):
    """Returns mlx-vlm's arrays by the published names: experts one by one, and no groups."""
    found = {}
    for name, array in arrays.items():
        name = name.removeprefix("language_model.").replace("embed_tokens.", "embed.")
        for number, part in ((1, "gate"), (2, "down"), (3, "up")):
            name = name.replace(f".shared_experts.{part}_proj", f".shared_experts.w{number}")
            stacked = f".switch_mlp.{part}_proj."
            if stacked in name:
                for expert, of_expert in enumerate(array):
                    found[name.replace(stacked, f".experts.{expert}.w{number}.")] = of_expert
        if ".switch_mlp." not in name:
            found[name] = array.flatten(0, 1) if ".wo_a." in name else array
    return found


def compare(folder, theirs):
    """Compares the folder's model, with its tables loaded and on disk, with mlx-vlm's."""
    rule = TableRule("disk", 0)
    for model in (lazy_model(folder, mx.float32), lazy_model(folder, mx.float32, tables=rule)):
        found = np.array(model(mx.array([TEXT]), cache=make_prompt_cache(model))[0])
        expected = normalized(np.array(theirs.language_model(mx.array([TEXT])).logits[0]))
        assert farthest(found, expected) <= 1e-4
    assert len(tables_of(model)) == 2


@pytest.mark.more
def test_published_names(theirs, tmp_path):
    """Towers are left out, and biases for images."""
    arrays = published(dict(tree_flatten(theirs.parameters())))
    assert "layers.0.ffn.experts.3.w2.weight" in arrays and "aligner.w1.bias" in arrays
    compare(write(tmp_path / "model", arrays), theirs)


@pytest.mark.more
def test_names_of_mlx_vlm(theirs, tmp_path):
    arrays = dict(tree_flatten(theirs.parameters()))
    assert "language_model.layers.0.ffn.gate.bias_vl" in arrays
    compare(write(tmp_path / "model", arrays), theirs)


def test_a_model_that_mlx_vlm_quantized(theirs, tmp_path):
    nn.quantize(
        theirs,
        **FORM,
        class_predicate=lambda path, module: (
            hasattr(module, "to_quantized")
            and path.startswith("language_model")
            and module.weight.shape[-1] % 32 == 0
        ),
    )
    arrays = dict(tree_flatten(theirs.parameters()))
    parts = {name.rpartition(".")[2] for name in arrays if ".engram.embed." in name}
    assert parts == {"weight", "scales", "biases"}
    compare(write(tmp_path / "model", arrays, quantization=FORM), theirs)


@pytest.mark.parametrize(
    "of_tables",
    [
        "mxfp4",
        pytest.param("fp8 groups of 32", marks=pytest.mark.more),
        pytest.param("fp8 blocks of 32", marks=pytest.mark.more),
    ],
)
def test_published_fp8_and_fp4_with_powers_of_two(theirs, tmp_path, of_tables):
    """All weights have the stored values; tables whose rows have their scales may stay on disk."""
    arrays = published(dict(tree_flatten(theirs.parameters())))
    tensors = {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
    forms = "deepseek fp8 blocks of 32", f"deepseek {of_tables}"
    stored, dense = as_deepseek(tensors, *forms)
    packed = [name for name in stored if name.endswith(".scale")]
    for part in ("wq_a", "wo_b", "indexer.wq_b", "shared_experts.w1", "experts.1.w2"):
        assert any(f".{part}.scale" in name for name in packed), part
    assert sum(".engram." in name for name in packed) == 2 * 2
    expected = lazy_model(write(tmp_path / "dense", {}, dense), mx.float32)
    folder = write(tmp_path / "model", {}, stored)
    change_config(folder, quantization_config=FORMATS[forms[0]].quantization, expert_dtype="fp4")
    wanted = normalized(np.array(expected(mx.array([TEXT]))[0]))
    for rule in (None, TableRule("disk", 0)):
        model = lazy_model(folder, mx.float32, tables=rule)
        assert len(tables_of(model)) == (2 if rule and "blocks" not in of_tables else 0)
        assert farthest(np.array(model(mx.array([TEXT]))[0]), wanted) <= 1e-4
    assert model.layers[1].mlp.experts.switch_mlp.up_proj.mode == "mxfp4"
