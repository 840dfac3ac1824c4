# SPDX-License-Identifier: Apache-2.0
"""DeepSeek V4.1: other layouts of layers, rounded rows, 16-bit pools, and settings.

test_sparse.py compares its small model with formulas, as other families with transformers.
"""

import itertools

import mlx.core as mx
import numpy as np
import pytest
from engine.models.further import FAMILIES
from engine.models.published import VOCAB
from engine.models.recurrent import config_of, make_model
from engine.models.test_latent_prompts import Served
from engine.models.test_sparse import TOLERANCE, V41, farthest, in_chunks, normalized, texts
from engine.models.v41_formulas import Formulas, of_v41
from mlx_lm.models.cache import make_prompt_cache

from vllm_metal.engine.attention import compressed
from vllm_metal.engine.config_json.published_config import as_read
from vllm_metal.identity.model_files import ModelLoadError
from vllm_metal.patches.mlx_patches import registry
from vllm_metal.patches.mlx_patches.families import deepseek_v41

pytestmark = pytest.mark.usefixtures("unfused")

NO_SOURCES = {"kv_source_layer_ids": [], "index_source_layer_ids": []}
#: Layouts of layers, and whether the formulas have them.
LAYOUTS = {
    "entries without index keys": ({"kv_source_layer_ids": [1, 2, 4, 5]}, False),
    "entries of several slots": ({"compress_ratios": [0, 4, 4, 4, 8, 8, 8]}, True),
    "windows alone": (NO_SOURCES | {"compress_ratios": []}, True),
    "groups without entries": (NO_SOURCES | {"compress_ratios": [1] * 7}, True),
    "a source behind the blocks": ({"kv_source_layer_ids": [1, 4, 6]}, True),
    "no blocks": ({"candidate_topk_blocks": 0}, False),
    "a window between": ({"compress_ratios": [0, 3, 3, 3, 1, 0, 1]}, True),
    "a window of one": ({"sliding_window": 1}, True),
    "ids of layers that are cut off": ({"kv_source_layer_ids": [1, 4, 20]}, True),
}


@pytest.mark.parametrize(
    "layout",
    [
        "entries of several slots",
        *(pytest.param(each, marks=pytest.mark.more) for each in LAYOUTS if "slots" not in each),
    ],
)
def test_layouts_of_layers_equal_the_dense_forward(layout):
    changes, has_formulas = LAYOUTS[layout]
    model = make_model(of_v41(vocab_size=VOCAB, **changes), seed=3, drawn=True)
    for text, found in zip(texts(), in_chunks(Served(model, V41, texts())), strict=True):
        dense = normalized(model(mx.array([text]), cache=make_prompt_cache(model))[0])
        assert farthest(found, dense) <= TOLERANCE
        if has_formulas:
            assert farthest(Formulas(model).logits(text), dense) <= TOLERANCE


#: Four layers of each kind of DeepSeek V4.1's, whose rows are rounded.
ROUNDED = {
    "num_hidden_layers": 4,
    "compress_ratios": [0, 2, 1, 1],
    "kv_source_layer_ids": [1, 2],
    "index_source_layer_ids": [1, 2, 3],
    "candidate_source_layer_id": 2,
    "candidate_topk_blocks": 2,
    "index_topk": 4,
    "head_dim": 32,
    "index_head_dim": 32,
}


def test_rows_of_deepseek_v41_are_rounded(monkeypatch):
    """By weights with which no value is near a threshold."""
    model = make_model(of_v41(**ROUNDED), seed=46, drawn=True)
    formulas, text = Formulas(model), np.random.default_rng(3).integers(0, 64, 16).tolist()
    expected = normalized(formulas.logits(text))
    assert formulas.closest > 5e-5
    served, found = Served(model, V41, [text]), []
    for begin, end in itertools.pairwise((0, 1, 6, 7, 16)):
        found += served.step([begin], {0: end - begin}).values()
    assert farthest(np.concatenate(found), expected) <= TOLERANCE
    monkeypatch.setattr(Formulas, "rounded", lambda self, x, *_, **__: x)
    assert farthest(formulas.logits(text), expected) > 100 * TOLERANCE


def test_half_precision_pools_keep_rows_of_groups_in_two_parts(monkeypatch):
    """As precise as 16 bits of mantissa, as entries are computed in float32."""
    model = make_model(FAMILIES[V41], drawn=True)
    model.set_dtype(mx.bfloat16)
    for layer in model.layers:  # MLX's CPU backend gathers only float32
        layer.self_attn.o_a_proj.set_dtype(mx.float32)
        layer.mlp.experts.set_dtype(mx.float32)
    model.lm_head.set_dtype(mx.float32)  # NumPy has no bfloat16
    seen, groups_of = [], deepseek_v41.write_groups

    def noting(compressor, x, cache, by):
        found, firsts = groups_of(compressor, x, cache, by)
        seen.append((found.gate, compressor.gate_proj(x.astype(mx.float32)), by.size))
        return found, firsts

    monkeypatch.setattr(deepseek_v41, "write_groups", noting)
    served = Served(model, V41, [texts()[1]], elements=mx.bfloat16)
    served.step([0], {0: 24})
    found, expected, size = seen[-1]
    expected = np.array(expected).reshape(found.shape)
    assert found.shape[1] == size and found.dtype == mx.float32
    np.testing.assert_allclose(np.array(found), expected, rtol=2**-15, atol=2**-20)


def test_blocks_limit_later_choices(monkeypatch):
    model = make_model(of_v41(vocab_size=VOCAB), drawn=True)
    served = [in_chunks(Served(model, V41, texts()))]
    monkeypatch.setattr(compressed, "in_blocks", lambda numbers, count, _: mx.ones(count, mx.bool_))
    served.append(in_chunks(Served(model, V41, texts())))
    changed = [np.mean(o.argmax(-1) != e.argmax(-1)) for o, e in zip(*served, strict=True)]
    assert changed[0] > 0.1, changed


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"sliding_window": 0}, "sliding_window=0"),
        ({"o_groups": 3}, "o_groups=3.*num_attention_heads=4"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_type='linear'"),
        ({"rope_scaling": {"rope_type": "yarn", "attention_factor": 1.2}}, "attention_factor=1.2"),
        ({"compress_ratios": [0, 2, 2, 1, 1, 1, 1]}, "layer 3 reads entries or choices of layer 1"),
        ({"kv_source_layer_ids": [0, 1, 4]}, r"kv_source_layer_ids=.*no groups for \[0\]"),
        ({"candidate_topk_blocks": 3}, "candidate_topk_blocks=3.*index_topk=8"),
        ({"scoring_func": "relu"}, "scoring_func='relu'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"n_shared_experts": 2}, "n_shared_experts=2"),
        ({"attention_bias": True}, "attention_bias=True"),
        # Of layers that draft, and of no layer.
        ({"dspark_markov_rank": 256, "engram_n_heads": 7, "num_nextn_predict_layers": 3}, None),
    ],
)
def test_settings_of_deepseek_v41_that_are_not_computed_are_rejected(keys, message):
    config = config_of(of_v41(**keys)) | {"vision_config": {"hidden_size": 8}}
    _, arguments = registry.classes(config)
    if message is None:
        arguments.from_dict(config | as_read(config, V41, arguments))
        return
    with pytest.raises((ValueError, ModelLoadError), match=message):
        arguments.from_dict(config | as_read(config, V41, arguments))
