# SPDX-License-Identifier: Apache-2.0
"""Drafts are the draft model's greedy tokens, whatever the outcome of earlier drafts."""

import mlx.core as mx
import numpy as np
import pytest
from metal_interpreter import metal_kernel
from mlx.utils import tree_map_with_path
from mlx_lm.models import llama, olmo3
from mlx_lm.models.cache import make_prompt_cache

from metal_kernels import kernel
from vllm_metal.engine.attention.layers import attention_layers
from vllm_metal.engine.batch.requests import BlockTables
from vllm_metal.engine.kv_cache.kernels import KERNELS
from vllm_metal.engine.kv_cache.scatter import SCATTER
from vllm_metal.engine.models.compiled import Graphs
from vllm_metal.engine.models.paged_layers import PagedLayers
from vllm_metal.engine.models.parts import ModelParts
from vllm_metal.engine.spec_decode.draft_model import MAX_BEHIND, DraftModelProposer, GreedyModel
from vllm_metal.engine.spec_decode.passes import Passes, PassNetwork
from vllm_metal.engine.spec_decode.proposer import DraftRequest
from vllm_metal.patches.mlx_patches import seam

pytestmark = pytest.mark.usefixtures("unfused")

BLOCK, VOCAB, MAX_LEN, MAX_NUM_REQS, K = 16, 64, 160, 6, 4
TIE = 1e-4  # of two logits, which range over some 3: sums in another order move them by 1e-6
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
WINDOWED = {"model_type": "olmo3", "sliding_window": 24}  # every fourth layer is a full one


class Counting(PassNetwork):
    """Counts the passes whose graph Python builds."""

    def __init__(self, network):
        self.module, self._network = network.module, network
        self.passes = 0

    def next_tokens(self, inputs, caches):
        self.passes += 1
        return self._network.next_tokens(inputs, caches)


class Bench:
    """A proposer on a small pool, its requests' true tokens, and mlx-lm's model as reference."""

    def __init__(
        self,
        windowed=False,
        max_len=MAX_LEN,
        backend=SCATTER,
        allowed=True,
        num_blocks=80,
        num_layers=4,
    ):
        seam.install()
        self.rng = np.random.default_rng(0)
        mx.random.seed(0)
        family, config = (olmo3, CONFIG | WINDOWED) if windowed else (llama, CONFIG)
        config = config | {"num_hidden_layers": num_layers}
        self.model = family.Model(family.ModelArgs.from_dict(config))
        # Large weights around attention make the likeliest token depend on all before it.
        self.model.update(
            tree_map_with_path(
                lambda name, array: 4 * array if "self_attn" in name else array,
                self.model.parameters(),
            )
        )
        mx.eval(self.model.parameters())
        layers = attention_layers(self.model, "test")
        pools = {
            layer.name: backend.allocate(num_blocks, BLOCK, layer.storage_key, mx.float32)
            for layer in layers
        }
        group_of = dict.fromkeys(pools, 0)
        self.network = Counting(GreedyModel(ModelParts(self.model)))
        self.paged = PagedLayers(layers, pools, group_of, BLOCK)
        self.graphs = Graphs(allowed)
        self.tables = BlockTables(1, MAX_NUM_REQS, MAX_LEN // BLOCK + 1)
        self.free = self.rng.permutation(np.arange(1, num_blocks)).tolist()
        passes = Passes(self.network, self.paged, self.tables, self.graphs, K)
        self.proposer = DraftModelProposer(passes, MAX_NUM_REQS, K, max_len)
        self.token_ids_np = np.zeros((MAX_NUM_REQS, MAX_LEN), np.int32)
        self.known = np.zeros(MAX_NUM_REQS, np.int32)

    def begin(self, req_idx, tokens, shared=()):
        """Starts a request with `shared` whole blocks from the prefix cache."""
        own = [self.free.pop() for _ in range(MAX_LEN // BLOCK - len(shared))]
        self.tables.replace(req_idx, [[*shared, *own]])
        self.token_ids_np[req_idx, : len(tokens)] = tokens
        self.known[req_idx] = len(tokens)
        self.proposer.begin_request(req_idx, len(shared) * BLOCK)

    def propose(self, req_indices, limits, ends=None):
        """Returns [R] lists of drafts; `ends` where the step still computes prompts."""
        req_indices = np.array(req_indices, np.int32)
        num_tokens = self.known[req_indices] if ends is None else np.array(ends, np.int32)
        drafts = self.proposer.propose(
            DraftRequest(self.token_ids_np, req_indices, num_tokens, np.array(limits, np.int32))
        )
        token_ids = np.array(drafts.token_ids)
        assert token_ids.shape == (len(req_indices), K)
        return [
            row[:n].tolist() for row, n in zip(token_ids, drafts.counts_np.tolist(), strict=True)
        ]

    def learn(self, req_idx, tokens):
        start = self.known[req_idx]
        self.token_ids_np[req_idx, start : start + len(tokens)] = tokens
        self.known[req_idx] += len(tokens)

    def check(self, req_idx, drafts):
        """Checks that each draft is the model's likeliest token after all tokens before it."""
        text = self.token_ids_np[req_idx, : self.known[req_idx]].tolist()
        cache = make_prompt_cache(self.model)
        logits = np.array(self.model(mx.array([text + drafts]), cache=cache)[0, len(text) - 1 :])
        for row, token in zip(logits, drafts, strict=False):  # nothing is drafted after the last
            assert row.max() - row[token] <= TIE

    def prompt(self, length):
        return self.rng.integers(0, VOCAB, length).tolist()


@pytest.mark.parametrize(
    ("backend", "windowed"),
    [
        (SCATTER, False),
        (SCATTER, True),
        pytest.param(KERNELS, True, marks=pytest.mark.more),
        pytest.param(KERNELS, False, marks=pytest.mark.slow),
    ],
)
def test_drafts_equal_greedy_generation_after_any_pattern_of_acceptance(backend, windowed):
    with kernel.using(metal_kernel):
        generate(Bench(windowed, backend=backend))


def generate(bench):
    for req_idx, length in enumerate([1, 15, 16, 30]):
        bench.begin(req_idx, bench.prompt(length))
    seen = set()
    for step in range(24):
        limits = bench.rng.integers(0, K + 1, 4) if step % 5 else np.zeros(4, int)
        order = bench.rng.permutation(4)
        for req_idx, drafts in zip(order, bench.propose(order, limits[order]), strict=True):
            assert len(drafts) == limits[req_idx]
            bench.check(req_idx, drafts)
            seen.update(drafts)
            accepted = int(bench.rng.integers(0, len(drafts) + 1))
            wrong = (drafts[accepted] + 1) % VOCAB if accepted < len(drafts) else 3
            bench.learn(req_idx, [*drafts[:accepted], wrong])
    assert len(seen) > 10  # not one token over and over, whatever the context


def test_prompts_in_chunks_beside_a_request_that_drafts():
    bench = Bench()
    bench.begin(0, bench.prompt(20))
    prompt = bench.prompt(75)
    bench.begin(1, prompt)
    for end in (20, 40, 75):
        (drafts, none) = bench.propose([0, 1], [3, 0], [bench.known[0], end])
        assert none == []
        bench.check(0, drafts)
        bench.learn(0, [*drafts[:1], 7])
    bench.learn(1, [5])
    (drafts,) = bench.propose([1], [4])
    bench.check(1, drafts)


def test_blocks_of_the_prefix_cache_hold_the_draft_models_context_too():
    bench = Bench()
    prefix = bench.prompt(2 * BLOCK)
    bench.begin(0, prefix + bench.prompt(9))
    bench.propose([0], [0], [41])
    shared = bench.tables.tables_np[0][0, :2].tolist()
    bench.begin(1, prefix + bench.prompt(5), shared)
    (drafts,) = bench.propose([1], [4])
    bench.check(1, drafts)


def test_a_request_index_taken_over_by_another_request():
    bench = Bench()
    bench.begin(2, bench.prompt(50))
    bench.propose([2], [4])
    bench.proposer.forget_request(2)
    bench.begin(2, bench.prompt(18))
    (drafts,) = bench.propose([2], [4])
    bench.check(2, drafts)


def test_nothing_runs_while_nobody_wants_drafts_until_enough_has_gathered():
    bench = Bench(allowed=False)
    bench.begin(0, bench.prompt(10))
    bench.propose([0], [2])
    before = bench.network.passes
    for _ in range(MAX_BEHIND):
        bench.learn(0, bench.prompt(1))
        bench.propose([0], [0])
    assert bench.network.passes == before
    bench.learn(0, bench.prompt(1))
    (drafts,) = bench.propose([0], [3])
    bench.check(0, drafts)
    for _ in range(MAX_BEHIND + 1):
        bench.learn(0, bench.prompt(1))
        bench.propose([0], [0])
    assert bench.network.passes == before + 4  # three passes of drafts, one to catch up


@pytest.mark.parametrize("lag", [3, MAX_BEHIND])
def test_a_completed_request_leaves_whole_blocks_to_others(lag):
    bench = Bench(allowed=False)
    start = 2 * BLOCK + 1 - lag
    bench.begin(0, bench.prompt(start))
    bench.propose([0], [2])
    for _ in range(lag):
        bench.learn(0, bench.prompt(1))
        bench.propose([0], [0])
    before = bench.network.passes
    for _ in range(2):  # the second time there is nothing left to write
        here, none = np.array([0], np.int32), np.array([0], np.int32)
        request = DraftRequest(bench.token_ids_np, here, here + 2 * BLOCK + 1, none)
        bench.proposer.complete_draft_kv(request)
    assert bench.network.passes - before == 1
    text = bench.token_ids_np[0, : 2 * BLOCK].tolist()
    shared = bench.tables.tables_np[0][0, :2].tolist()
    bench.proposer.forget_request(0)
    bench.begin(1, text + bench.prompt(3), shared)
    (drafts,) = bench.propose([1], [4])
    bench.check(1, drafts)


def test_proposing_twice_from_the_same_tokens_gives_the_same():
    bench = Bench()
    bench.begin(0, bench.prompt(33))
    first = bench.propose([0], [4])
    assert bench.propose([0], [4]) == first


@pytest.mark.parametrize("max_len", [40, MAX_LEN])
def test_no_drafts_beyond_the_longest_text_of_target_or_draft_model(max_len):
    bench = Bench(max_len=max_len)
    bench.begin(0, bench.prompt(max_len - 2))
    (drafts,) = bench.propose([0], [4])
    assert len(drafts) == 2
    bench.check(0, drafts)
    if max_len == 40:
        bench.learn(0, [*drafts, 1])
        bench.begin(1, bench.prompt(12))
        assert [len(found) for found in bench.propose([0, 1], [4, 4])] == [0, 4]
        bench.learn(0, bench.prompt(30))
        assert bench.propose([0], [4]) == [[]]
