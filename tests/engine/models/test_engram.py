# SPDX-License-Identifier: Apache-2.0
"""DeepSeek V4.1's n-gram memory equals the paper's formulas, and each part of it has an effect."""

import json
import sys
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from engine.models.recurrent import VOCAB, config_of
from engine.models.test_executor import BLOCK
from engine.models.test_latent_prompts import Served
from engine.models.test_sparse import V41, farthest, normalized, with_shared_blocks
from engine.models.v41_formulas import (
    MEMORY,
    TOKEN_MAP,
    Formulas,
    ngram_rows,
    of_v41,
    primes_from,
    with_memory,
    write_with_memory,
)
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from vllm_metal.engine.attention.layers import SequenceLayer, attention_layers
from vllm_metal.engine.config_json.published_config import as_read
from vllm_metal.engine.models.loader import lazy_model
from vllm_metal.identity.model_files import ModelLoadError
from vllm_metal.patches.mlx_patches import mlx_vlm_families, registry
from vllm_metal.patches.mlx_patches.families import engram

pytestmark = pytest.mark.usefixtures("unfused")

TOLERANCE = 1e-4
LENGTHS = 16, 1, 7
#: The published sizes (mlx-vlm's defaults), without a table.
PUBLISHED = SimpleNamespace(
    engram_layer_ids=[1, 14],
    engram_num_embeddings=[384006168, 384016682],
    engram_max_ngram_size=4,
    engram_vocab_size=16000000,
    engram_n_heads=8,
    engram_head_dim=256,
    engram_pad_token_id=2,
    engram_compressed_vocab_size=99092,
    vocab_size=129280,
)


def texts(*lengths):
    rng = np.random.default_rng(8)
    return [rng.integers(0, VOCAB, length).tolist() for length in lengths or LENGTHS]


@pytest.fixture(scope="module")
def model():
    return with_memory()


@pytest.fixture(scope="module")
def expected(model):
    formulas = Formulas(model, token_map=TOKEN_MAP)
    return [normalized(formulas.logits(text)) for text in texts()]


def in_chunks(model, prompts, chunk):
    return Served(model, V41, prompts).in_chunks([*map(len, prompts)], chunk)


def dense(model, text, chunk=None):
    cache, parts = make_prompt_cache(model), range(0, len(text), chunk or len(text))
    found = [model(mx.array([text[n : n + (chunk or len(text))]]), cache=cache)[0] for n in parts]
    return np.concatenate([np.array(each) for each in found])


@pytest.mark.parametrize("layer", PUBLISHED.engram_layer_ids)
def test_rows_of_the_published_sizes(layer):
    """Products of ids and multipliers have up to 63 bits."""
    rng = np.random.default_rng(layer)
    token_map = rng.integers(0, 99092, 129280).tolist()
    token_map[5] = 99091
    tokens = [5, *rng.integers(0, 129280, 40).tolist()]
    ids = engram.NgramIds(PUBLISHED, layer)
    engram.use_token_map(ids, PUBLISHED, token_map)
    found = np.array(ids(mx.array([tokens]), mx.zeros(1), None))[0]
    wanted = ngram_rows(PUBLISHED, token_map, layer, tokens)
    assert np.array_equal(found, wanted) and found.max() > 15 / 16 * 384006168


def test_streams_with_the_memory_equal_the_formulas(model):
    text, streams = texts()[0], np.random.default_rng(1).normal(size=(16, 3, 64))
    for index in MEMORY["engram_layer_ids"]:
        layer = model.layers[index]
        rows = ngram_rows(model.args, TOKEN_MAP, index, text)
        ids = layer.ngrams(mx.array([text]), layer.engram.q_weight, None)
        assert np.array_equal(np.array(ids)[0], rows)
        found = layer.engram(mx.array(streams[None].astype(np.float32)), ids)
        formulas = Formulas(model, token_map=TOKEN_MAP)
        wanted = formulas.remembered(f"model.layers.{index}", streams, rows)
        np.testing.assert_allclose(np.array(found)[0], wanted, atol=TOLERANCE)
        assert np.abs(wanted - streams).max() > 0.5


def test_dense_forwards_equal_the_formulas(model, expected):
    for text, wanted in zip(texts(), expected, strict=True):
        assert farthest(dense(model, text), wanted) <= TOLERANCE
    for chunk in (1, 3):
        assert farthest(dense(model, texts()[2], chunk), expected[2]) <= TOLERANCE


@pytest.mark.parametrize(
    "chunk", [3, *(pytest.param(each, marks=pytest.mark.more) for each in (1, 16))]
)
def test_chunks_equal_the_formulas(model, expected, chunk):
    for found, wanted in zip(in_chunks(model, texts(), chunk), expected, strict=True):
        assert farthest(found, wanted) <= TOLERANCE


@pytest.mark.more
def test_layers_of_other_orders_and_heads_equal_the_formulas():
    """The first layer, one of each kind, and all orders up to four."""
    sizes = {"engram_layer_ids": [0, 3, 6], "engram_max_ngram_size": 4, "engram_n_heads": 4}
    rows = np.reshape(primes_from(54, 3 * 12), (3, 12)).sum(1).tolist()
    sizes |= {"engram_num_embeddings": rows, "engram_vocab_size": 54}
    model = with_memory(seed=3, **sizes)
    for text in texts(40, 9):
        wanted = normalized(Formulas(model, token_map=TOKEN_MAP).logits(text))
        assert farthest(dense(model, text), wanted) <= TOLERANCE
        assert farthest(in_chunks(model, [text], 7)[0], wanted) <= TOLERANCE


@pytest.mark.parametrize(
    "accepted", [1, *(pytest.param(count, marks=pytest.mark.more) for count in (0, 2, 3))]
)
def test_drafts_rejected_at_each_place(model, expected, accepted):
    text, context, num_drafts = texts()[0], 7, 3
    served = Served(model, V41, [text])
    served.step([0], {0: context})
    ids = served.requests.token_ids_np[served.requests["0"].req_idx]
    ids[context + 1 + accepted : context + 1 + num_drafts] += 7
    ids %= VOCAB
    served.step([context], {0: 1 + num_drafts}, (num_drafts, accepted))
    ids[: len(text)] = text
    begin = context + 1 + accepted
    (found,) = served.step([begin], {0: 4}).values()
    assert farthest(found, expected[0][begin : begin + 4]) <= TOLERANCE


def test_a_prefix_that_is_found(model):
    prompts = texts(BLOCK + 9, BLOCK + 5)
    prompts[1][:BLOCK] = prompts[0][:BLOCK]
    served = with_shared_blocks(model, V41, prompts, 1)
    served.step([0, 0], {0: BLOCK})
    found = served.step([BLOCK, BLOCK], {0: 9, 1: 5})
    for index, text in enumerate(prompts):
        wanted = normalized(Formulas(model, token_map=TOKEN_MAP).logits(text))[BLOCK:]
        assert farthest(found[index], wanted) <= TOLERANCE


def forget_one_token(monkeypatch, model):
    before = engram.tokens_before

    def without(tokens, cache, count, weight):
        found = before(tokens, cache, count, weight)
        return [*found[:-1], mx.zeros_like(found[-1])]

    monkeypatch.setattr(engram, "tokens_before", without)


def drop_an_order(monkeypatch, model):
    before = engram.NgramIds.__call__

    def without(self, *given):
        rows = before(self, *given)
        heads = MEMORY["engram_n_heads"]
        return mx.concatenate([rows[..., :heads], rows[..., :heads]], axis=-1)

    monkeypatch.setattr(engram.NgramIds, "__call__", without)


def clear_a_row(monkeypatch, model):
    table = model.layers[4].engram.embed
    row = ngram_rows(model.args, TOKEN_MAP, 4, texts()[0])[10, 0]
    cleared = mx.where(mx.arange(len(table.weight))[:, None] == int(row), 0, table.weight)
    monkeypatch.setitem(table, "weight", cleared)


def skip_rounding(monkeypatch, model):
    module = sys.modules["mlx_vlm.models.deepseek_v41.engram"]
    monkeypatch.setattr(module, "fake_quant_fp8_ue8m0", lambda x: x)


@pytest.mark.parametrize("fault", [forget_one_token, drop_an_order, clear_a_row, skip_rounding])
def test_each_part_of_the_memory_counts(model, expected, fault, monkeypatch):
    text = texts()[0]
    fault(monkeypatch, model)
    found = dense(model, text)
    assert farthest(found[10:11], expected[0][10:11]) > 10 * TOLERANCE


def test_tokens_that_the_map_joins_are_one(model):
    """Tokens 3 and 43 have one id; with another token the memory's rows differ."""
    ids = model.layers[1].ngrams
    rows = [np.array(ids(mx.array([[3, other, 9]]), mx.zeros(1), None))[0] for other in (3, 43, 4)]
    assert np.array_equal(rows[0], rows[1]) and not (rows[0] == rows[2])[1:].all()


def test_the_history_is_a_state_of_few_bytes(model):
    layers = [each for each in attention_layers(model, V41) if each.state_bytes]
    assert [layer.name for layer in layers] == ["layers.1.4", "layers.4.3"]
    assert all(isinstance(layer, SequenceLayer) for layer in layers)
    assert layers[0].form.shapes == ((2, 8),)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"engram_layer_ids": [1, 1]}, r"engram_layer_ids=\[1, 1\]"),
        ({"engram_layer_ids": [1]}, r"engram_num_embeddings=\[240, 306\].*choose from \[240\]"),
        ({"engram_num_embeddings": [240, 307]}, r"engram_num_embeddings=\[240, 307\]"),
        ({"engram_vocab_size": 54}, "engram_num_embeddings=.*engram_vocab_size=54"),
        ({"engram_n_heads": 4}, "engram_num_embeddings=.*engram_n_heads=4"),
        ({"engram_max_ngram_size": 1}, "engram_max_ngram_size=1.*at least 2"),
        ({"engram_head_dim": 9}, "engram_head_dim=9.*no multiple of 32"),
        ({"engram_compressed_vocab_size": 65}, "engram_compressed_vocab_size=65.*vocab_size=64"),
        ({"engram_pad_token_id": 64}, "engram_pad_token_id=64"),
    ],
)
def test_sizes_that_disagree_are_rejected(keys, message):
    config = config_of(of_v41(**MEMORY | keys))
    _, arguments = registry.classes(config)
    with pytest.raises((ValueError, ModelLoadError), match=message):
        arguments.from_dict(config | as_read(config, V41, arguments))


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(mlx_vlm_families, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"engram_layer_ids of config.json needs mlx-vlm.*vlm"):
        with_memory()


def published_names(weights):
    """Returns a model's arrays by the published names of a few of them."""
    return {name.removeprefix("model."): array for name, array in weights if ".engram." in name}


def test_published_names_of_the_memory(model):
    stored = published_names(tree_flatten(model.parameters()))
    found = model.sanitize(dict(stored))
    assert set(found) == {f"model.{name}" for name in stored} and len(found) == 2 * 4


@pytest.fixture
def folder(tmp_path):
    write_with_memory(tmp_path / "model")
    return tmp_path / "model"


def test_a_folder_is_loaded_with_its_map(folder):
    model, text = lazy_model(folder, mx.float32), texts()[0]
    wanted = normalized(Formulas(model, token_map=TOKEN_MAP).logits(text))
    assert farthest(dense(model, text), wanted) <= TOLERANCE


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (TOKEN_MAP[:9], "engram_compressed_vocab_size=40 .*has 39 ids for 9 tokens"),
        ([0] * 64, "engram_compressed_vocab_size=40 .*has 1 ids"),
        ({"0": 1}, "engram_token_map.json is no list of ids"),
        (None, "engram_token_map.json or tokenizer.json"),
    ],
)
def test_a_map_that_does_not_fit_is_rejected(folder, content, message):
    path = folder / "engram_token_map.json"
    path.unlink() if content is None else path.write_text(json.dumps(content))
    with pytest.raises(ModelLoadError, match=message):
        lazy_model(folder, mx.float32)


def test_a_map_is_computed_from_the_tokenizer(tmp_path):
    """Case, accents and surrounding blanks do not count, but a blank itself does."""
    tokens = ["a", "A", " a", "Á", "b", " ", "\n", "ab", "Ab "]
    tokenizer = Tokenizer(models.WordLevel({t: i for i, t in enumerate(tokens)}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    names = ["a", "a", "a", "a", "b", " ", " ", "ab", "ab"]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    folder = tmp_path / "model"
    write_with_memory(folder, engram_compressed_vocab_size=len(numbers))
    (folder / "engram_token_map.json").unlink()
    (tmp_path / "tokenizer.json").rename(folder / "tokenizer.json")
    model, text = lazy_model(folder, mx.float32), [0, 1, 4, 8, 3, 5, 7, 6, 2, 50, 4]
    ids = model.layers[1].ngrams(mx.array([text]), mx.zeros(1), None)
    token_map = [numbers[name] for name in names] + [numbers["a"]] * (VOCAB - 9)
    assert np.array_equal(np.array(ids)[0], ngram_rows(model.args, token_map, 1, text))
