# SPDX-License-Identifier: Apache-2.0
"""If a peer fails, requests are computed locally, and no block leaks."""

import threading
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
from e2e.fuzz.models import VOCAB
from e2e.harness import greedy, run_out
from e2e.peers import consumer, decode, free_port, peer_store, prefill, producer, role_engine
from vllm import TokensPrompt

from vllm_metal.kv_transfer.peer import export_cache as outbox_module
from vllm_metal.kv_transfer.peer.client import Peer
from vllm_metal.kv_transfer.peer.limits import TIMEOUTS
from vllm_metal.kv_transfer.peer.messages import Page
from vllm_metal.kv_transfer.peer.view import PeerLookup

PULLED = 96  # tokens of a prompt of 100, in blocks of 16


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(3)
    return [rng.integers(2, VOCAB, 100).tolist() for _ in range(4)]


@pytest.fixture(scope="module")
def alone(tiny, prompts):
    with role_engine(tiny, None) as one:
        return [decode(one, prompt).tokens for prompt in prompts]


@pytest.fixture
def pair(tiny):
    """Prefill and decode engines with given settings."""
    with ExitStack() as stack:

        def make(of_producer=None, of_consumer=None):
            port = free_port()
            first = stack.enter_context(producer(tiny, port, **(of_producer or {})))
            return first, stack.enter_context(consumer(tiny, port, **(of_consumer or {})))

        yield make


def dies(p):
    peer_store(p).close()


def forgets(p):
    peer_store(p).export_cache.clear()


def check(p, d, prompts, alone, trouble=lambda: None):
    """Asserts that all prompts are answered, and none is pulled after a failure."""
    params = [prefill(p, prompt) for prompt in prompts]
    assert decode(d, prompts[0], params[0]).pulled == PULLED
    trouble()
    for prompt, of_one, tokens in zip(prompts[1:], params[1:], alone[1:], strict=True):
        found = decode(d, prompt, of_one)
        assert (found.tokens, found.pulled) == (tokens, 0)


MORE = pytest.mark.more


@pytest.mark.parametrize("how", [dies, pytest.param(forgets, marks=MORE)])
def test_a_producer_that_is_gone_before_it_is_asked(pair, prompts, alone, how):
    p, d = pair()
    check(p, d, prompts, alone, lambda: how(p))


@pytest.mark.parametrize("ahead", [True, pytest.param(False, marks=pytest.mark.slow)])
@MORE
@pytest.mark.parametrize("how", [dies, forgets])
def test_a_producer_that_is_gone_once_it_was_asked(pair, prompts, alone, monkeypatch, how, ahead):
    options = {"async_scheduling": ahead}
    p, d = pair(options, options)
    fetch = Peer.fetch

    def gone(self, keys, pages, wanted):
        how(p)
        return fetch(self, keys, pages, wanted)

    params = [prefill(p, prompt) for prompt in prompts]
    monkeypatch.setattr(Peer, "fetch", gone)
    found = decode(d, prompts[0], params[0])
    assert found.tokens == alone[0]
    monkeypatch.undo()
    assert decode(d, prompts[1], params[1]).tokens == alone[1]


@MORE
def test_a_producer_that_is_gone_amid_a_page(pair, prompts, alone, monkeypatch):
    p, d = pair()
    params = prefill(p, prompts[0])
    sent, get = [], outbox_module.ExportCache.get

    def second_page(self, key):
        sent.append(key)
        if len(sent) == 2:
            # It waits for the thread that is here.
            threading.Thread(target=peer_store(p).close).start()
            threading.Event().wait(0.2)
        return get(self, key)

    monkeypatch.setattr(outbox_module.ExportCache, "get", second_page)
    assert decode(d, prompts[0], params).tokens == alone[0]
    assert len(sent) >= 2


@MORE
def test_bytes_that_changed_on_their_way(pair, prompts, alone, monkeypatch):
    p, d = pair()
    params = prefill(p, prompts[0])
    get = outbox_module.ExportCache.get

    def changed(self, key):
        page = get(self, key)
        data = bytearray(page.data)
        data[len(data) // 2] ^= 4
        return Page(memoryview(bytes(data)), page.checksum)

    monkeypatch.setattr(outbox_module.ExportCache, "get", changed)
    found = decode(d, prompts[0], params)
    assert found.tokens == alone[0]
    assert peer_store(d).metrics().bad_checksums == 1


@pytest.mark.more
def test_a_secret_that_is_another_s(pair, prompts, alone, tmp_path):
    paths = [tmp_path / "one", tmp_path / "other"]
    for number, path in enumerate(paths):
        path.write_text(str(number) * 32)
        path.chmod(0o600)
    p, d = pair(*({"extra": {"secret": str(path)}} for path in paths))
    for prompt, tokens in zip(prompts[:2], alone, strict=False):
        found = decode(d, prompt, prefill(p, prompt))
        assert (found.tokens, found.pulled) == (tokens, 0)
    assert peer_store(p).metrics().sent_bytes == 0


@MORE
def test_other_pages_are_refused(pair, prompts, alone):
    p, d = pair({"block_size": 32})
    found = decode(d, prompts[0], prefill(p, prompts[0]))
    assert (found.tokens, found.pulled) == (alone[0], 0)


@MORE
def test_nobody_listens_at_first_and_then_somebody_does(tiny, prompts, alone, monkeypatch):
    port = free_port()
    at_once = replace(TIMEOUTS, down=0.0)  # a peer that did not answer is asked again
    monkeypatch.setattr("vllm_metal.kv_transfer.peer.config.TIMEOUTS", at_once)
    with consumer(tiny, port) as d:
        found = decode(d, prompts[0])
        assert (found.tokens, found.pulled) == (alone[0], 0)
        for place in (1, 2):  # another engine at the same address after the first
            with producer(tiny, port) as p:
                before = peer_store(d).metrics().fetched_bytes
                assert decode(d, prompts[place], prefill(p, prompts[place])).tokens == alone[place]
                assert peer_store(d).metrics().fetched_bytes > before


def test_a_peer_that_stands_still_delays_no_other_stream(pair, prompts, alone, monkeypatch):
    p, d = pair()
    params = prefill(p, prompts[0])
    goes_on, fetch = threading.Event(), Peer.fetch

    def slow(self, keys, pages, wanted):
        goes_on.wait(300)
        return fetch(self, keys, pages, wanted)

    monkeypatch.setattr(Peer, "fetch", slow)
    sampling = greedy(12)
    sampling.extra_args = {"kv_transfer_params": params}
    d.llm_engine.add_request("stuck", TokensPrompt(prompt_token_ids=prompts[0]), sampling)
    try:
        d.llm_engine.add_request("stream", TokensPrompt(prompt_token_ids=prompts[1]), greedy(12))
        ended = {}
        while "stream" not in ended:
            ended |= {out.request_id: out for out in d.llm_engine.step() if out.finished}
        assert list(ended["stream"].outputs[0].token_ids) == alone[1] and "stuck" not in ended
    finally:
        goes_on.set()
    while "stuck" not in ended:
        ended |= {out.request_id: out for out in d.llm_engine.step() if out.finished}
    assert list(ended["stuck"].outputs[0].token_ids) == alone[0]


def test_a_request_that_is_given_up_while_it_loads(pair, prompts, alone, monkeypatch):
    p, d = pair()
    params = prefill(p, prompts[0])
    begun, goes_on, fetch = threading.Event(), threading.Event(), Peer.fetch

    def slow(self, keys, pages, wanted):
        begun.set()
        goes_on.wait(300)
        return fetch(self, keys, pages, wanted)

    monkeypatch.setattr(Peer, "fetch", slow)
    sampling = greedy(12)
    sampling.extra_args = {"kv_transfer_params": params}
    d.llm_engine.add_request("given up", TokensPrompt(prompt_token_ids=prompts[0]), sampling)
    while not begun.is_set():
        d.llm_engine.step()
    d.llm_engine.abort_request(["given up"])
    d.llm_engine.step()
    goes_on.set()
    run_out(d)
    found = decode(d, prompts[0], params)
    assert (found.tokens, found.pulled) == (alone[0], PULLED)


@MORE
@pytest.mark.parametrize("asked", ["never", "in time"])
def test_leases_end_with_what_they_were_for(pair, prompts, asked, monkeypatch):
    p, d = pair()
    if asked == "never":
        monkeypatch.setattr(PeerLookup, "contains", lambda self, key: False)
    decode(d, prompts[0], prefill(p, prompts[0]))
    deadline = threading.Event()
    for _ in range(2000):
        if peer_store(p).metrics().leased_bytes == 0:
            break
        deadline.wait(0.05)
    assert peer_store(p).metrics().leased_bytes == 0
    assert peer_store(p).metrics().outbox_bytes > 0


def test_a_load_that_fails_fails_the_request_where_a_user_says_so(pair, prompts, monkeypatch):
    p, d = pair(None, {"transfer": {"kv_load_failure_policy": "fail"}})
    params = prefill(p, prompts[0])
    monkeypatch.setattr(Peer, "fetch", lambda *_: False)
    sampling = greedy(12)
    sampling.extra_args = {"kv_transfer_params": params}
    prompt = TokensPrompt(prompt_token_ids=prompts[0])
    (output,) = d.generate([prompt], sampling, use_tqdm=False)
    assert output.outputs[0].finish_reason == "error"
