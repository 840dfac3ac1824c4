# SPDX-License-Identifier: Apache-2.0
"""vLLM's unchanged P/D proxies and the example's, in front of two servers."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest
from e2e.server import Server, free_port, serve
from upstream import archive

pytestmark = [pytest.mark.slow, pytest.mark.heavy, pytest.mark.timeout(900)]

MODEL = "smollm2"
OPTIONS = (
    *("--served-model-name", MODEL),
    *("--max-model-len", "1024"),
    *("--max-num-batched-tokens", "256"),
    *("--kv-cache-memory-bytes", str(128 << 20)),
    "--enable-prefix-caching",
)
HITS = "vllm:external_prefix_cache_hits_total"
TOY = "tests/v1/kv_connector/nixl_integration/toy_proxy_server.py"
MULTITURN = archive.PROXIES + "disagg_proxy_multiturn.py"
DEMO = archive.PROXIES + "disagg_proxy_demo.py"
OWN = Path(__file__).parents[2] / "examples" / "disaggregated" / "proxy.py"
TOY_HEALTH, MULTITURN_HEALTH, DEMO_HEALTH = "/healthcheck", "/health", "/status"
_START_S = 120.0

#: About 700 characters of it, elsewhere each time, are a prompt that no server has seen.
TEXT = (Path(__file__).parents[2] / "LICENSE").read_text()
PROMPT_CHARS = 700


@dataclass(frozen=True)
class Pair:
    """Two servers that pull K/V from each other, and a single one."""

    prefill: Server
    decode: Server
    alone: Server


@pytest.fixture(scope="module")
def pair(smollm2, tmp_path_factory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("servers")
    ports = {"prefill": free_port(), "decode": free_port()}
    with ExitStack() as stack:

        def start(name: str, *more: str) -> Server:
            return stack.enter_context(serve(smollm2, [*OPTIONS, *more], folder / name))

        def of_pair(name: str, other: str) -> Server:
            extra = {
                "listen": f"127.0.0.1:{ports[name]}",
                "peers": [f"127.0.0.1:{ports[other]}"],
                "pull": "always",  # also where computing is faster
            }
            config = {
                "kv_connector": "MetalKVConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": extra,
            }
            return start(name, "--kv-transfer-config", json.dumps(config))

        yield Pair(of_pair("prefill", "decode"), of_pair("decode", "prefill"), start("alone"))


def of_vllm(name: str) -> Path:
    """Returns one of vLLM's proxies."""
    try:
        return archive.file(name)
    except archive.UnavailableError as error:
        pytest.skip(str(error))


@contextmanager
def proxy(script: Path, arguments: list[str], health: str, log: Path) -> Iterator[openai.OpenAI]:
    """Runs a proxy until the block ends; yields a client of it."""
    port = free_port()
    command = [sys.executable, str(script), "--port", str(port), *arguments]
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        url = f"http://127.0.0.1:{port}"
        try:
            wait_until_up(process, url + health, log)
            yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
        finally:
            process.kill()
            process.wait()


def wait_until_up(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise AssertionError(f"the proxy does not answer; it printed:\n{log.read_text()[-2000:]}")


def host_and_port(server: Server) -> list[str]:
    return server.url.removeprefix("http://").split(":")


def instances(pair: Pair) -> list[str]:
    """Returns the two servers as options of vLLM's toy and multi-turn proxies."""
    arguments = []
    for role, server in (("prefiller", pair.prefill), ("decoder", pair.decode)):
        host, port = host_and_port(server)
        arguments += [f"--{role}-host", host, f"--{role}-port", port]
    return arguments


@pytest.fixture(scope="module")
def toy(pair, tmp_path_factory):
    log = tmp_path_factory.mktemp("toy") / "log"
    with proxy(of_vllm(TOY), ["--host", "127.0.0.1", *instances(pair)], TOY_HEALTH, log) as client:
        yield client


@pytest.fixture(scope="module")
def multiturn(pair, tmp_path_factory):
    log = tmp_path_factory.mktemp("multiturn") / "log"
    arguments = ["--host", "127.0.0.1", *instances(pair)]
    with proxy(of_vllm(MULTITURN), arguments, MULTITURN_HEALTH, log) as client:
        yield client


@pytest.fixture(scope="module")
def demo(pair, tmp_path_factory):
    log = tmp_path_factory.mktemp("demo") / "log"
    of = {name: ":".join(host_and_port(getattr(pair, name))) for name in ("prefill", "decode")}
    arguments = ["--model", MODEL, "--prefill", of["prefill"], "--decode", of["decode"]]
    with proxy(of_vllm(DEMO), arguments, DEMO_HEALTH, log) as client:
        yield client


def complete(client: openai.OpenAI, prompt: str, stream: bool, **more: object) -> str:
    settings = {"model": MODEL, "temperature": 0, "max_tokens": 24, "extra_body": more}
    answer = client.completions.create(prompt=prompt, stream=stream, **settings)
    if not stream:
        return answer.choices[0].text
    return "".join(chunk.choices[0].text for chunk in answer if chunk.choices)


def chat(
    client: openai.OpenAI, messages: list[dict], stream: bool, max_tokens: int = 24, **more: object
) -> str:
    settings = {"model": MODEL, "temperature": 0, "max_tokens": max_tokens, "extra_body": more}
    answer = client.chat.completions.create(messages=messages, stream=stream, **settings)
    if not stream:
        return answer.choices[0].message.content
    return "".join(chunk.choices[0].delta.content or "" for chunk in answer if chunk.choices)


def said(who: str, text: str) -> dict:
    return {"role": who, "content": text}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("kind", ["completion", "chat"])
@pytest.mark.parametrize("name", ["toy", "multiturn", "demo"])
def test_answers_are_one_servers_and_prompts_are_pulled(request, pair, name, kind, stream):
    case = 4 * ("toy", "multiturn", "demo").index(name) + 2 * (kind == "chat") + stream
    prompt = TEXT[case * PROMPT_CHARS :][:PROMPT_CHARS]
    client = request.getfixturevalue(name)
    before = pair.decode.metric(HITS)
    more = {"conversation_id": f"{case}"} if name == "multiturn" else {}
    with pair.alone.client() as alone:
        if kind == "chat":
            messages = [said("user", f"{prompt}\n\nSay this in other words.")]
            assert chat(client, messages, stream, **more) == chat(alone, messages, stream)
        else:
            assert complete(client, prompt, stream, **more) == complete(alone, prompt, stream)
    # A prompt has some 150 tokens; those of its last block, and of a chat's first, need not come.
    assert pair.decode.metric(HITS) - before >= 64


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_the_second_turn_has_prefill_pull_what_decode_wrote(pair, multiturn, stream):
    """P finds K/V of D's answer at D, whether or not it is told where."""
    messages = [said("user", f"Write a long story about {('a harbour', 'a forest')[stream]}.")]
    conversation = {"conversation_id": f"story-{stream}"}
    with pair.alone.client() as alone:
        first = chat(multiturn, messages, stream, 96, **conversation)
        assert first == chat(alone, messages, stream, 96)
        messages += [said("assistant", first), said("user", "Go on.")]
        of_decode, of_prefill = pair.decode.metric(HITS), pair.prefill.metric(HITS)
        second = chat(multiturn, messages, stream, **conversation)
        assert second == chat(alone, messages, stream)
    # An answer of 96 tokens fills five blocks at least, the last of which may be on its way.
    assert pair.prefill.metric(HITS) - of_prefill >= 48
    assert pair.decode.metric(HITS) >= of_decode


def test_the_examples_proxy_goes_on_without_its_prefill_server(pair, tmp_path):
    """Runs last, because it kills the server."""
    arguments = ["--prefill", pair.prefill.url, "--decode", pair.decode.url, "--shortest", "64"]
    prompts = [TEXT[-PROMPT_CHARS:], TEXT[-2 * PROMPT_CHARS : -PROMPT_CHARS]]
    with pair.alone.client() as alone, proxy(OWN, arguments, "/health", tmp_path / "log") as client:
        before = pair.decode.metric(HITS)
        assert complete(client, prompts[0], True) == complete(alone, prompts[0], False)
        pulled = pair.decode.metric(HITS)
        assert pulled - before >= 64
        os.killpg(pair.prefill.process.pid, signal.SIGKILL)
        for stream in (False, True):
            assert complete(client, prompts[1], stream) == complete(alone, prompts[1], stream)
        assert pair.decode.metric(HITS) == pulled
        assert pair.decode.health() == 200
