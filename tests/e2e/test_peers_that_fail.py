# SPDX-License-Identifier: Apache-2.0
"""Replicas with peers that die, hang, lie or are slow: same tokens, bounded waits."""

import shutil
import socket
import threading
import time
from contextlib import contextmanager

import mlx.core as mx
import numpy as np
import pytest
from e2e.fuzz.models import VOCAB
from e2e.harness import greedy, run_out
from e2e.peers import consumer, decode, free_port, peer_store, prefill, producer, role_engine
from vllm import TokensPrompt

from vllm_metal.kv_transfer.peer import client, view
from vllm_metal.kv_transfer.peer import export_cache as outbox_module
from vllm_metal.kv_transfer.peer.messages import Page
from vllm_metal.kv_transfer.peer.server import PageServer
from vllm_metal.settings.salts import derive

PULLED = 96  # tokens of a prompt of 100, in blocks of 16
LATE_S = 60.0  # on any machine: who waits for a peer that hangs waits until the test ends it
MORE = pytest.mark.more


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(5)
    return [rng.integers(2, VOCAB, 100).tolist() for _ in range(6)]


@pytest.fixture(scope="module")
def alone(tiny, prompts):
    """Returns each prompt's tokens."""
    with role_engine(tiny, None) as one:
        return [decode(one, prompt).tokens for prompt in prompts]


def timed(llm, prompt):
    """Returns a prompt's result and its seconds."""
    began = time.monotonic()
    found = decode(llm, prompt)
    return found, time.monotonic() - began


def computing(llm):
    """Returns the minimum seconds of a prompt that this engine computes itself."""
    rng, times = np.random.default_rng(6), []
    for _ in range(4):
        found, took = timed(llm, rng.integers(2, VOCAB, 100).tolist())
        assert found.pulled == 0
        times.append(took)
    return min(times)


def check_computed(answered, expected, alone_s, what):
    """Asserts that a request has the expected tokens in time; returns its result."""
    found, took = answered
    print(f"{what}: {took - alone_s:+.2f} s over {alone_s:.2f} s")
    assert found.tokens == expected
    assert took <= alone_s + LATE_S
    return found


@pytest.fixture
def pair(tiny):
    """Two engines with both roles; the second one asks the first."""
    port = free_port()
    with producer(tiny, port, role="kv_both") as p, consumer(tiny, port, role="kv_both") as d:
        yield p, d


def check(p, d, prompts, alone, trouble):
    """Makes the second engine pull until a failure; then it computes in time."""
    alone_s = computing(d)
    for prompt in prompts:
        prefill(p, prompt)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(view, "SHORT_LOOKUP_SECONDS", 60.0)  # however slow the machine
        found = decode(d, prompts[0])
    assert (found.tokens, found.pulled) == (alone[0], PULLED)
    before = peer_store(d).metrics().fetched_pages
    with trouble(p):
        for number in range(1, 4):
            answered = timed(d, prompts[number])
            check_computed(answered, alone[number], alone_s, trouble.__name__)
    assert peer_store(d).metrics().fetched_pages == before


@contextmanager
def it_dies(p):
    peer_store(p).close()
    yield


@contextmanager
def hanging(method):
    """Makes a method of page servers hang."""
    with pytest.MonkeyPatch.context() as patch:
        ends = threading.Event()
        patch.setattr(PageServer, method, lambda *_: ends.wait())
        try:
            yield
        finally:
            ends.set()


def it_answers_nothing(p):
    return hanging("found")


def it_sends_no_page(p):
    return hanging("send_pages")


@contextmanager
def it_trickles(p):
    """Sends a byte every 50 ms."""

    def trickle(self, link, *_):
        for _ in range(200):
            link.send_bytes(b"\x20")
            time.sleep(0.05)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PageServer, "send_pages", trickle)
        yield


@contextmanager
def it_sends_other_bytes(p):
    get = outbox_module.ExportCache.get

    def changed(self, key):
        page = get(self, key)
        data = bytearray(page.data)
        data[len(data) // 2] ^= 4
        return Page(memoryview(bytes(data)), page.checksum)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outbox_module.ExportCache, "get", changed)
        yield


@pytest.mark.parametrize(
    "trouble",
    [
        it_sends_no_page,
        pytest.param(it_answers_nothing, marks=MORE),
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in (it_trickles, it_dies, it_sends_other_bytes)
        ),
    ],
)
def test_a_peer_that_fails(pair, prompts, alone, trouble):
    check(*pair, prompts, alone, trouble)


@MORE
def test_a_port_that_accepts_and_says_nothing(tiny, prompts, alone):
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    with listener, consumer(tiny, port, role="kv_both") as d:
        answered = [timed(d, prompt) for prompt in prompts[:2]]
        alone_s = computing(d)  # by now nobody waits for it
        for each, expected in zip(answered, alone, strict=False):
            assert check_computed(each, expected, alone_s, "it says nothing").pulled == 0


def copied(source, target, change):
    """Copies a model with changed weights; returns its folder."""
    shutil.copytree(source, target)
    weights = mx.load(str(target / "model.safetensors"))
    change(weights)
    mx.save_safetensors(str(target / "model.safetensors"), weights, {"format": "mlx"})
    return str(target)


def other_projection(weights):
    """Changes K of the first layer, and so the tokens."""
    name = "model.layers.0.self_attn.k_proj.weight"
    weights[name] = weights[name][::-1]


@MORE
def test_a_peer_with_other_weights(tiny, prompts, alone, tmp_path, monkeypatch):
    """Every byte of its pages is right, but their fingerprint is another model's."""
    other, port, said = copied(tiny, tmp_path / "other", other_projection), free_port(), []
    monkeypatch.setattr(client.logger, "warning", lambda *words: said.append(words[0] % words[1:]))
    with role_engine(other, None) as one:
        others = [decode(one, prompt).tokens for prompt in prompts]
    assert all(theirs != ours for theirs, ours in zip(others, alone, strict=True))
    with producer(other, port, role="kv_both") as p, consumer(tiny, port, role="kv_both") as d:
        alone_s = computing(d)
        for prompt in prompts:
            prefill(p, prompt)
        for prompt, expected in zip(prompts, alone, strict=True):
            assert check_computed(timed(d, prompt), expected, alone_s, "others").pulled == 0
        assert peer_store(d).metrics().fetched_pages == 0
        assert peer_store(p).metrics().sent_bytes == 0
    (words,) = said
    assert words.startswith(f"The peer 127.0.0.1:{port} is not used: ")
    assert words.endswith("weights of the target differ")


@MORE
def test_other_blocks_and_other_secrets(tiny, prompts, alone, tmp_path):
    port, paths = free_port(), [tmp_path / "one", tmp_path / "other"]
    for number, path in enumerate(paths):
        path.write_text(str(number) * 32)
        path.chmod(0o600)
    differences = {
        "another secret": [{"extra": {"secret": str(path)}} for path in paths],
        "other blocks": [{"block_size": 32}, {}],
    }
    for what, (theirs, ours) in differences.items():
        with (
            producer(tiny, port, role="kv_both", **theirs) as p,
            consumer(tiny, port, role="kv_both", **ours) as d,
        ):
            alone_s = computing(d)
            for prompt in prompts[:2]:
                prefill(p, prompt)
            for prompt, expected in list(zip(prompts, alone, strict=True))[:2]:
                assert check_computed(timed(d, prompt), expected, alone_s, what).pulled == 0
            assert peer_store(p).metrics().sent_bytes == 0


@MORE
def test_tenants_find_their_pages_where_the_tenants_secret_is_the_same(
    tiny, prompts, alone, monkeypatch
):
    """Block hashes contain the salts that the server's middleware derives."""
    monkeypatch.setattr(view, "SHORT_LOOKUP_SECONDS", 60.0)  # however slow the machine
    port, expected = free_port(), alone[0]

    def ask(llm, key, tenant):
        salted = TokensPrompt(prompt_token_ids=prompts[0], cache_salt=derive(key, tenant))
        (output,) = llm.generate([salted], greedy(12), use_tqdm=False)
        run_out(llm)
        assert list(output.outputs[0].token_ids) == expected
        return output.num_cached_tokens

    with (
        producer(tiny, port, role="kv_both") as p,
        consumer(tiny, port, role="kv_both", extra={"pull": "always"}) as d,
    ):
        assert ask(p, b"one secret", "acme") == 0
        assert ask(d, b"another secret", "acme") == 0
        assert ask(d, b"one secret", "other") == 0
        assert ask(d, b"one secret", "acme") == PULLED


def asks_for(llm, prompt, expected):
    """Returns whether an engine gets an uncomputed prompt from others."""
    found = decode(llm, prompt)
    assert found.tokens == expected
    assert llm.reset_prefix_cache()
    return found.pulled > 0


def until(condition):
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@MORE
def test_peers_come_and_go_by_the_file(tiny, prompts, alone, tmp_path, monkeypatch):
    monkeypatch.setattr(view, "SHORT_LOOKUP_SECONDS", 60.0)  # however slow the machine
    port, path = free_port(), tmp_path / "peers"
    path.write_text("# nobody yet\n")
    extra = {"listen": f"127.0.0.1:{free_port()}", "peers_file": str(path), "pull": "always"}
    with producer(tiny, port, role="kv_both") as p:
        for prompt in prompts:
            prefill(p, prompt)
        with role_engine(tiny, "kv_both", extra=extra) as d:
            assert decode(d, prompts[0]).pulled == 0
            path.write_text(f"{extra['listen']}\n127.0.0.1:{port}\n")  # itself, too
            until(lambda: asks_for(d, prompts[1], alone[1]))
            path.write_text("")
            until(lambda: not asks_for(d, prompts[2], alone[2]))
