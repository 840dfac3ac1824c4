# SPDX-License-Identifier: Apache-2.0
"""Two optional real servers prefill for a third through the example's proxy."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from e2e.fuzz.models import MAX_LEN, VOCAB, write_models
from e2e.harness import Dense
from e2e.peers import transfer
from e2e.server import Server, free_port, serve

pytestmark = [pytest.mark.slow, pytest.mark.heavy, pytest.mark.timeout(600)]

PROXY = Path(__file__).parents[2] / "examples" / "disaggregated" / "proxy.py"
OPTIONS = (
    *("--served-model-name", "toy"),
    *("--max-model-len", str(MAX_LEN)),
    *("--kv-cache-memory-bytes", str(8 << 20)),
    "--enable-prefix-caching",
)
BLOCK, PROMPT, ANSWER, SHORTEST = 16, 200, 12, 64
PULLED = (PROMPT - 1) // BLOCK * BLOCK
_START_S = 60.0


@dataclass(frozen=True)
class Proxied:
    """The servers, and the address of their proxy."""

    model: str
    helpers: tuple[Server, Server]
    decode: Server
    url: str

    def status(self) -> list[dict]:
        """Returns the proxy's status of its helpers."""
        with urllib.request.urlopen(f"{self.url}/status", timeout=30) as reply:
            return json.load(reply)["helpers"]

    @property
    def pulled(self) -> float:
        """Returns the decode server's count of prompt tokens from helpers."""
        return self.decode.metric("vllm:prompt_tokens_cached_by_source_total", source="p2p")


@contextmanager
def proxy(helpers: tuple[Server, ...], decode: Server, log: Path) -> Iterator[str]:
    """Runs the example's proxy until the block ends; yields its address."""
    port = free_port()
    command = [sys.executable, str(PROXY), "--port", str(port), "--decode", decode.url]
    command += ["--shortest", str(SHORTEST)]
    for helper in helpers:
        command += ["--prefill", helper.url]
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + _START_S
    try:
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
        yield url
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def proxied(tmp_path_factory) -> Iterator[Proxied]:
    folder = tmp_path_factory.mktemp("helpers")
    write_models(folder)
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    configs = {
        "a": transfer("kv_producer", listen=addresses[0]),
        "b": transfer("kv_producer", listen=addresses[1]),
        "d": transfer("kv_consumer", peers=addresses),
    }
    with ExitStack() as stack, ThreadPoolExecutor() as threads:

        def start(name: str) -> Server:
            options = [*OPTIONS, "--kv-transfer-config", json.dumps(configs[name])]
            return stack.enter_context(serve(str(folder / "full"), options, folder / name))

        first, second, decode = threads.map(start, configs)
        url = stack.enter_context(proxy((first, second), decode, folder / "proxy"))
        yield Proxied(str(folder / "full"), (first, second), decode, url)


def complete(url: str, prompt: list[int], stream: bool = False) -> list[int]:
    """Returns a greedy answer's tokens."""
    body = {"model": "toy", "prompt": prompt, "max_tokens": ANSWER, "temperature": 0}
    body |= {"ignore_eos": True, "stream": stream, "return_token_ids": True}
    asked = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=120) as reply:
        if not stream:
            return json.load(reply)["choices"][0]["token_ids"]
        lines = [line.removeprefix(b"data: ") for line in reply if line.startswith(b"data: {")]
    return [token for line in lines for token in json.loads(line)["choices"][0]["token_ids"]]


def prompts(count: int, seed: int, length: int = PROMPT) -> list[list[int]]:
    return np.random.default_rng(seed).integers(1, VOCAB, (count, length)).tolist()


@pytest.fixture(scope="module")
def dense(proxied) -> Dense:
    """mlx-lm's own model, which judges all answers."""
    return Dense(proxied.model)


def ask(proxied: Proxied, given: list[list[int]], dense: Dense, stream: bool = False) -> None:
    """Sends all prompts at once and checks the answers."""
    with ThreadPoolExecutor(len(given)) as threads:
        answers = list(threads.map(lambda each: complete(proxied.url, each, stream), given))
    for prompt, answer in zip(given, answers, strict=True):
        assert len(answer) == ANSWER
        dense.check(prompt, answer)


def test_prompts_are_shared_out_and_pulled(proxied, dense):
    before, given = proxied.pulled, prompts(6, seed=1)
    ask(proxied, given, dense, stream=True)
    assert proxied.pulled - before == len(given) * PULLED
    assert all(helper["requests"] > 0 for helper in proxied.status())
    for helper in proxied.helpers:
        assert helper.metric("vllm:prompt_tokens_total") >= PROMPT


def test_short_prompts_are_no_helpers(proxied, dense):
    before, pulled = proxied.status(), proxied.pulled
    ask(proxied, prompts(2, seed=2, length=SHORTEST - 1), dense)
    assert [each["requests"] for each in proxied.status()] == [each["requests"] for each in before]
    assert proxied.pulled == pulled


def test_one_helper_is_killed_and_then_the_other(proxied, dense):
    """Runs last. Requests continue on the other helper, then on the server itself."""
    for place, helper in enumerate(proxied.helpers):
        os.killpg(helper.process.pid, signal.SIGKILL)
        helper.process.wait()
        given, before = prompts(4, seed=3 + place), proxied.pulled
        ask(proxied, given, dense)
        left = len(proxied.helpers) - 1 - place
        assert proxied.pulled - before == (len(given) * PULLED if left else 0)
        assert sum(each["away"] for each in proxied.status()) == place + 1
    assert proxied.decode.health() == 200
