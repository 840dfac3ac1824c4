# SPDX-License-Identifier: Apache-2.0
"""Sparse attention over the pool equals transformers' forward of whole texts.

Chunks, drafts that are rejected, and prefixes that are found, of texts on both sides of the number
of positions that a token attends to.
"""

import functools
import inspect
import itertools
import sys
from dataclasses import replace

import metal_interpreter
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import torch
from engine.models import of_mlx_vlm
from engine.models.further import FAMILIES
from engine.models.nested import FAMILIES as NESTED
from engine.models.published import FAMILIES as PUBLISHED
from engine.models.published import VOCAB, configuration, make, write
from engine.models.published import log_probabilities as of_transformers
from engine.models.recurrent import make_model
from engine.models.test_executor import BLOCK
from engine.models.test_latent_prompts import Served
from engine.models.v41_formulas import Formulas, of_v41
from mlx_lm.models.cache import make_prompt_cache
from transformers import GlmMoeDsaConfig, MiniMaxM3VLConfig

from metal_kernels import kernel
from vllm_metal.engine.attention import paged_cache, sparse
from vllm_metal.engine.attention.compressed_layer import RowLayer
from vllm_metal.engine.attention.index_layer import IndexLayer
from vllm_metal.engine.attention.layers import attention_layers
from vllm_metal.engine.attention.paged_cache import LatentCache
from vllm_metal.engine.config_json.published_config import as_read
from vllm_metal.engine.kv_cache.kernels import KERNELS
from vllm_metal.engine.kv_cache.scatter import ScatterKVCache
from vllm_metal.engine.models.loader import lazy_model
from vllm_metal.patches.mlx_patches import registry
from vllm_metal.patches.mlx_patches.families import hy_v4
from vllm_metal.patches.mlx_patches.seam import Scoring

pytestmark = pytest.mark.usefixtures("unfused")

#: Families that choose positions, one that chooses blocks of them for each K/V head, and two that
#: choose groups beside layers with states, of latents and of K/V. DeepSeek V4's chooses entries
#: that stand for four positions each, beside others for 128 and a window. V4.1's chooses entries of
#: six positions and of one, which several layers share, as their choices.
DSA, HY4, M3, GLM5, V4 = "glm_moe_dsa", "hy_v4", "minimax_m3_vl", "glm5_next", "deepseek_v4"
QWEN4, V41 = "qwen4_exp", "deepseek_v41"
LIKE_OTHERS = QWEN4, V41  # they choose as GLM5 and V4
NAMES = (DSA, HY4, M3, GLM5, V4, QWEN4, V41)
WITH_STATES = GLM5, QWEN4
TOPK = 24
BLOCK_OF_M3, GROUP, BLOCK_OF_V41 = 12, 6, 3  # a block of the pool is no multiple of them
#: Each prompt's length, and how it is cut up: the last chunk is what remains.
PROMPTS = [(540, (512,)), (90, (31, 32)), (60, (1, 1, 20, 1)), (40, (7,) * 5), (20, (3,))]
TOLERANCE = 1e-3  # of log-probabilities in float32


def texts():
    rng = np.random.default_rng(8)
    return [rng.integers(3, VOCAB, length).tolist() for length, _ in PROMPTS]


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


def log_probabilities(theirs, prompts):
    if isinstance(theirs, Formulas):  # without a class of transformers
        return [normalized(theirs.logits(prompt)) for prompt in prompts]
    return of_transformers(theirs, prompts)


def small(name, topk, **changes):
    """Makes transformers' model whose tokens attend to at most `topk` positions."""
    if name == V41:  # mlx-lm's; as few blocks as have so many entries
        topk //= 2
        sizes = {"index_topk": topk, "candidate_topk_blocks": -(-(topk - 1) // BLOCK_OF_V41) + 1}
        sizes |= {"vocab_size": VOCAB, "candidate_block_size": BLOCK_OF_V41}
        sizes |= {"compress_ratios": [0, 6, 6, 6, 1, 1, 1]}
        return make_model(of_v41(**sizes | changes), drawn=True)
    changes |= {"max_position_embeddings": 640}
    if name not in (M3, *WITH_STATES):
        topk //= 4 if name == V4 else 1
        return make(PUBLISHED[name], **changes | {"index_topk": topk})
    if name == GLM5:
        changes |= {"index_topk": topk // GROUP * GROUP, "index_kpool": GROUP}
    elif name == QWEN4:
        changes |= {"indexer_budget": topk // GROUP * GROUP, "indexer_compress_ratio": GROUP}
    else:
        changes |= {"index_topk_blocks": topk // BLOCK_OF_M3, "index_block_size": BLOCK_OF_M3}
    return make(PUBLISHED[name], text_config=PUBLISHED[name].config["text_config"] | changes)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Our model and transformers', by family and configuration changes."""

    @functools.cache
    def of(name, topk=TOPK, equal_scores=False, **changes):
        model = small(name, topk, **changes)
        if equal_scores:
            with torch.no_grad():
                for layer in model.model.language_model.layers[1:]:
                    layer.self_attn.indexer.q_norm.weight.fill_(-1)  # queries are zero
        if name == V41:
            return model, Formulas(model)
        folder = tmp_path_factory.mktemp("published")
        write(model, folder)
        return lazy_model(folder, mx.float32), model

    return of


def normalized(logits):
    logits = np.array(logits, np.float32)
    largest = logits.max(-1, keepdims=True)
    return logits - largest - np.log(np.exp(logits - largest).sum(-1, keepdims=True))


def farthest(found, expected):
    return np.abs(normalized(found) - expected).max()


def in_chunks(served):
    """Returns logits of all prompts' tokens."""
    cuts = [[*chunks, length - sum(chunks)] for length, chunks in PROMPTS]
    done, found = [0] * len(cuts), [[] for _ in cuts]
    while any(cuts):
        counts = {index: chunks.pop(0) for index, chunks in enumerate(cuts) if chunks}
        for index, logits in served.step(done, counts).items():
            found[index].append(logits)
            done[index] += counts[index]
    return [np.concatenate(parts) for parts in found]


@pytest.mark.parametrize(
    ("name", "topk"),
    [
        *((DSA, TOPK), (DSA, 64), (HY4, TOPK), (M3, TOPK), (M3, 64), (GLM5, TOPK), (V4, TOPK)),
        *((QWEN4, TOPK), (V41, TOPK)),
        *(pytest.param(name, 64, marks=pytest.mark.more) for name in (HY4, GLM5, V4, QWEN4, V41)),
    ],
)
def test_chunks_of_a_mixed_batch_equal_transformers(published, name, topk):
    """A chunk that starts with 64 tokens that attend to all builds their keys and values."""
    ours, theirs = published(name, topk=topk)
    expected = log_probabilities(theirs, texts())
    assert len(set(np.concatenate(expected).argmax(-1).tolist())) > 20
    for found, wanted in zip(in_chunks(Served(ours, name, texts())), expected, strict=True):
        assert farthest(found, wanted) <= TOLERANCE
        assert np.array_equal(found.argmax(-1), wanted.argmax(-1))
    if name == V41:
        for text, wanted in zip(texts(), expected, strict=True):
            dense = ours(mx.array([text]), cache=make_prompt_cache(ours))[0]
            assert farthest(dense, wanted) <= TOLERANCE


@pytest.mark.parametrize(
    "name",
    [DSA, M3, GLM5, V4, *(pytest.param(each, marks=pytest.mark.more) for each in LIKE_OTHERS)],
)
def test_of_equal_scores_earlier_positions_are_chosen(published, name, monkeypatch):
    """With two heads, many scores are zero, and torch's `topk` does not state which it takes."""
    heads = {QWEN4: {"indexer_n_heads": 2}, M3: {"equal_scores": True}}
    ours, theirs = published(name, **heads.get(name, {"index_n_heads": 2}))
    before, ndim = torch.Tensor.topk, {M3: 4, QWEN4: 1}.get(name, 3)

    def topk(self, k, dim=-1):
        if self.shape[-1] == VOCAB or self.ndim != ndim or dim not in (-1, ndim - 1):
            return before(self, k, dim)
        found = torch.sort(self, descending=True, stable=True)
        return torch.return_types.topk([part[..., :k] for part in found])

    monkeypatch.setattr(torch.Tensor, "topk", topk)
    expected = log_probabilities(theirs, texts()[1:])  # a long text has scores of 1e-8, too
    for found, wanted in zip(in_chunks(Served(ours, name, texts()))[1:], expected, strict=True):
        assert farthest(found, wanted) <= TOLERANCE
    monkeypatch.undo()
    if name == V41:
        theirs = Formulas(ours, last=True)
    others = log_probabilities(theirs, texts()[1:])
    assert max(np.abs(one - other).max() for one, other in zip(expected, others, strict=True)) > 1


@pytest.mark.parametrize(
    ("name", "context"),
    [
        *itertools.product((DSA, HY4, M3), (TOPK - 2, TOPK + 30, 2 * BLOCK - 2)),
        *((V4, TOPK + 30), (V4, 126)),  # before the end of a group of 4, and of 128
        *((V41, TOPK + 30), (V41, 2 * BLOCK - 4)),  # before one of six, and behind one
        pytest.param(V4, 2 * BLOCK - 2, marks=pytest.mark.more),
    ],
)
def test_drafts_rejected_at_each_place(published, name, context):
    """Other tokens follow an accepted draft; the next step overwrites the rejected keys."""
    ours, theirs = published(name)
    text, num_drafts = texts()[0][: context + 20], 4
    (expected,) = log_probabilities(theirs, [text])
    for accepted in range(num_drafts + 1):
        served = Served(ours, name, [text])
        served.step([0], {0: context})
        ids = served.requests.token_ids_np[served.requests["0"].req_idx]
        wrong = slice(context + 1 + accepted, context + 1 + num_drafts)
        ids[wrong] = (ids[wrong] + 7) % VOCAB
        of_step = {0: 1 + num_drafts}
        (drafted,) = served.step([context], of_step, (num_drafts, accepted)).values()
        right = 1 + accepted
        assert farthest(drafted[:right], expected[context : context + right]) <= TOLERANCE
        ids[: len(text)] = text
        (found,) = served.step([context + right], {0: 12}).values()
        assert farthest(found, expected[context + right :][:12]) <= TOLERANCE


def with_shared_blocks(model, name, prompts, num_blocks):
    """Serves two prompts that share their first blocks."""
    served = Served(model, name, prompts)
    table = served.requests.block_tables.tables_np[0]
    rows = [served.requests[name].req_idx for name in "01"]
    table[rows[1], :num_blocks] = table[rows[0], :num_blocks]
    return served


@pytest.mark.parametrize(
    ("name", "num_blocks"),
    [
        *itertools.product((DSA, HY4, M3), (1, 2, 4)),
        *((V4, 7), (V4, 9)),  # before and behind the end of a group of 128
        *((V41, 3), (V41, 4)),  # at the end of a group of six, and within one
        *(pytest.param(V4, count, marks=pytest.mark.more) for count in (1, 4)),
    ],
)
def test_a_prefix_that_is_found_or_filled_beside_it(published, name, num_blocks):
    """Blocks that a step before has filled, and those that the same step fills.

    States are found behind whole blocks only.
    """
    ours, theirs = published(name)
    prompts, begin = texts()[:2], num_blocks * BLOCK
    prompts[1] = [*prompts[0][:begin], *prompts[1][-26:]]
    expected = log_probabilities(theirs, prompts)
    for before in (begin,) if name in WITH_STATES else (begin, begin - BLOCK // 2):
        served = with_shared_blocks(ours, name, prompts, num_blocks)
        served.step([0, 0], {0: before})
        found = served.step([before, begin], {0: 40, 1: 25})
        assert farthest(found[0], expected[0][before : before + 40]) <= TOLERANCE
        assert farthest(found[1], expected[1][begin : begin + 25]) <= TOLERANCE


def shifted(largest):
    """Shifts each chosen position back by one."""

    def choose(scores, topk):
        return largest(mx.roll(scores, -1, axis=-1), topk)

    return choose


@pytest.mark.parametrize(
    "name",
    [
        DSA,
        M3,
        GLM5,
        V4,
        *(pytest.param(each, marks=pytest.mark.more) for each in (HY4, *LIKE_OTHERS)),
    ],
)
def test_other_positions_say_something_else(published, name, monkeypatch):
    ours, theirs = published(name)
    expected = log_probabilities(theirs, texts())
    monkeypatch.setattr(sparse, "largest", shifted(sparse.largest))
    found = in_chunks(Served(ours, name, texts()))
    changed = [np.mean(o.argmax(-1) != e.argmax(-1)) for o, e in zip(found, expected, strict=True)]
    assert all(share > (0.1 if name == QWEN4 else 0.2) for share in changed[:3]), changed
    if name not in (V4, V41):  # whose entries are chosen from those of longer texts, too
        assert changed[-1] == 0  # as long as the number of chosen positions


def has_index_keys(layer):
    if isinstance(layer, RowLayer):
        return layer.role == "index"
    return isinstance(layer, IndexLayer)


def test_index_keys_of_a_found_block_count(published, name):
    """Zeros in place of one block's index keys change the text after a hit."""
    ours, _ = published(name)
    prompts, begin = texts()[:2], 4 * BLOCK
    prompts[1][:begin] = prompts[0][:begin]
    found = []
    for cleared in (False, True):
        served = with_shared_blocks(ours, name, prompts, 4)
        served.step([0, 0], {0: begin})
        served.run.begin_step()
        if cleared:
            block = int(served.requests.block_tables.tables_np[0][0, 1])
            for layer, state in zip(
                attention_layers(ours, name), served.run.layer_states, strict=True
            ):
                if has_index_keys(layer):
                    assert isinstance(state, ScatterKVCache)
                    state.clear_blocks(np.array([block], np.int32))
        found.append(served.step([begin, begin], {1: 25})[1])
    assert np.mean(found[0].argmax(-1) != found[1].argmax(-1)) > 0.2


def ignore_sinks(owner, attend):
    """Plants a fault in one of the attention functions."""

    def plant(monkeypatch, model):
        before = getattr(owner, attend)

        def without(*args):
            return before(*(a._replace(sinks=None) if isinstance(a, Scoring) else a for a in args))

        monkeypatch.setattr(owner, attend, without)

    return plant


def lift_limit(monkeypatch, model):
    for layer in model.layers[1:]:
        monkeypatch.setattr(layer.mlp.switch_mlp, "activation", lambda x, gate: nn.silu(gate) * x)


def open_gate(monkeypatch, model):
    monkeypatch.setattr(hy_v4.mx, "sigmoid", mx.ones_like)


def weigh_streams_equally(monkeypatch, model):
    language = sys.modules["mlx_vlm.models.hy_v4.language"]
    monkeypatch.setattr(language, "hc_expand", lambda x, residual, _: residual + x[:, :, None])


def drop_epsilon(monkeypatch, model):
    connection = sys.modules["mlx_vlm.models.hy_v4.hyper_connection"].IdentityHyperConnectionPre
    monkeypatch.setattr(connection, "__call__", inspect.unwrap(connection.__call__))


def rotate_first(monkeypatch, model):
    monkeypatch.setattr(
        hy_v4.RotatesLast, "__call__", lambda self, x, offset: self.rope(x, offset=offset)
    )


FAULTS = {
    "no sinks of those that attend to all": ignore_sinks(LatentCache, "_attend_to_all"),
    "no sinks of those that attend to chosen": ignore_sinks(paged_cache, "attend_to_chosen"),
    "no limit of experts": lift_limit,
    "an open gate": open_gate,
    "streams of equal weights": weigh_streams_equally,
    "no epsilon of the streams' weights": drop_epsilon,
    "an indexer that rotates the first elements": rotate_first,
}


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_a_fault_in_any_part_of_hy4_is_seen(published, fault, monkeypatch):
    ours, theirs = published(HY4)
    prompts = texts()[2:]
    expected = log_probabilities(theirs, prompts)
    if fault is not None:
        FAULTS[fault](monkeypatch, ours)
    served = Served(ours, HY4, prompts)
    found = served.step([0] * 3, {index: len(text) for index, text in enumerate(prompts)})
    off = max(farthest(found[index], wanted) for index, wanted in enumerate(expected))
    assert off <= TOLERANCE if fault is None else off > 10 * TOLERANCE


@pytest.mark.parametrize("topk", [None, 16])
def test_published_keys_of_minimax_m3_choose_as_transformers_reads_them(topk):
    """Without these keys, all layers attend to all positions."""
    text, sparse = configuration(PUBLISHED[M3]).text_config.to_dict(), None
    for key in [key for key in text if key.startswith("index_")] + ["layer_types"]:
        del text[key]
    if topk is not None:
        sparse = {"sparse_topk_blocks": topk, "sparse_block_size": 4, "sparse_local_block": 2}
        sparse |= {"sparse_num_index_heads": 6, "sparse_index_dim": 32}
        sparse["sparse_attention_freq"] = [1, 0, 1, 1]
        text["sparse_attention_config"] = sparse
    config = {"model_type": M3, "text_config": dict(text)}
    _, arguments = registry.classes(config)
    theirs = MiniMaxM3VLConfig(text_config=dict(text)).text_config
    found = arguments.from_dict(config | as_read(config, M3, arguments)).text_config
    names = [key for key in theirs.to_dict() if key.startswith("index_")]
    assert len(names) == 5
    for key in (*names, "layer_types"):
        assert getattr(found, key) == getattr(theirs, key)
    assert ("minimax_m3_sparse" in found.layer_types) == (topk is not None)


class Counted:
    """Counts pool rows that a forward reads, by gathering method."""

    def __init__(self, monkeypatch):
        self.index_rows, self.chosen_rows = [], []
        keys_of, rows_at = ScatterKVCache.keys_of, ScatterKVCache.rows_at

        def of(cache, plan, bucket):
            self.index_rows.append(bucket.num_requests * bucket.context_len)
            return keys_of(cache, plan, bucket)

        def at(cache, plan, read_slots):
            self.chosen_rows.append(read_slots.size)
            return rows_at(cache, plan, read_slots)

        monkeypatch.setattr(ScatterKVCache, "keys_of", of)
        monkeypatch.setattr(ScatterKVCache, "rows_at", at)


@pytest.mark.parametrize(
    ("kinds", "derived"),
    [
        ({}, ["full"] * 4),
        ({"index_topk_freq": 2}, ["full", "full", "shared", "full"]),
        ({"index_topk_pattern": "FSSF"}, ["full", "shared", "shared", "full"]),
        ({"indexer_types": ["shared", "full", "full", "full"]}, None),
        ({"indexer_types": ["full", "shared"]}, None),
    ],
)
def test_kinds_of_indexers_are_derived_as_transformers_does(kinds, derived):
    """A layer that would have nothing to attend to is rejected."""
    config = configuration(PUBLISHED[DSA]).to_dict()
    del config["indexer_types"]
    config |= kinds | {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
    _, arguments = registry.classes(dict(config))
    if derived is None:
        with pytest.raises(ValueError, match="indexer_types"):
            arguments.from_dict(config)
        return
    assert arguments.from_dict(config).indexer_types == derived
    assert GlmMoeDsaConfig(num_hidden_layers=4, **kinds).indexer_types == derived


@pytest.mark.parametrize("name", [DSA, HY4, M3])
def test_a_layer_reads_each_context_and_each_chosen_row_once(published, name, monkeypatch):
    """In any number of calls; contexts are padded to whole blocks."""
    ours, _ = published(name)
    # Every second layer has an indexer, of M3's all but the first, for two K/V heads.
    num_layers, topk = len(ours.layers), TOPK
    num_indexers, num_readers = (3, 3 * 2) if name == M3 else (num_layers // 2, num_layers)
    if name == GLM5:
        num_indexers, num_readers, topk = 2, 3, TOPK + GROUP - 1
    if name == QWEN4:  # for two K/V heads
        num_indexers, num_readers, topk = 3, 3 * 2, TOPK + GROUP - 1
    served = Served(ours, name, texts())
    served.step([0] * 5, {0: 256})
    monkeypatch.setattr(sparse, "MAX_SCORES", 2**14)
    monkeypatch.setattr(sparse, "MAX_BYTES", 2**16)
    counted = Counted(monkeypatch)
    served.step([256, 0, 0, 0, 0], {0: 100, 4: 20})  # the second attends to all
    assert counted.index_rows == [-(-356 // BLOCK) * BLOCK] * num_indexers
    assert sum(counted.chosen_rows) == 100 * topk * num_readers
    assert len(counted.chosen_rows) > num_readers


@pytest.mark.more
@pytest.mark.parametrize("elements", [mx.uint8, mx.int8])
def test_a_quantized_pool_says_the_same_in_chunks_of_any_length(published, name, elements):
    ours, _ = published(name)
    text = texts()[1]
    found = []
    for chunk in (1, 16, len(text)):
        served = Served(ours, name, [text], elements=elements)
        parts = []
        for begin in range(0, len(text), chunk):
            (logits,) = served.step([begin], {0: min(chunk, len(text) - begin)}).values()
            parts.append(logits)
        found.append(np.concatenate(parts))
    for other in found[1:]:
        assert np.mean(other.argmax(-1) == found[0].argmax(-1)) > 0.97


def of_kernels(name):
    """A small model with rows as large as the kernels take."""
    if name == GLM5:
        family = of_mlx_vlm.FAMILIES[GLM5]
        text = family.config["text_config"]
        layers = {"num_hidden_layers": 2, "layer_types": text["layer_types"][:2]}
        layers |= {key: text[key][:2] for key in ("indexer_types", "mlp_layer_types")}
        text = text | layers | {"kv_lora_rank": 512, "index_head_dim": 64}
        return make_model(replace(family, config={"text_config": text}), seed=5, drawn=True)
    if name == QWEN4:
        family = of_mlx_vlm.FAMILIES[QWEN4]
        layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
        layers |= {"ple_layer_ids": [1], "head_dim": 64, "indexer_head_dim": 64}
        text = family.config["text_config"] | layers
        return make_model(replace(family, config={"text_config": text}), seed=5, drawn=True)
    if name == M3:
        family, text = NESTED[M3], NESTED[M3].config["text_config"]
        sparse = text["sparse_attention_config"] | {"sparse_index_dim": 64, "sparse_block_size": 4}
        text = text | {"head_dim": 64, "sparse_attention_config": sparse}
        return make_model(replace(family, config=family.config | {"text_config": text}), seed=5)
    if name == V4:
        family = of_mlx_vlm.FAMILIES[V4]
        sizes = {"head_dim": 256, "index_head_dim": 64, "qk_rope_head_dim": 32}
        layers = {"num_hidden_layers": 2, "compress_ratios": [4, 128], "num_hash_layers": 1}
        return make_model(replace(family, config=family.config | sizes | layers), drawn=True)
    if name == V41:
        sizes = {"head_dim": 128, "index_head_dim": 64, "qk_rope_head_dim": 32}
        return make_model(of_v41(**sizes), drawn=True)
    family = of_mlx_vlm.FAMILIES[HY4] if name == HY4 else FAMILIES[name]
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 64}
    config = family.config | sizes | {"num_hidden_layers": 2}
    if "indexer_types" in config:
        config["indexer_types"] = ["full", "shared"]
    # Hy4's own sinks and weights of streams are zeros.
    return make_model(replace(family, config=config), seed=5, drawn=name == HY4)


@pytest.mark.parametrize(
    "name",
    [
        *("deepseek_v32", V4, V41),
        *(pytest.param(each, marks=pytest.mark.more) for each in (HY4, M3, *WITH_STATES)),
    ],
)
def test_our_kernels_write_and_gather(name, monkeypatch):
    """Runs chunks, a decode and a short text."""
    model = of_kernels(name)
    if name == V41:  # float32 near a threshold would be rounded to either side
        for rounds in ("_fake_quant_fp8", "_fake_quant_fp4"):
            module = sys.modules[type(model).__module__]
            monkeypatch.setattr(module, rounds, lambda x, *_, **__: x)
    rng = np.random.default_rng(4)
    prompts = [rng.integers(0, 64, length).tolist() for length in (30, 12)]
    dense = [np.array(model(mx.array([p]), cache=make_prompt_cache(model))[0]) for p in prompts]
    with kernel.using(metal_interpreter.metal_kernel):
        served = Served(model, name, prompts, KERNELS)
        done, found = [0, 0], [[], []]
        for counts in ({0: 14, 1: 3}, {0: 15, 1: 6}, {0: 1, 1: 3}):
            for index, logits in served.step(done, counts).items():
                found[index].append(logits)
                done[index] += counts[index]
    for parts, wanted in zip(found, dense, strict=True):
        np.testing.assert_allclose(np.concatenate(parts), wanted, atol=2e-4, rtol=2e-4)
