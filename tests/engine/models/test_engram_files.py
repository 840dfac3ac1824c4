# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with DeepSeek V4.1's n-gram memory by the names of publishers and of mlx-vlm."""

import json
import re
from collections import Counter

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import torch
from engine.models.recurrent import VOCAB, config_of, draw
from engine.models.test_sparse import farthest, normalized
from engine.models.v41_formulas import MEMORY, TOKEN_MAP, of_v41
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from safetensors.torch import save_file

from vllm_metal.engine.models.loader import lazy_model
from vllm_metal.engine.weights.disk_tables import TableRule, tables_of
from vllm_metal.identity.model_files import ModelLoadError
from vllm_metal.patches.mlx_patches.mlx_vlm_families import family

pytestmark = pytest.mark.usefixtures("unfused")

VISION = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 2}
VISION |= {"intermediate_size": 64}
CONFIG = config_of(of_v41(**MEMORY | {"engram_head_dim": 32})) | {"vision_config": VISION}
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


def write(folder, arrays, **keys):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | keys))
    (folder / "engram_token_map.json").write_text(json.dumps(TOKEN_MAP))
    mx.save_safetensors(str(folder / "model.safetensors"), arrays, {"format": "mlx"})
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


def e2m1(array):
    """Rounds to values of four bits; returns the numbers, two in a byte, and the values."""
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    numbers = np.abs(np.abs(array)[..., None] - table).argmin(-1)
    values = np.copysign(table[numbers], array)
    numbers = (numbers + 8 * np.signbit(array)).astype(np.uint8)
    return torch.from_numpy((numbers[..., ::2] | numbers[..., 1::2] << 4).view(np.int8)), values


def e4m3(array):
    rounded = torch.from_numpy(array).to(torch.float8_e4m3fn)
    return rounded, rounded.float().numpy()


def stored_with_powers(array, most, rounding, rows):
    """Returns a matrix in blocks of `rows` by 32 with powers of two, and the values it stores."""
    count = -(-len(array) // rows)
    padded = np.zeros((count * rows, array.shape[1]))
    padded[: len(array)] = array
    blocks = np.abs(padded).reshape(count, rows, -1, 32).max((1, 3))
    exponents = np.ceil(np.log2(np.maximum(blocks, 1e-9) / most))
    scale = np.repeat(np.repeat(2.0**exponents, rows, 0)[: len(array)], 32, 1)
    values, read = rounding((array / scale).astype(np.float32))
    powers = torch.from_numpy((exponents + 127).astype(np.uint8)).view(torch.float8_e8m0fnu)
    return {"weight": values, "scale": powers}, read * scale


FP8, FP4 = (448, e4m3), (6, e2m1)
#: Published weights with powers of two, their format and the rows of a block.
STORED = (
    (r"attn\.(w[qk]\w+|wo_b|indexer\.wq_b)|shared_experts|engram\.wkv", FP8, 32),
    (r"\.experts\.\d+\.", FP4, 1),
)


@pytest.mark.parametrize(
    ("of_table", "rows_of_table"),
    [
        (FP4, 1),
        pytest.param(FP8, 1, marks=pytest.mark.more),
        pytest.param(FP8, 32, marks=pytest.mark.more),
    ],
)
def test_published_fp8_and_fp4_with_powers_of_two(theirs, tmp_path, of_table, rows_of_table):
    """All weights have the stored values; tables whose rows have their scales may stay on disk."""
    stored, dense, counts = {}, {}, Counter()
    for name, array in published(dict(tree_flatten(theirs.parameters()))).items():
        dense[name] = array = np.array(array)
        stored[name] = torch.from_numpy(array.copy())
        for pattern, form, rows in (*STORED, (r"engram\.embed", of_table, rows_of_table)):
            if re.search(pattern, name) and array.ndim == 2 and array.shape[1] % 32 == 0:
                del stored[name]
                parts, dense[name] = stored_with_powers(array, *form, rows)
                stored |= {f"{name.removesuffix('weight')}{p}": each for p, each in parts.items()}
                counts[pattern] += 1
    assert len(counts) == 3 and counts[r"engram\.embed"] == 2
    arrays = {name: mx.array(array.astype(np.float32)) for name, array in dense.items()}
    expected = lazy_model(write(tmp_path / "dense", arrays), mx.float32)
    stated = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0"}
    stated |= {"activation_scheme": "dynamic", "weight_block_size": [32, 32]}
    folder = write(tmp_path / "model", {}, quantization_config=stated)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    wanted = normalized(np.array(expected(mx.array([TEXT]))[0]))
    for rule in (None, TableRule("disk", 0)):
        model = lazy_model(folder, mx.float32, tables=rule)
        assert len(tables_of(model)) == (2 if rule and rows_of_table == 1 else 0)
        assert farthest(np.array(model(mx.array([TEXT]))[0]), wanted) <= 1e-4


def test_scales_of_other_blocks_are_rejected(theirs, tmp_path):
    name, folder = "layers.1.engram.embed", write(tmp_path / "model", {})
    stored = {f"{name}.weight": torch.zeros((240, 32), dtype=torch.int8)}
    stored[f"{name}.scale"] = torch.zeros((240, 4), dtype=torch.uint8)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ModelLoadError, match=rf"{name}.weight \(I8\) has powers of two of \[240, 4"
    ):
        lazy_model(folder, mx.float32)
