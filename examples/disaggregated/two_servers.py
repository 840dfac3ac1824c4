# SPDX-License-Identifier: Apache-2.0
"""Runs disaggregated prefill on one machine: two servers of the embedded model and a proxy.

Sends a long prompt through the proxy and to a single server, and compares. Uses no network. The
exit status is 1 if the texts differ or no K/V were pulled. All processes share this CPU, so the
times do not show what a second machine would gain.
"""

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import _common
import _terminal
import httpx
from _processes import POLL_S, VLLM, Process, ProcessError, free_ports, ready, running

HERE = Path(__file__).resolve().parent
TEXT = HERE.parents[1] / "LICENSE"  # a long English text in every clone
QUESTION = "What does this license allow? Answer in one sentence."
MODEL = "smollm2"
KV_CACHE_GIB = 0.25
MAX_MODEL_LEN = 4096
ANSWER_TOKENS = 48
ANSWER_S = 1200.0  # a prompt of 4,000 tokens takes a minute on two x86 cores


@dataclass(frozen=True)
class Answer:
    """A streamed answer with its times."""

    text: str
    prompt_tokens: int
    output_tokens: int
    ttft: float  # seconds until the first text
    decode_time: float  # seconds from the first to the last text

    def cells(self) -> tuple[str, ...]:
        """Formats TTFT and speed for the table."""
        speed = "–"
        if self.output_tokens > 1 and self.decode_time > 0:
            speed = f"{(self.output_tokens - 1) / self.decode_time:.1f}"
        return (f"{1e3 * self.ttft:.0f}", speed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--characters",
        type=int,
        default=6000,
        help="length of the prompt in characters, about 4.5 per token",
    )
    args = parser.parse_args()
    device = _common.prepare(offline=True)
    if device is None:
        _terminal.say(
            "two_servers: VLLM_METAL_DEVICE=off turns vllm-metal off; unset it", "bold red"
        )
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that its processes are ended too
    try:
        with _terminal.working("Preparing the embedded model (converted once, then cached)"):
            model = _common.default_model()
        with ExitStack() as stack:
            return run(stack, str(model), args.characters)
    except KeyboardInterrupt:
        return 130
    except (ImportError, ProcessError, httpx.HTTPError) as error:
        _terminal.say(f"two_servers: {type(error).__name__}: {error}", "bold red")
        return 1


def run(stack: ExitStack, model: str, characters: int) -> int:
    """Starts everything, asks, and compares; returns the exit status."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="two-servers-")))
    prefill_port, decode_port, plain_port, proxy_port, kv_port = free_ports(5)

    def server(name: str, port: int, transfer: dict | None = None) -> Process:
        options = [] if transfer is None else ["--kv-transfer-config", json.dumps(transfer)]
        command = serve_command(model, port, options)
        return stack.enter_context(running(name, command, port, folder))

    address = f"127.0.0.1:{kv_port}"
    prefill = server("prefill server", prefill_port, connector("kv_producer", {"listen": address}))
    decode = server("decode server", decode_port, connector("kv_consumer", {"peers": [address]}))
    plain = server("plain server", plain_port)
    command = [sys.executable, str(HERE / "proxy.py"), "--port", str(proxy_port)]
    command += ["--prefill", prefill.url, "--decode", decode.url]
    proxy = stack.enter_context(running("proxy", command, proxy_port, folder))
    await_all([proxy, prefill, decode, plain])
    await_helpers(proxy)

    for url in (proxy.url, plain.url):  # warm-up
        ask(url, "Once upon a time", 4)
    prompt = f"{TEXT.read_text()[:characters]}\n\n{QUESTION}"
    before = decode.counter("external_prefix_cache_hits")
    with _terminal.working("A long prompt through the proxy"):
        apart = ask(proxy.url, prompt, ANSWER_TOKENS)
    pulled = int(decode.counter("external_prefix_cache_hits") - before)
    with _terminal.working("The same prompt to the plain server"):
        alone = ask(plain.url, prompt, ANSWER_TOKENS)
    return report(apart, alone, pulled)


def connector(role: str, extra: dict) -> dict:
    """Returns a --kv-transfer-config."""
    return {
        "kv_connector": "MetalKVConnector",
        "kv_role": role,
        "kv_connector_extra_config": extra,
    }


def serve_command(model: str, port: int, options: Sequence[str]) -> list[str]:
    """Returns the command of a `vllm serve` on a local port."""
    return [
        *VLLM,
        *("serve", model, "--host", "127.0.0.1", "--port", str(port)),
        *("--served-model-name", MODEL),
        *("--max-model-len", str(MAX_MODEL_LEN)),
        *("--kv-cache-memory-bytes", str(int(KV_CACHE_GIB * 2**30))),
        "--enable-prefix-caching",
        *options,
    ]


def await_all(processes: Sequence[Process]) -> None:
    """Waits for all processes, and prints which are ready."""
    started = time.perf_counter()
    names = ", ".join(process.name for process in processes)
    with _terminal.working(f"Starting: {names}"):
        for process in ready(processes):
            took = time.perf_counter() - started
            _terminal.say(f"{process.name}: ready after {took:.0f} s", "dim")


def await_helpers(proxy: Process) -> None:
    """Waits until the proxy, which probes every two seconds, has found its prefill server."""
    while any(helper["away"] for helper in httpx.get(f"{proxy.url}/status").json()["helpers"]):
        time.sleep(POLL_S)


def ask(url: str, question: str, max_tokens: int) -> Answer:
    """Streams a greedy answer.

    Raises:
        httpx.HTTPError: there is no answer, or it breaks off.
    """
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    text, usage, first, last = "", {"prompt_tokens": 0, "completion_tokens": 0}, 0.0, 0.0
    started = time.perf_counter()
    path = f"{url}/v1/chat/completions"
    with httpx.stream("POST", path, json=body, timeout=ANSWER_S) as reply:
        reply.raise_for_status()
        for line in reply.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                if piece := choice["delta"].get("content"):
                    text += piece
                    last = time.perf_counter()
                    first = first or last
    counts = (usage["prompt_tokens"], usage["completion_tokens"])
    return Answer(text, *counts, first - started, last - first)


def report(apart: Answer, alone: Answer, pulled: int) -> int:
    """Prints the result; returns the exit status."""
    _terminal.say(f"\n{alone.text.strip()}\n")
    _terminal.table(
        ("", "prompt tokens", "of these pulled", "TTFT ms", "tok/s"),
        [
            ("disaggregated prefill", str(apart.prompt_tokens), str(pulled), *apart.cells()),
            ("one server", str(alone.prompt_tokens), "–", *alone.cells()),
        ],
    )
    wrong = []
    if apart.text != alone.text:
        wrong.append(f"the texts differ; through the proxy:\n{apart.text.strip()}")
    if not pulled:
        wrong.append("the decode server computed the prompt itself")
    for line in wrong:
        _terminal.say(f"two_servers: {line}", "bold red")
    if not wrong:
        _terminal.say(
            "The texts are equal. Both servers share this machine, so there is no gain in time."
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
