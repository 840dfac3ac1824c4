# SPDX-License-Identifier: Apache-2.0
"""Sparse attention over the pool equals transformers' forward of whole texts.

Chunks, drafts that are rejected, and prefixes that are found, of texts on both sides of the number
of positions that a token attends to.
"""

import functools
from dataclasses import replace

import metal_interpreter
import mlx.core as mx
import numpy as np
import pytest
import torch
from engine.models.further import FAMILIES
from engine.models.published import FAMILIES as PUBLISHED
from engine.models.published import VOCAB, configuration, log_probabilities, make, write
from engine.models.recurrent import make_model
from engine.models.test_executor import BLOCK
from engine.models.test_latent_prompts import Served
from mlx_lm.models.cache import make_prompt_cache
from transformers import GlmMoeDsaConfig

from metal_kernels import kernel
from vllm_metal.engine.attention import sparse
from vllm_metal.engine.kv_cache.kernels import KERNELS
from vllm_metal.engine.kv_cache.scatter import ScatterKVCache
from vllm_metal.engine.models.loader import lazy_model
from vllm_metal.patches.mlx_patches import registry

pytestmark = pytest.mark.usefixtures("unfused")

NAME = "glm_moe_dsa"
TOPK = 24
#: Of each prompt its length, and how it is cut up: the last chunk is what remains.
PROMPTS = [(540, (512,)), (90, (31, 32)), (60, (1, 1, 20, 1)), (40, (7,) * 5), (20, (3,))]
TOLERANCE = 1e-3  # of log-probabilities in float32


def texts():
    rng = np.random.default_rng(8)
    return [rng.integers(3, VOCAB, length).tolist() for length, _ in PROMPTS]


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Of changes of the configuration: our model, and transformers'."""

    @functools.cache
    def of(index_topk=TOPK, **changes):
        changes |= {"index_topk": index_topk, "max_position_embeddings": 640}
        model = make(PUBLISHED[NAME], **changes)
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
    """Logits of all prompts' tokens."""
    cuts = [[*chunks, length - sum(chunks)] for length, chunks in PROMPTS]
    done, found = [0] * len(cuts), [[] for _ in cuts]
    while any(cuts):
        counts = {index: chunks.pop(0) for index, chunks in enumerate(cuts) if chunks}
        for index, logits in served.step(done, counts).items():
            found[index].append(logits)
            done[index] += counts[index]
    return [np.concatenate(parts) for parts in found]


@pytest.mark.parametrize("topk", [TOPK, 64])
def test_chunks_of_a_mixed_batch_equal_transformers(published, topk):
    """A chunk that begins with 64 tokens that attend to all builds keys and values of these."""
    ours, theirs = published(index_topk=topk)
    expected = log_probabilities(theirs, texts())
    assert len(set(np.concatenate(expected).argmax(-1).tolist())) > 20
    for found, wanted in zip(in_chunks(Served(ours, NAME, texts())), expected, strict=True):
        assert farthest(found, wanted) <= TOLERANCE
        assert np.array_equal(found.argmax(-1), wanted.argmax(-1))


def test_of_equal_scores_earlier_positions_are_chosen(published, monkeypatch):
    """With two heads, many scores are zero, and torch's `topk` does not state which it takes."""
    ours, theirs = published(index_n_heads=2)
    before = torch.Tensor.topk

    def topk(self, k, dim=-1):
        if self.shape[-1] == VOCAB or self.ndim != 3 or dim != -1:
            return before(self, k, dim)
        found = torch.sort(self, descending=True, stable=True)
        return torch.return_types.topk([part[..., :k] for part in found])

    monkeypatch.setattr(torch.Tensor, "topk", topk)
    expected = log_probabilities(theirs, texts()[1:])  # a long text has scores of 1e-8, too
    for found, wanted in zip(in_chunks(Served(ours, NAME, texts()))[1:], expected, strict=True):
        assert farthest(found, wanted) <= TOLERANCE
    monkeypatch.undo()
    others = log_probabilities(theirs, texts()[1:])
    assert max(np.abs(one - other).max() for one, other in zip(expected, others, strict=True)) > 1


@pytest.mark.parametrize("context", [TOPK - 2, TOPK + 30, 2 * BLOCK - 2])
def test_drafts_rejected_at_each_place(published, context):
    """The tokens behind an accepted draft are others, whose keys the next step overwrites."""
    ours, theirs = published()
    text, num_drafts = texts()[1], 4
    (expected,) = log_probabilities(theirs, [text])
    for accepted in range(num_drafts + 1):
        served = Served(ours, NAME, [text])
        served.step([0], {0: context})
        ids = served.requests.token_ids_np[served.requests["0"].req_idx]
        wrong = slice(context + 1 + accepted, context + 1 + num_drafts)
        ids[wrong] = (ids[wrong] + 7) % VOCAB
        (drafted,) = served.step([context], {0: 1 + num_drafts}).values()
        right = 1 + accepted
        assert farthest(drafted[:right], expected[context : context + right]) <= TOLERANCE
        ids[: len(text)] = text
        (found,) = served.step([context + right], {0: 12}).values()
        assert farthest(found, expected[context + right :][:12]) <= TOLERANCE


def with_shared_blocks(model, prompts, num_blocks, **options):
    """Serves two prompts, of which the second begins with blocks of the first."""
    served = Served(model, NAME, prompts, **options)
    table = served.requests.block_tables.tables_np[0]
    rows = [served.requests[name].req_idx for name in "01"]
    table[rows[1], :num_blocks] = table[rows[0], :num_blocks]
    return served


@pytest.mark.parametrize("num_blocks", [1, 2, 4])
def test_a_prefix_that_is_found_or_filled_beside_it(published, num_blocks):
    """Blocks that a step before has filled, and those that the same step fills."""
    ours, theirs = published()
    prompts, begin = texts()[:2], num_blocks * BLOCK
    prompts[1][:begin] = prompts[0][:begin]
    expected = log_probabilities(theirs, prompts)
    for before in (begin, begin - BLOCK // 2):
        served = with_shared_blocks(ours, prompts, num_blocks)
        served.step([0, 0], {0: before})
        found = served.step([before, begin], {0: 40, 1: 25})
        assert farthest(found[0], expected[0][before : before + 40]) <= TOLERANCE
        assert farthest(found[1], expected[1][begin : begin + 25]) <= TOLERANCE


def shifted(largest):
    """Chooses the position before each chosen one."""

    def choose(scores, values, topk):
        return largest(mx.roll(scores, -1, axis=-1), values, topk)

    return choose


def test_other_positions_say_something_else(published, monkeypatch):
    ours, theirs = published()
    expected = log_probabilities(theirs, texts())
    monkeypatch.setattr(sparse, "largest", shifted(sparse.largest))
    found = in_chunks(Served(ours, NAME, texts()))
    changed = [np.mean(o.argmax(-1) != e.argmax(-1)) for o, e in zip(found, expected, strict=True)]
    assert all(share > 0.2 for share in changed[:3])
    assert changed[-1] == 0  # as long as the number of chosen positions


def test_index_keys_of_a_found_block_count(published):
    """Zeros in place of one block's index keys, after a hit, change what the text says."""
    ours, _ = published()
    prompts, begin = texts()[:2], 4 * BLOCK
    prompts[1][:begin] = prompts[0][:begin]
    found = []
    for cleared in (False, True):
        served = with_shared_blocks(ours, prompts, 4)
        served.step([0, 0], {0: begin})
        served.run.begin_step()
        if cleared:
            block = int(served.requests.block_tables.tables_np[0][0, 1])
            for state in served.run.layer_states:
                if isinstance(state, ScatterKVCache) and state.keys.elements.shape[-1] == 16:
                    state.clear_blocks(np.array([block], np.int32))
        found.append(served.step([begin, begin], {1: 25})[1])
    assert np.mean(found[0].argmax(-1) != found[1].argmax(-1)) > 0.2


class Counted:
    """Rows that a forward reads of the pool, by the methods that gather them."""

    def __init__(self, monkeypatch):
        self.index_rows, self.chosen_rows = [], []
        keys_of, keys_at = ScatterKVCache.keys_of, ScatterKVCache.keys_at

        def of(cache, plan, bucket):
            self.index_rows.append(bucket.num_requests * bucket.context_len)
            return keys_of(cache, plan, bucket)

        def at(cache, plan, places):
            self.chosen_rows.append(places.size)
            return keys_at(cache, plan, places)

        monkeypatch.setattr(ScatterKVCache, "keys_of", of)
        monkeypatch.setattr(ScatterKVCache, "keys_at", at)


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
    """Or rejected where a layer would have nothing to attend to."""
    config = configuration(PUBLISHED[NAME]).to_dict()
    del config["indexer_types"]
    config |= kinds | {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
    _, arguments = registry.classes(dict(config))
    if derived is None:
        with pytest.raises(ValueError, match="indexer_types"):
            arguments.from_dict(config)
        return
    assert arguments.from_dict(config).indexer_types == derived
    assert GlmMoeDsaConfig(num_hidden_layers=4, **kinds).indexer_types == derived


def test_a_layer_reads_each_context_and_each_chosen_row_once(published, monkeypatch):
    """However many calls its scores take. Contexts are padded to whole blocks."""
    ours, _ = published()
    num_layers = len(ours.layers)  # of which every second has an indexer
    served = Served(ours, NAME, texts())
    served.step([0] * 5, {0: 256})
    monkeypatch.setattr(sparse, "MAX_SCORES", 2**14)
    monkeypatch.setattr(sparse, "MAX_BYTES", 2**16)
    counted = Counted(monkeypatch)
    served.step([256, 0, 0, 0, 0], {0: 100, 4: 20})  # the second attends to all
    assert counted.index_rows == [-(-356 // BLOCK) * BLOCK] * (num_layers // 2)
    assert sum(counted.chosen_rows) == 100 * TOPK * num_layers
    assert len(counted.chosen_rows) > num_layers


@pytest.mark.more
@pytest.mark.parametrize("elements", [mx.uint8, mx.int8])
def test_a_quantized_pool_says_the_same_in_chunks_of_any_length(published, elements):
    ours, _ = published()
    text = texts()[1]
    found = []
    for chunk in (1, 16, len(text)):
        served = Served(ours, NAME, [text], elements=elements)
        parts = []
        for begin in range(0, len(text), chunk):
            (logits,) = served.step([begin], {0: min(chunk, len(text) - begin)}).values()
            parts.append(logits)
        found.append(np.concatenate(parts))
    for other in found[1:]:
        assert np.mean(other.argmax(-1) == found[0].argmax(-1)) > 0.97


def test_our_kernels_write_and_gather():
    """Latents and index keys as large as the kernels take: chunks, a decode, a short text."""
    family = FAMILIES["deepseek_v32"]
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 64}
    config = family.config | sizes | {"num_hidden_layers": 2}
    model = make_model(replace(family, config=config), seed=5)
    rng = np.random.default_rng(4)
    prompts = [rng.integers(0, 64, length).tolist() for length in (30, 12)]
    dense = [np.array(model(mx.array([p]), cache=make_prompt_cache(model))[0]) for p in prompts]
    with kernel.using(metal_interpreter.metal_kernel):
        served = Served(model, "deepseek_v32", prompts, KERNELS)
        done, found = [0, 0], [[], []]
        for counts in ({0: 14, 1: 3}, {0: 15, 1: 6}, {0: 1, 1: 3}):
            for index, logits in served.step(done, counts).items():
                found[index].append(logits)
                done[index] += counts[index]
    for parts, wanted in zip(found, dense, strict=True):
        np.testing.assert_allclose(np.concatenate(parts), wanted, atol=2e-4, rtol=2e-4)
