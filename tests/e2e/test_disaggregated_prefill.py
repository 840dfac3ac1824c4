# SPDX-License-Identifier: Apache-2.0
"""Disaggregated prefill gives the same output as a single engine."""

from dataclasses import replace
from math import ceil

import numpy as np
import pytest
from e2e.drafting import STATELESS
from e2e.drafting import VOCAB as TOY_VOCAB
from e2e.fuzz.models import VOCAB
from e2e.peers import (
    blocks_of,
    consumer,
    decode,
    free_port,
    prefill,
    producer,
    role_engine,
    runner_of,
)

from vllm_metal.engine.kv_cache.pages import page_rows
from vllm_metal.kv_transfer.connector import MetalKVConnector
from vllm_metal.kv_transfer.peer.client import Peer
from vllm_metal.kv_transfer.peer.view import PeerView

BLOCK = 16
HEADS = ("eagle", "eagle3", "mtp", *STATELESS)
NUM_DRAFTS = 3
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": NUM_DRAFTS,
    "prompt_lookup_max": 2,
    "prompt_lookup_min": 1,
}


def cases(vocabulary, block):
    """Yields (prompt, known prefix) for each length and known part."""
    rng = np.random.default_rng(8)
    for length in (1, block - 1, block, block + 1, 2 * block, 2 * block + 1):
        for known in (0, length // 2, length):
            prompt = rng.integers(2, vocabulary, length).tolist()
            yield prompt, prompt[:known]


def computed_alone(model, spec, texts, options):
    """What one engine makes of them.

    Where one token is left to compute, vLLM plans drafts for that very step, which all but heads on
    hidden states have: such a request is compared with one whose other tokens are in the cache.
    """
    ahead = spec is not None and spec["method"] not in HEADS
    with role_engine(model, None, **options) as one:
        for prompt, known in texts:
            for before in (known, prompt[:-1] if ahead and len(prompt) % BLOCK == 1 else []):
                if before:
                    decode(one, before, max_tokens=1)
            yield decode(one, prompt)


def check_all(model, spec, ahead, vocabulary=VOCAB, block=BLOCK, windows=False, **options):
    """Every length, behind every local hit, against one engine; how many drafts were right.

    Beside windows and drafts vLLM computes the last block of a local hit again. So no engine alone
    has one token left to compute, and drafts are not compared where a puller has.
    """
    options |= {"async_scheduling": ahead, "additional_config": {"fixed_draft_length": True}}
    if spec is not None:
        options["speculative_config"] = {"num_speculative_tokens": NUM_DRAFTS} | spec
    texts = list(cases(vocabulary, block))
    expected = list(computed_alone(model, spec, texts, options))
    port, pulled = free_port(), 0
    with producer(model, port, **options) as p, consumer(model, port, **options) as d:
        for (prompt, known), alone in zip(texts, expected, strict=True):
            if known:
                decode(d, known, max_tokens=1)
            found = decode(d, prompt, prefill(p, prompt))
            what = f"{len(prompt)} tokens, {len(known)} known"
            assert found.tokens == alone.tokens, what
            if not (windows and len(prompt) % block == 1):
                assert (found.drafted, found.accepted) == (alone.drafted, alone.accepted), what
            if not known:
                assert found.pulled == (len(prompt) - 1) // block * block, what
            pulled += found.pulled
    assert pulled > 0
    return sum(served.accepted for served in expected)


def drafting(toy, ahead):
    """Returns options of an engine that drafts like a toy."""
    return {
        "async_scheduling": ahead,
        "additional_config": {"fixed_draft_length": True},
        "speculative_config": toy.speculation,
        "skip_tokenizer_init": True,
    }


@pytest.mark.parametrize(
    ("method", "ahead"),
    [
        pytest.param("ngram", True, marks=pytest.mark.more),
        pytest.param("ngram", False, marks=pytest.mark.slow),
        pytest.param("draft_model", True, marks=pytest.mark.slow),
        pytest.param("draft_model", False, marks=pytest.mark.slow),
    ],
)
def test_one_token_left_is_planned_with_drafts(toys, method, ahead):
    """Why a decoder may propose more drafts than one server does: vLLM plans NUM_DRAFTS of them
    for the step that computes the last token of a prompt, if only that is left. One server plans
    them, too, if the rest is in its cache; for a prompt that it computes whole it does not."""
    toy, texts = toys["draft_model"], [(p, []) for p, known in cases(TOY_VOCAB, BLOCK) if not known]
    if method == "ngram":
        toy = replace(toy, speculation=NGRAM)
    options, port, more = drafting(toy, ahead), free_port(), {}
    with role_engine(toy.model, None, **options) as one:
        whole = [decode(one, prompt) for prompt, _ in texts]
    cached = list(computed_alone(toy.model, toy.speculation, texts, options))
    with producer(toy.model, port, **options) as p, consumer(toy.model, port, **options) as d:
        for (prompt, _), cold, warm in zip(texts, whole, cached, strict=True):
            apart = decode(d, prompt, prefill(p, prompt))
            assert apart.tokens == warm.tokens == cold.tokens
            assert (apart.drafted, apart.accepted) == (warm.drafted, warm.accepted)
            if apart.accepted == cold.accepted:  # as many steps that decode
                more[len(prompt)] = apart.drafted - cold.drafted
    assert 0 in more.values() and max(more.values()) == NUM_DRAFTS
    assert all(extra == 0 or length % BLOCK == 1 for length, extra in more.items()), more


class ByPosition:
    """A connector that knows blocks by their place, as others do: it keeps the last of a list.

    The engine that prefills has a block more than the other where drafts, or a step in flight, are
    to go into the next one: vLLM issue 43996.
    """

    def __init__(self, monkeypatch, p):
        self._p, self._blocks, self._rows, self._places = p, [], [], {}
        ends, asks = MetalKVConnector.request_finished_all_groups, PeerView.look_up

        def note_blocks(connector, request, block_ids):
            if (request.kv_transfer_params or {}).get("do_remote_decode"):
                self._blocks = blocks_of(p, request.request_id)  # `block_ids` is cut already
            return ends(connector, request, block_ids)

        def note_places(view, namespace, keys, params):
            self._places = {key: place for place, key in enumerate(keys())}
            return asks(view, namespace, keys, params)

        monkeypatch.setattr(MetalKVConnector, "request_finished_all_groups", note_blocks)
        monkeypatch.setattr(PeerView, "look_up", note_places)
        monkeypatch.setattr(Peer, "fetch", self._fetch)

    def trim(self, prompt):
        """Reads the prefill engine's blocks, without those beyond the prompt."""
        pages = runner_of(self._p).layers.block_pages()
        rows = page_rows(pages.export(0, np.array(self._blocks)))
        self._rows = rows[-ceil(len(prompt) / BLOCK) :]

    def _fetch(self, keys, pages, wanted):
        for key, page in zip(keys, pages, strict=True):
            page[:] = self._rows[self._places[key]].data
        return True


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [True, False])
def test_blocks_by_position_are_told_from_blocks_by_hash(toys, monkeypatch, ahead):
    """Shows that the comparison above finds the error that it is for."""
    toy = toys["draft_model"]
    options = drafting(toy, ahead)
    texts = [(prompt, []) for prompt, known in cases(TOY_VOCAB, BLOCK) if not known]
    expected = computed_alone(toy.model, toy.speculation, texts, options)
    expected, port, wrong = list(expected), free_port(), set()
    with producer(toy.model, port, "kv_both", **options) as p:
        double = ByPosition(monkeypatch, p)
        with consumer(toy.model, port, **options) as d:
            for (prompt, _), alone in zip(texts, expected, strict=True):
                params = prefill(p, prompt)
                double.trim(prompt)
                found = decode(d, prompt, params)
                same = (found.tokens, found.accepted) == (alone.tokens, alone.accepted)
                wrong |= set() if same else {len(prompt)}
    assert wrong == {2 * BLOCK}


@pytest.mark.more
@pytest.mark.parametrize("ahead", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "end", [pytest.param("max_tokens", marks=pytest.mark.slow), "a stop token"]
)
def test_a_producer_that_goes_on_past_the_prompt(toys, end, ahead):
    """It ends at a token while the next step is already scheduled, or after several."""
    toy = toys["draft_model"]
    options = drafting(toy, ahead)
    texts = [(prompt, []) for prompt, known in cases(TOY_VOCAB, BLOCK) if not known]
    expected = list(computed_alone(toy.model, toy.speculation, texts, options))
    port = free_port()
    with producer(toy.model, port, **options) as p, consumer(toy.model, port, **options) as d:
        for (prompt, _), alone in zip(texts, expected, strict=True):
            stop = {"stop_token_ids": [alone.tokens[0]]} if end == "a stop token" else {}
            params = prefill(p, prompt, 2 * BLOCK, ignore_eos=True, **stop)
            found = decode(d, prompt, params)
            assert found.tokens == alone.tokens, len(prompt)
            assert (found.drafted, found.accepted) == (alone.drafted, alone.accepted), len(prompt)
            assert found.pulled == (len(prompt) - 1) // BLOCK * BLOCK


def test_a_producer_that_sleeps_hands_out_what_it_has(tiny):
    """Pages for others lie outside the pool, so leases outlive either level of sleep."""
    rng, port = np.random.default_rng(8), free_port()
    with producer(tiny, port) as p, consumer(tiny, port) as d:
        for level in (1, 2):
            prompt = rng.integers(2, VOCAB, 100).tolist()
            params = prefill(p, prompt)
            p.sleep(level)
            assert decode(d, prompt, params, max_tokens=1).pulled == 96
            p.wake_up()
            assert d.reset_prefix_cache()
            assert decode(d, prompt, params, max_tokens=1).pulled == 96


AHEAD = pytest.mark.parametrize("ahead", [True, pytest.param(False, marks=pytest.mark.slow)])


@AHEAD
@pytest.mark.parametrize("model", ["full", pytest.param("windowed", marks=pytest.mark.slow)])
def test_without_drafts(tiny_models, model, ahead):
    check_all(str(tiny_models / model), None, ahead)


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("method", ["draft_model", "mtp", "eagle", "eagle3"])
def test_a_network_that_drafts(toys, method, ahead):
    toy = toys[method]
    options = {"skip_tokenizer_init": True}
    assert check_all(toy.model, toy.speculation, ahead, TOY_VOCAB, **options) > 0


@pytest.mark.more
@pytest.mark.parametrize(
    "method", [STATELESS[0], *(pytest.param(x, marks=pytest.mark.slow) for x in STATELESS[1:])]
)
def test_heads_without_kv(toys, method):
    """vLLM never schedules a step ahead of these."""
    toy = toys[method]
    options = {"skip_tokenizer_init": True}
    assert check_all(toy.model, toy.speculation, False, TOY_VOCAB, **options) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "ahead"),
    [("ngram", True), ("ngram", False), ("ngram_gpu", True), ("suffix", False)],
)
def test_lookups_in_the_text(tiny, method, ahead):
    spec = {"method": method}
    if method != "suffix":
        spec |= {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
    check_all(tiny, spec, ahead)


@pytest.mark.more
def test_groups_with_windows_and_a_draft_model(tiny_models):
    spec = {"method": "draft_model", "model": str(tiny_models / "windowed-draft")}
    check_all(str(tiny_models / "windowed"), spec, True, windows=True)


@pytest.mark.more
@pytest.mark.parametrize("model", ["full", pytest.param("windowed", marks=pytest.mark.slow)])
def test_an_fp8_cache_in_larger_blocks(tiny_models, model):
    check_all(str(tiny_models / model), None, True, block=32, kv_cache_dtype="fp8", block_size=32)
