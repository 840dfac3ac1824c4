# SPDX-License-Identifier: Apache-2.0
"""An engine that shares its pool: what peers get, and the cost."""

import numpy as np
import pytest
from e2e.fuzz.models import VOCAB
from e2e.harness import Dense
from e2e.peers import peer_store
from e2e.sharing import Replicas, alone, core_of, peer_metrics, pins, tokens_of

from vllm_metal.kv_transfer.peer.client import Peer
from vllm_metal.kv_transfer.pins import Pins

BLOCK = 16


def prompt_of(length, seed=8):
    return np.random.default_rng(seed).integers(2, VOCAB, length).tolist()


@pytest.fixture(scope="module")
def pair(tiny):
    """Two replicas, idle after each test."""
    with Replicas(tiny, 2) as engines:
        yield engines


@pytest.fixture(autouse=True)
def clean(request):
    """Asserts that no block is held for a peer: a reset needs all blocks free."""
    yield
    if "pair" in request.fixturenames:
        engines = request.getfixturevalue("pair")
        engines.run_out()
        for each in engines.engines:
            assert pins(each) == 0 and peer_metrics(each).shared_leases == 0
            assert each.reset_prefix_cache()
            peer_store(each).export_cache.clear()


@pytest.fixture(scope="module")
def dense(tiny):
    return Dense(tiny)


def test_an_idle_engine_answers_out_of_its_pool(pair, dense):
    prompt = prompt_of(100)
    first, before = pair.ask(0, prompt), peer_metrics(pair[0])
    of_other = peer_metrics(pair[1]).shared_pages
    assert before.outbox_bytes == 0
    second = pair.ask(1, prompt, 40)
    pair.run_out()
    after = peer_metrics(pair[0])
    for found in (first, second):
        dense.check(prompt, found.tokens)
    assert (first.cached, second.cached, second.pulled) == (0, 96, 6)
    assert after.shared_pages - before.shared_pages == after.sent_pages - before.sent_pages == 6
    assert after.shared_bytes - before.shared_bytes == after.outbox_bytes > 0
    # The other way round: what was pulled is the puller's, too, and its answer is.
    third = pair.ask(0, prompt + second.tokens)
    assert (third.cached, third.pulled) == (128, 2)
    assert peer_metrics(pair[1]).shared_pages - of_other == 2
    dense.check(prompt + second.tokens, third.tokens)


def test_what_the_pool_has_lost_is_not_offered(pair):
    prompt = prompt_of(100)
    pair.ask(0, prompt)
    pair[0].reset_prefix_cache()
    pair.ask(0, prompt_of(50, 9))  # the worker hears of it with a step
    found = pair.ask(1, prompt)
    assert (found.cached, found.pulled) == (0, 0)


def test_a_busy_engine_answers_beside_its_own_requests(pair, dense):
    prompt, other = prompt_of(100), prompt_of(40, 20)
    pair.ask(0, prompt, 1)
    before = peer_metrics(pair[0]).shared_pages
    busy = pair.begin(0, other, 200)
    while not core_of(pair[0]).scheduler.running:
        pair.step()
    asked = pair.begin(1, prompt)
    found = pair.run(asked)
    assert busy not in found
    dense.check(prompt, tokens_of(found[asked]))
    dense.check(other, tokens_of(pair.run(busy)[busy]))
    assert found[asked].num_cached_tokens == 96
    assert peer_metrics(pair[0]).shared_pages == before + 6


def test_a_prompt_that_is_being_computed_is_had_as_far_as_it_is(pair, dense):
    """Asks while the request runs, and after it is aborted."""
    prompt = prompt_of(200, 7)
    running = pair.begin(0, prompt, 50)
    scheduler = core_of(pair[0]).scheduler
    while not any(request.num_output_tokens for request in scheduler.running):
        pair.step()  # the other one was asked first
    pair.step()  # the worker hears of the newest blocks
    asked = pair.begin(1, prompt)
    found = pair.run(asked)[asked]
    dense.check(prompt, tokens_of(found))
    assert found.num_cached_tokens == 192
    pair[0].llm_engine.abort_request([running])
    pair.run_out()
    assert pair[1].reset_prefix_cache()
    assert pair.ask(1, prompt).pulled == 12


def test_an_engine_that_sleeps_offers_nothing_of_its_pool(pair):
    prompt = prompt_of(100)
    pair.ask(0, prompt)
    pair.run_out()
    pair[0].sleep(1)
    found = pair.ask(1, prompt)
    assert (found.cached, found.pulled) == (0, 0)
    assert not core_of(pair[0]).scheduler.has_requests()
    pair[0].wake_up()
    assert pair[1].reset_prefix_cache()
    assert pair.ask(1, prompt).pulled == 0
    assert pair.ask(0, prompt).pulled == 6  # now the other one has it


@pytest.mark.more
def test_pins_hold_what_was_found_and_give_way_to_requests(tiny):
    """An engine asks without fetching while requests need all 40 blocks."""
    options = {"num_gpu_blocks_override": 41, "max_num_seqs": 4}
    prompt, others = prompt_of(100), [prompt_of(120, seed) for seed in range(30, 36)]
    expected = alone(tiny, others, 20)
    with Replicas(tiny, 2, **options) as pair:
        pair.ask(0, prompt)
        asker = peer_store(pair[1]).clients.at(peer_store(pair[0]).handshake)
        keys = [*peer_store(pair[0]).shared_pool.keys]
        found = asker.lookup(keys)
        assert found == set(keys) and len(found) == 6
        while pins(pair[0]) < 6:
            pair.step()
        busy = [pair.begin(0, other, 20) for other in others]
        outputs = pair.run(*busy)
        assert [tokens_of(outputs[each]) for each in busy] == expected
        assert pins(pair[0]) < 6
        asker.release(found)
        pair.run_out()
        assert pins(pair[0]) == 0 and pair[0].reset_prefix_cache()


@pytest.mark.more
def test_a_page_that_goes_between_the_answer_and_the_fetch_is_computed(tiny, monkeypatch):
    """Without pins, the load fails and its request computes the page."""
    monkeypatch.setattr(Pins, "change", lambda pins, changes: None)
    prompt = prompt_of(100)
    (expected,) = alone(tiny, [prompt])
    with Replicas(tiny, 2) as pair:
        pair.ask(0, prompt)
        ask = Peer.lookup

        def lose(peer, keys, *args):
            found = ask(peer, keys, *args)
            if found:
                assert pair[0].reset_prefix_cache()
                lost = pair.begin(0, prompt_of(50, 9))
                gone.append(lost)
            return found

        gone = []
        monkeypatch.setattr(Peer, "lookup", lose)
        found = pair.ask(1, prompt)
        assert found.tokens == expected and gone and found.pulled == 0


def check_models(model, prompts, expected, **options):
    """Sends each prompt to both replicas in turn; returns the number of transferred pages."""
    pulled = 0
    with Replicas(model, 2, **options) as pair:
        for index, (prompt, tokens) in enumerate(zip(prompts, expected, strict=True)):
            for turn in range(2):
                found = pair.ask((index + turn) % 2, prompt)
                assert found.tokens == tokens
                pulled += found.pulled
        pair.run_out()
        for each in pair.engines:
            assert pins(each) == 0 and each.reset_prefix_cache()
    return pulled


NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}


@pytest.mark.more
@pytest.mark.parametrize(
    ("model", "spec"),
    [
        ("windowed", None),
        ("hybrid", None),
        pytest.param("full", NGRAM, marks=pytest.mark.slow),
        pytest.param("windowed", "windowed-draft", marks=pytest.mark.slow),
    ],
)
def test_groups_states_and_drafts(tiny_models, model, spec):
    """Each has its own blocks, which are useful only together."""
    options = {}
    if isinstance(spec, dict):
        options["speculative_config"] = spec
    elif spec is not None:
        options["speculative_config"] = {
            "method": "draft_model",
            "model": str(tiny_models / spec),
            "num_speculative_tokens": 3,
        }
    path = str(tiny_models / model)
    prompts = [prompt_of(length, length) for length in (33, 100, 150)]
    expected = alone(path, prompts)
    assert check_models(path, prompts, expected, **options) > 0


@pytest.mark.more
@pytest.mark.parametrize("method", [pytest.param("draft_model", marks=pytest.mark.slow), "eagle"])
def test_networks_that_draft(toys, method):
    toy = toys[method]
    options = {"skip_tokenizer_init": True, "speculative_config": toy.speculation}
    prompts = [(np.array(prompt_of(n, n)) % 32).clip(2).tolist() for n in (33, 100, 150)]
    expected = alone(toy.model, prompts, **options)
    assert check_models(toy.model, prompts, expected, **options) > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("model", ["full", "windowed", "hybrid"])
def test_random_requests_over_two_small_pools(tiny_models, model, seed):
    """Prompts share prefixes and run several at a time on random engines; some are aborted."""
    rng, path = np.random.default_rng(seed), str(tiny_models / model)
    roots = [prompt_of(int(n), 50 + i) for i, n in enumerate(rng.integers(20, 160, 5))]
    prompts = []
    for number in range(40):
        root = roots[rng.integers(len(roots))]
        prompts.append(root[: rng.integers(1, len(root))] + prompt_of(rng.integers(1, 30), number))
    lengths = [int(n) for n in rng.integers(1, 30, len(prompts))]
    expected = alone(path, prompts, 30)
    options = {"num_gpu_blocks_override": 60, "max_num_seqs": 4}
    with Replicas(path, 2, **options) as pair:
        waiting, running, aborted = list(range(len(prompts))), {}, set()
        while waiting or running:
            while waiting and len(running) < 8:
                number = waiting.pop(0)
                engine = int(rng.integers(2))
                req_id = pair.begin(engine, prompts[number], lengths[number])
                running[req_id] = number, engine
            if rng.random() < 0.02:
                req_id = list(running)[rng.integers(len(running))]
                number, engine = running.pop(req_id)
                pair[engine].llm_engine.abort_request([req_id])
                aborted.add(number)
            for _, output in pair.step():
                if output.request_id in running:
                    number, _ = running.pop(output.request_id)
                    assert tokens_of(output) == expected[number][: lengths[number]], number
        pair.run_out()
        assert sum(peer_metrics(each).shared_pages for each in pair.engines) > 0
        assert len(aborted) < len(prompts) // 2
        for each in pair.engines:
            assert pins(each) == 0 and each.reset_prefix_cache()
