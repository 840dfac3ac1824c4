# SPDX-License-Identifier: Apache-2.0
"""Selection of tables that stay on disk, and equality of their rows."""

import json
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import torch
from engine.models import further, of_mlx_vlm
from engine.models.published import FAMILIES, make
from engine.models.recurrent import write_model
from engine.models.v41_formulas import MEMORY, TOKEN_MAP, of_v41
from engine.weights.toys import DENSE, stored_as, write_stored
from mlx.utils import tree_flatten
from mlx_lm.models import gemma4_text
from mlx_lm.utils import load_config, quantize_model, save_config, save_model
from safetensors.torch import load_file, save_file

from vllm_metal.engine.models.loader import lazy_model
from vllm_metal.engine.weights.disk_tables import TableRule, tables_of
from vllm_metal.engine.weights.lazy import outlines_only
from vllm_metal.identity.model_files import ModelLoadError

DISK = TableRule("disk", 0)
PER_LAYER = 32  # values of the table per layer, in groups that MLX quantizes
DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}


def folder_of(tmp_path, name="gemma4_text", dtype="float32", changes=None, **options):
    sizes = {"hidden_size_per_layer_input": PER_LAYER, "hidden_size": 96}
    model = make(FAMILIES[name], **sizes, **(changes or {}))
    model.to(getattr(torch, dtype)).save_pretrained(tmp_path / "published", **options)
    return tmp_path / "published"


class Judged(TableRule):
    """Keeps tables on disk; the loaded bytes of all weights that it judged by."""

    weights = 0

    def keeps_on_disk(self, table, weights, num_layers):
        object.__setattr__(self, "weights", weights)
        return True


def check(folder, dtype=mx.float32):
    """The model with its tables on disk has no such parameters, and their rows are the loaded ones.

    Returns the tables.
    """
    rule = Judged("disk", 0)
    loaded, served = lazy_model(folder, dtype), lazy_model(folder, dtype, tables=rule)
    tables = tables_of(served)
    expected = {
        path: module
        for path, module in loaded.named_modules()
        if path.endswith(("embed_tokens_per_layer", "ngram_embedding"))
    }
    weights = sum(array.nbytes for _, array in tree_flatten(loaded.parameters()))
    assert rule.weights == pytest.approx(weights, rel=0.02)  # scales may stay in float32
    assert served_names(served) == {
        name for name in served_names(loaded) if name.rpartition(".")[0] not in expected
    }
    for table, module in zip(tables, expected.values(), strict=True):
        num_rows = module.weight.shape[0]
        ids = mx.array(np.random.default_rng(0).integers(0, num_rows, (3, 50)))
        found, rows = table(ids), module(ids)
        assert found.dtype == rows.dtype and float(mx.abs(rows).max()) > 0
        assert mx.array_equal(found, rows)
    return tables


def served_names(model):
    return {name for name, _ in tree_flatten(model.parameters())}


@pytest.mark.parametrize(
    ("name", "stored", "served"),
    [
        ("gemma4_text", "bfloat16", "float32"),
        ("gemma3n_text", "float32", "float32"),
        pytest.param("gemma4_text", "float16", "bfloat16", marks=pytest.mark.more),
        pytest.param("gemma3n_text", "bfloat16", "float16", marks=pytest.mark.more),
    ],
)
def test_rows_of_published_files(tmp_path, name, stored, served):
    folder = folder_of(tmp_path, name, stored)
    (table,) = check(folder, DTYPES[served])
    values = FAMILIES[name].config["num_hidden_layers"] * PER_LAYER
    assert table.nbytes == FAMILIES[name].config["vocab_size_per_layer_input"] * values * (
        DTYPES[stored].size
    )


def test_rows_of_files_in_several_parts_under_multimodal_names(tmp_path):
    """mlx-lm renames the tensors of Gemma 4's whole checkpoints."""
    folder = folder_of(tmp_path, changes={"tie_word_embeddings": True}, max_shard_size="200kB")
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 2
    for path in files:
        renamed = {
            name.replace("model.", "model.language_model.", 1): tensor
            for name, tensor in load_file(path).items()
        }
        save_file(renamed, path, {"format": "pt"})
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    names = content["weight_map"]
    content["weight_map"] = {
        name.replace("model.", "model.language_model.", 1): file for name, file in names.items()
    }
    index.write_text(json.dumps(content))
    text = load_config(folder)
    config = {"model_type": "gemma4", "text_config": text, "vocab_size": text["vocab_size"]}
    config |= {"architectures": ["Gemma4ForConditionalGeneration"], "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    check(folder)


@pytest.mark.parametrize(
    ("mode", "bits", "of_table"),
    [
        ("affine", 4, None),
        ("affine", 4, {"group_size": 32, "bits": 8}),
        ("mxfp4", 4, None),
        pytest.param("affine", 4, False, marks=pytest.mark.more),
        pytest.param("nvfp4", 4, None, marks=pytest.mark.more),
        pytest.param("mxfp8", 8, None, marks=pytest.mark.more),
    ],
)
@pytest.mark.parametrize("name", ["gemma4_text", pytest.param("gemma3n", marks=pytest.mark.more)])
def test_rows_of_folders_that_mlx_lm_quantized(tmp_path, name, mode, bits, of_table):
    published = folder_of(tmp_path, name if name == "gemma4_text" else "gemma3n_text", "bfloat16")
    config, model = load_config(published), lazy_model(published, mx.bfloat16)

    def predicate(path, part):
        return True if of_table is None or "per_layer" not in path else of_table

    size = {"affine": 32, "mxfp4": 32, "nvfp4": 16, "mxfp8": 32}[mode]
    model, config = quantize_model(model, config, size, bits, mode, quant_predicate=predicate)
    folder = tmp_path / "quantized"
    folder.mkdir()
    save_model(folder, model)
    save_config(config, folder / "config.json")
    for dtype in (mx.bfloat16, mx.float32):
        check(folder, dtype)


NGRAM_HEADS = 6
#: Rows that MLX quantizes, and layers that formats pack.
NGRAMS = {"ple_embed_dim": NGRAM_HEADS * PER_LAYER, "head_dim": 32, "hidden_size": 64}
NGRAMS |= {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}


def folder_of_ngrams(tmp_path, dtype="float32", **options):
    text = FAMILIES["qwen4_exp"].config["text_config"] | NGRAMS
    model = make(FAMILIES["qwen4_exp"], text_config=text)
    model.to(getattr(torch, dtype)).save_pretrained(tmp_path / "published", **options)
    return tmp_path / "published"


@pytest.mark.parametrize("size", ["100GB", pytest.param("100kB", marks=pytest.mark.more)])
def test_rows_of_ngrams_in_shards(tmp_path, size):
    """Two tables of four shards, which may be in different files."""
    folder = folder_of_ngrams(tmp_path, max_shard_size=size)
    files = [load_file(path) for path in folder.glob("*.safetensors")]
    assert (len(files) > 4) == (size == "100kB")
    assert sum(".ngram_embedding.shard_" in name for tensors in files for name in tensors) == 2 * 4
    sums = [sum((53, 59, 61, 67, 71, 73)), sum((79, 83, 89, 97, 101, 103))]  # primes from 50 on
    assert {table.nbytes for table in check(folder)} == {n * PER_LAYER * 4 for n in sums}


@pytest.mark.more
def test_rows_of_ngrams_beside_packed_layers(tmp_path):
    folder = folder_of_ngrams(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    stored, _ = stored_as("modelopt nvfp4", tensors, (*DENSE, "experts"))
    assert len(stored) > len(tensors)
    write_stored("modelopt nvfp4", stored, folder)
    check(folder, mx.bfloat16)


@pytest.mark.more
@pytest.mark.parametrize("in_shards", [False, True])
def test_rows_of_ngrams_that_mlx_quantized(tmp_path, in_shards):
    """As mlx-vlm writes them, and as one array."""
    published = folder_of_ngrams(tmp_path, "bfloat16")
    config, model = load_config(published), lazy_model(published, mx.bfloat16)
    model, config = quantize_model(
        model, config, 32, 4, quant_predicate=lambda path, part: "ngram_embedding" in path
    )
    (tmp_path / "quantized").mkdir()
    save_model(tmp_path / "quantized", model)
    save_config(config, tmp_path / "quantized" / "config.json")
    if in_shards:
        path = tmp_path / "quantized" / "model.safetensors"
        arrays = {}
        for name, array in mx.load(str(path)).items():
            stem, _, part = name.rpartition(".")
            if stem.endswith("ngram_embedding"):
                for number, rows in enumerate(mx.split(array, 4)):
                    arrays[f"{stem}.shards.{number}.{part}"] = mx.contiguous(rows)
            else:
                arrays[name] = array
        mx.save_safetensors(str(path), arrays, {"format": "mlx"})
    check(tmp_path / "quantized", mx.bfloat16)


def test_a_table_that_is_changed_as_it_is_loaded_stays_in_memory(tmp_path, monkeypatch):
    folder = folder_of(tmp_path)
    check(folder)
    own = gemma4_text.Model.sanitize

    def scaled(self, weights):
        return {
            name: array * 2 if "embed_tokens_per_layer" in name else array
            for name, array in own(self, weights).items()
        }

    monkeypatch.setattr(gemma4_text.Model, "sanitize", scaled)
    loaded, served = lazy_model(folder, mx.float32), lazy_model(folder, mx.float32, tables=DISK)
    assert not tables_of(served) and served_names(served) == served_names(loaded)


@pytest.mark.parametrize("rule", [None, DISK])
def test_a_table_with_fewer_rows_than_the_model_has_is_an_error(tmp_path, rule):
    folder = folder_of(tmp_path)
    config = load_config(folder)
    config["vocab_size_per_layer_input"] += 1
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="embed_tokens_per_layer"):
        lazy_model(folder, mx.float32, tables=rule)


_LONGCAT = further.FAMILIES["longcat_flash_ngram"]
#: Has two tables that are more than a layer together, and less each.
_NGRAMS = _LONGCAT.config | {"emb_split_num": 1, "ngram_vocab_size_ratio": 32}
#: Small models of other families; their tables' paths, number and quantization.
OTHERS = {
    "deepseek_v41": (
        *(of_v41(**MEMORY | {"engram_head_dim": 32}), ".engram.embed.", 2),
        {"group_size": 32, "bits": 4, "mode": "affine"},
    ),
    "limite": (
        *(of_mlx_vlm.FAMILIES["limite"], ".value_embeds.", 1),
        {"group_size": 16, "bits": 4, "mode": "nvfp4"},
    ),
    "longcat_flash_ngram": (
        *(replace(_LONGCAT, config=_NGRAMS), ".embedders.", 2),
        {"group_size": 32, "bits": 8, "mode": "affine"},
    ),
}


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("name", OTHERS)
def test_logits_with_tables_of_other_families(tmp_path, name, quantized):
    """Their tables together are more than a layer, or all of them are loaded."""
    family, mark, count, form = OTHERS[name]
    folder = Path(write_model(family, tmp_path / "model", drawn=True))
    if name == "deepseek_v41":
        (folder / "engram_token_map.json").write_text(json.dumps(TOKEN_MAP))
    if quantized:
        model = lazy_model(folder, mx.float32)

        nn.quantize(model, **form, class_predicate=lambda path, _: mark in f"{path}.")
        arrays = dict(tree_flatten(model.parameters()))
        assert sum(name.endswith(".scales") for name in arrays) == count
        mx.save_safetensors(str(folder / "model.safetensors"), arrays, {"format": "mlx"})
        config = load_config(folder) | {"quantization": form}
        save_config(config, folder / "config.json")
    loaded, served = (lazy_model(folder, mx.float32, tables=rule) for rule in (None, DISK))
    tables = tables_of(served)
    ids = mx.array(np.random.default_rng(0).integers(3, 60, (2, 40)))
    assert len(tables) == count
    assert mx.array_equal(served(ids), loaded(ids))
    own = {path for path in served_names(loaded) if mark in path}
    assert served_names(served) == served_names(loaded) - own
    nbytes = sum(table.nbytes for table in tables)
    weights = sum(array.nbytes for _, array in tree_flatten(loaded.parameters()))
    layer = (weights - nbytes) / len(loaded.layers)
    kept = lazy_model(folder, mx.float32, tables=TableRule("auto", weights))
    assert len(tables_of(kept)) == (count if nbytes > layer else 0)


@pytest.mark.parametrize(
    ("choice", "memory", "on_disk"),
    [("auto", 1.9, True), ("auto", 2.1, False), ("memory", 0, False), ("disk", 100, True)],
)
def test_tables_stay_on_disk_if_weights_take_half_of_the_memory(tmp_path, choice, memory, on_disk):
    """Judges by the loaded size, and reads no tensor."""
    folder = folder_of(tmp_path, changes={"vocab_size_per_layer_input": 1000})
    weights = sum(a.nbytes for _, a in tree_flatten(lazy_model(folder, mx.bfloat16).parameters()))
    rule = TableRule(choice, int(memory * weights))
    assert bool(tables_of(lazy_model(folder, mx.bfloat16, tables=rule))) == on_disk
    with outlines_only():
        assert bool(tables_of(lazy_model(folder, mx.bfloat16, tables=rule))) == on_disk


def test_a_table_of_less_than_a_layer_is_no_matter():
    rule = TableRule("auto", 1000)
    assert rule.keeps_on_disk(table=300, weights=900, num_layers=3)
    assert not rule.keeps_on_disk(table=100, weights=900, num_layers=3)
    assert not rule.keeps_on_disk(table=300, weights=500, num_layers=3)
