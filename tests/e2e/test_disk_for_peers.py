# SPDX-License-Identifier: Apache-2.0
"""Peers get blocks that an engine only has on its disk."""

import numpy as np
import pytest
from e2e.disk import ask, check_same
from e2e.fuzz.models import VOCAB
from e2e.harness import run_out
from e2e.peers import consumer, free_port, peer_store, role_engine, worker_of

from vllm_metal.settings import salts, secret_file

pytestmark = pytest.mark.more
LENGTH, BLOCK = 100, 16
WHOLE = LENGTH // BLOCK * BLOCK  # tokens of a prompt that others can have


def disk_of(llm):
    return worker_of(llm).transfers.hooks.store.stores["disk"]


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(5)
    return [rng.integers(2, VOCAB, LENGTH).tolist() for _ in range(2)]


@pytest.fixture(scope="module")
def expected(tiny, prompts):
    with role_engine(tiny, None) as one:
        return ask(one, prompts)


@pytest.mark.parametrize(
    "extra", [{"share": "pool"}, {"outbox_bytes": 1 << 20}], ids=["pool", "outbox"]
)
def test_an_engine_that_was_restarted_serves_what_it_had(tiny, prompts, expected, tmp_path, extra):
    """This includes salted pages, for peers that know the salt."""
    port, secret = free_port(), tmp_path / "key"
    secret.write_text("k" * 32)
    secret.chmod(0o600)
    of_prompts = [None, salts.derive(secret_file.read(secret, "secret"), "a tenant")]
    settings = {"listen": f"127.0.0.1:{port}", "path": str(tmp_path / "cache"), **extra}
    settings["salt_key"] = str(secret)
    kind = {"role": "kv_both", "extra": settings}
    with role_engine(tiny, **kind) as first:
        for prompt, answer, salt in zip(prompts, expected, of_prompts, strict=True):
            check_same(ask(first, [prompt], salt=salt), [answer])
        run_out(first)
        assert disk_of(first).stats().num_written == 2 * (WHOLE // BLOCK)
    with role_engine(tiny, **kind) as again, consumer(tiny, port) as other:
        assert peer_store(again).metrics().outbox_bytes == 0
        (stranger,) = ask(other, prompts[1:])
        assert stranger.cached == 0 and peer_store(again).metrics().sent_pages == 0
        for prompt, answer, salt in zip(prompts, expected, of_prompts, strict=True):
            (found,) = ask(other, [prompt], salt=salt)
            check_same([found], [answer])
            assert found.cached == WHOLE
        assert peer_store(again).metrics().sent_pages == 2 * (WHOLE // BLOCK)
        assert disk_of(again).stats().num_read == 2 * (WHOLE // BLOCK)


def test_a_page_that_is_bad_on_the_disk_is_computed(tiny, prompts, expected, tmp_path):
    port, root = free_port(), tmp_path / "cache"
    settings = {"listen": f"127.0.0.1:{port}", "path": str(root), "share": "pool"}
    with role_engine(tiny, "kv_both", extra=settings) as first:
        ask(first, prompts[:1])
        run_out(first)
    for path in root.rglob("*.kv"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    with role_engine(tiny, "kv_both", extra=settings) as again, consumer(tiny, port) as other:
        (found,) = ask(other, prompts[:1])
        check_same([found], expected[:1])
        assert found.cached == 0
        assert disk_of(again).stats().num_corrupt > 0
        assert peer_store(again).metrics().sent_pages == 0
