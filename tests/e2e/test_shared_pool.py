# SPDX-License-Identifier: Apache-2.0
"""An engine whose pool others may have: what they get of it, and what it costs the engine."""

import numpy as np
import pytest
from e2e.fuzz.models import VOCAB
from e2e.peers import peer_store
from e2e.sharing import Replicas, alone, core_of, figures, pins, tokens_of

BLOCK = 16


def prompt_of(length, seed=8):
    return np.random.default_rng(seed).integers(2, VOCAB, length).tolist()


@pytest.fixture(scope="module")
def pair(tiny):
    """Two replicas; a test leaves them without requests."""
    with Replicas(tiny, 2) as engines:
        yield engines


@pytest.fixture(autouse=True)
def clean(request):
    """No block is held for a peer that has got what it wanted: a reset needs all to be free."""
    yield
    if "pair" in request.fixturenames:
        engines = request.getfixturevalue("pair")
        engines.run_out()
        for each in engines.engines:
            assert pins(each) == 0 and figures(each).shared_leases == 0
            assert each.reset_prefix_cache()
            peer_store(each).outbox.clear()


def test_an_idle_engine_answers_out_of_its_pool(pair, tiny):
    prompt = prompt_of(100)
    (expected,) = alone(tiny, [prompt], 40)
    first, before = pair.ask(0, prompt), figures(pair[0])
    assert before.shared_pages == 0 and before.outbox_bytes == 0
    second, after = pair.ask(1, prompt, 40), figures(pair[0])
    assert [first.tokens, second.tokens] == [expected[:12], expected]
    assert (first.cached, second.cached, second.pulled) == (0, 96, 6)
    assert after.shared_pages == after.sent_pages == 6
    assert after.shared_bytes == after.outbox_bytes > 0
    # The other way round: what was pulled is the puller's, too, and its answer is.
    third = pair.ask(0, prompt + second.tokens)
    assert (third.cached, third.pulled) == (128, 2)
    assert figures(pair[1]).shared_pages == 2
    assert third.tokens == alone(tiny, [prompt + second.tokens])[0]


def test_what_the_pool_has_lost_is_not_offered(pair):
    prompt = prompt_of(100)
    pair.ask(0, prompt)
    pair[0].reset_prefix_cache()
    pair.ask(0, prompt_of(50, 9))  # the worker hears of it with a step
    found = pair.ask(1, prompt)
    assert (found.cached, found.pulled) == (0, 0)


def test_a_busy_engine_answers_beside_its_own_requests(pair, tiny):
    prompt, others = prompt_of(100), [prompt_of(40, seed) for seed in range(20, 24)]
    expected = alone(tiny, [prompt, *others], 100)
    pair.ask(0, prompt)
    before = figures(pair[0]).shared_pages
    busy = [pair.begin(0, other, 100) for other in others]
    for _ in range(5):
        pair.step()
    asked = pair.begin(1, prompt, 100)
    found = pair.run(asked, *busy)
    assert [tokens_of(found[each]) for each in (asked, *busy)] == expected
    assert found[asked].num_cached_tokens == 96
    assert figures(pair[0]).shared_pages == before + 6


def test_a_prompt_that_is_being_computed_is_had_as_far_as_it_is(pair, tiny):
    """Of a request that runs, and one that is aborted."""
    prompt = prompt_of(200)
    (expected,) = alone(tiny, [prompt])
    running = pair.begin(0, prompt, 50)
    for _ in range(3):
        pair.step()
    asked = pair.begin(1, prompt)
    found = pair.run(asked)[asked]
    assert tokens_of(found) == expected and found.num_cached_tokens == 192
    pair[0].llm_engine.abort_request([running])
    pair.run_out()
    assert pair[1].reset_prefix_cache()
    assert pair.ask(1, prompt).pulled == 12


def test_an_engine_that_sleeps_offers_nothing_of_its_pool(pair):
    prompt = prompt_of(100)
    pair.ask(0, prompt)
    pair[0].sleep(1)
    found = pair.ask(1, prompt)
    assert (found.cached, found.pulled) == (0, 0)
    assert not core_of(pair[0]).scheduler.has_requests()
    pair[0].wake_up()
    assert pair[1].reset_prefix_cache()
    assert pair.ask(1, prompt).pulled == 0
    assert pair.ask(0, prompt).pulled == 6  # now the other one has it
