# SPDX-License-Identifier: Apache-2.0
"""The cluster example on Ray Serve: servers with tenants, killed and scaled."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import httpx
import openai
import psutil
import pytest
from e2e.models import first_two_layers
from e2e.server import free_port
from e2e.tenants import write_settings
from prometheus_client.parser import text_string_to_metric_families
from redis_server import NO_REDIS, REDIS, redis_server

from vllm_metal.engine.models.embedded import embedded_model_path

NO_RAY = "Ray Serve is not installed: pip install 'ray[serve]'"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),  # servers start amid the tests, beside those that compute
    pytest.mark.skipif(find_spec("ray") is None, reason=NO_RAY),
    pytest.mark.skipif(REDIS is None, reason=NO_REDIS),
]

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "cluster" / "serve.py"
START_S = 800.0
TARGET = 4  # open requests a replica
DOWNSCALE_S = 10
AT_A_TIME = 2  # requests that a server computes; more wait in it without a first byte
TEXT = "The river rises in the hills, runs through three towns and a lake, and ends in the sea. "
PROMPTS = [f"{number}. {TEXT}" for number in range(12)]
TOKENS = 48
MOST_TOKENS = 7900
STATES = ("vllm:num_requests_running", "vllm:num_requests_waiting")
LEAVES = "Removing 1 replica from Deployment(name='Replica', app='vllm')"
REFUSED = '"POST /v1/completions HTTP/1.1" 503'  # in a server's log


@dataclass(frozen=True)
class Cluster:
    """The running command, and its clients' data."""

    url: str
    process: subprocess.Popen[bytes]
    keys: dict[str, str]
    log: Path

    def servers(self) -> list[psutil.Process]:
        """Returns the `vllm serve` processes that the command started."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            model = str(self.log.parent / "model")
            if words[1:5] == ["-m", "vllm.entrypoints.cli.main", "serve", model]:
                found.append(process)
        return found

    def ready(self) -> list[psutil.Process]:
        """Returns the servers that answer."""
        return [server for server in self.servers() if self._answers(server)]

    def metric(self, server: psutil.Process, name: str, **labels: str) -> float:
        """Sums one server's samples."""
        key = {"Authorization": f"Bearer {self.keys['metrics']}"}
        text = httpx.get(f"{_own_url(server)}/metrics", headers=key, timeout=60).text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def held(self, server: psutil.Process) -> float:
        """Returns a server's requests, including waiting ones."""
        return sum(self.metric(server, state) for state in STATES)

    def ask(self, tenant: str, prompt: str, **more: object) -> httpx.Response:
        """Sends a greedy request."""
        headers = {"Authorization": f"Bearer {self.keys[tenant]}"} if tenant else {}
        headers |= more.pop("headers", {})  # type: ignore[arg-type]
        body = {"model": "m", "prompt": prompt, "temperature": 0, "max_tokens": 8} | more
        url = f"{self.url}/v1/completions"
        return httpx.post(url, json=body, headers=headers, timeout=900)

    def client(self) -> openai.OpenAI:
        """Makes a client without retries that bypasses the response cache."""
        return openai.OpenAI(
            base_url=f"{self.url}/v1",
            api_key=self.keys["acme"],
            default_headers={"Cache-Control": "no-cache"},
            max_retries=0,
            timeout=300,
        )

    @staticmethod
    def _answers(server: psutil.Process) -> bool:
        try:
            return httpx.get(f"{_own_url(server)}/health", timeout=10).status_code == 200
        except (httpx.TransportError, psutil.NoSuchProcess):
            return False


def _own_url(server: psutil.Process) -> str:
    words = server.cmdline()
    return f"http://127.0.0.1:{words[words.index('--port') + 1]}"


def wait_for(condition: Callable[[], object], seconds: float = START_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"still not so after {seconds} s"
        time.sleep(0.25)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    keys = write_settings(folder, limits="timeout_s = 300\n")
    settings, redis_port = folder / "serving.toml", free_port()
    kept = f'redis = "redis://127.0.0.1:{redis_port}/0"'
    settings.write_text(settings.read_text().replace('path = "answers"', kept))
    (folder / "model").mkdir()
    model = first_two_layers(str(embedded_model_path(dequantize=True)), folder / "model")
    port, log = free_port(), folder / "log"
    command = [
        *(sys.executable, str(SCRIPT), model, "--port", str(port)),
        *("--replicas-per-node", "2", "--target-ongoing-requests", str(TARGET)),
        *("--upscale-delay", "1", "--downscale-delay", str(DOWNSCALE_S), "--look-back", "3"),
        *("--", "--served-model-name", "m", "--max-model-len", "8192"),
        *("--max-num-seqs", str(AT_A_TIME), "--kv-cache-memory-bytes", "256M"),
        *("--middleware", "vllm_metal.serving.Tenants", "--enable-prompt-tokens-details"),
        *("--shutdown-timeout", "600"),
    ]
    environment = os.environ | {"VLLM_METAL_SERVING_CONFIG": str(settings), "RAY_DEDUP_LOGS": "0"}
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "PYTHONDONTWRITEBYTECODE", "RAY_ADDRESS"):
        environment.pop(name, None)
    with redis_server(redis_port, folder), log.open("w") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        running = Cluster(f"http://127.0.0.1:{port}", process, keys, log)
        try:
            wait_for(lambda: "Serving at" in log.read_text() or process.poll() is not None)
            assert process.poll() is None, log.read_text()[-3000:]
            # A server reads its weights first, in the background.
            wait_for(lambda: running.ask("acme", "Once").headers["x-cache"] != "BYPASS")
            yield running
        finally:
            process.terminate()
            process.wait(120)
    wait_for(lambda: running.servers() == [], 90)


@contextmanager
def load(cluster: Cluster, streams: int) -> Iterator[None]:
    """Keeps this many streams open, whatever happens to them."""
    ended = threading.Event()

    def keep_one_open() -> None:
        with cluster.client() as client:
            while not ended.is_set():
                try:
                    asked = {"prompt": TEXT, "max_tokens": 4000, "extra_body": {"ignore_eos": True}}
                    with client.completions.create(model="m", stream=True, **asked) as events:
                        for _ in events:
                            if ended.is_set():
                                break
                except openai.APIError:
                    time.sleep(0.5)

    with ThreadPoolExecutor(streams) as pool, ExitStack() as stack:
        stack.callback(ended.set)
        for _ in range(streams):
            pool.submit(keep_one_open)
        yield


@pytest.fixture(scope="module")
def texts(cluster: Cluster) -> list[str]:
    """Returns a single server's answers to each prompt, in sequence."""
    assert len(cluster.servers()) == 1
    fresh = {"Cache-Control": "no-cache"}
    more = {"max_tokens": TOKENS, "ignore_eos": True, "headers": fresh}
    replies = [cluster.ask("acme", prompt, **more) for prompt in PROMPTS]
    return [reply.json()["choices"][0]["text"] for reply in replies]


def test_tenants_and_kept_answers_hold(cluster: Cluster, texts: list[str]) -> None:
    assert cluster.ask("", TEXT).status_code == 401
    marks = {
        tenant: [cluster.ask(tenant, TEXT * 4).headers["x-cache"] for _ in range(2)]
        for tenant in ("acme", "other")
    }
    assert marks == {"acme": ["MISS", "HIT"], "other": ["MISS", "HIT"]}
    cached = []
    for tenant in ("acme", "acme", "other"):
        reply = cluster.ask(tenant, "Salts. " + TEXT * 4, headers={"Cache-Control": "no-cache"})
        details = reply.json()["usage"]["prompt_tokens_details"] or {}
        cached.append(details.get("cached_tokens") or 0)
    assert cached[0] == 0 and cached[1] >= 64 and cached[2] == 0


def test_what_a_server_refuses_is_passed_on(cluster: Cluster) -> None:
    refused = cluster.ask("acme", TEXT, max_tokens=-1)
    assert refused.status_code == 400
    assert "max_tokens" in refused.json()["error"]["message"]
    assert httpx.get(f"{cluster.url}/health").status_code == 200
    key = {"Authorization": f"Bearer {cluster.keys['acme']}"}
    models = httpx.get(f"{cluster.url}/v1/models", headers=key).json()
    assert [model["id"] for model in models["data"]] == ["m"]
    assert httpx.get(f"{cluster.url}/metrics").status_code == 404  # each server's own


def test_a_client_that_hangs_up_ends_its_request(cluster: Cluster) -> None:
    (server,) = cluster.servers()
    with cluster.client() as client:
        asked = {"prompt": TEXT, "max_tokens": 4000, "extra_body": {"ignore_eos": True}}
        events = client.completions.create(model="m", stream=True, **asked)
        next(events)
        assert cluster.metric(server, "vllm:num_requests_running") == 1
        events.close()
    wait_for(lambda: cluster.metric(server, "vllm:num_requests_running") == 0, 60)


def test_a_queue_starts_a_second_server_which_has_the_first_ones_answers(cluster: Cluster) -> None:
    assert cluster.ask("acme", "Kept. " + TEXT).headers["x-cache"] == "MISS"
    with load(cluster, 2 * TARGET):
        wait_for(lambda: len(cluster.ready()) == 2)
        servers, asked = cluster.ready(), 0
        hits = {"name": "vllm:response_cache_requests_total", "result": "hit"}
        before = [cluster.metric(server, **hits) for server in servers]

        def all_had_hits() -> bool:
            nonlocal asked
            # A server that was just started reads its weights first, and answers by itself.
            asked += cluster.ask("acme", "Kept. " + TEXT).headers["x-cache"] == "HIT"
            return all(
                cluster.metric(server, **hits) > count
                for server, count in zip(servers, before, strict=True)
            )

        wait_for(all_had_hits, 300)
        after = [cluster.metric(server, **hits) for server in servers]
        assert sum(after) - sum(before) == asked


def ask_and_read(cluster: Cluster, prompt: str, stream: bool, began: list[str]) -> str | None:
    """Returns the text; None for a stream that was cut, with an error, after it began."""
    asked = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
    asked["extra_body"] = {"ignore_eos": True}
    with cluster.client() as client:
        if not stream:
            return client.completions.create(model="m", **asked).choices[0].text
        text = ""
        try:
            for event in client.completions.create(model="m", stream=True, **asked):
                text += event.choices[0].text
                began.append(prompt)
        except openai.APIError as error:
            assert "before its answer was complete" in str(error)
            assert text  # else it was to be sent again
            return None
        return text


def test_a_killed_server_loses_no_request_without_a_first_byte(
    cluster: Cluster, texts: list[str]
) -> None:
    with load(cluster, 2 * TARGET):
        wait_for(lambda: len(cluster.ready()) == 2)
    began: list[str] = []
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = [
            pool.submit(ask_and_read, cluster, prompt, number % 2 == 0, began)
            for number, prompt in enumerate(PROMPTS)
        ]
        wait_for(lambda: began, 300)
        held = {server: cluster.held(server) for server in cluster.ready()}
        victim = max(held, key=lambda server: held[server])
        os.killpg(victim.pid, signal.SIGKILL)
        found = [answer.result() for answer in answers]
    cut = [text for text in found if text is None]
    assert held[victim] > len(cut)  # it had more than those, and they were sent again
    assert len(cut) <= AT_A_TIME
    for text, expected in zip(found, texts, strict=True):
        assert text in (None, expected)


def read_long(cluster: Cluster, prompt: str, max_tokens: int) -> tuple[str, str | None, int]:
    """Returns text, finish reason and number of tokens of a long stream."""
    asked = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    asked |= {"extra_body": {"ignore_eos": True}, "stream_options": {"include_usage": True}}
    text, reason, tokens = "", None, 0
    with cluster.client() as client:
        for event in client.completions.create(model="m", stream=True, **asked):
            for choice in event.choices:
                text += choice.text
                reason = choice.finish_reason or reason
            tokens = event.usage.completion_tokens if event.usage else tokens
    return text, reason, tokens


def tokens_of(cluster: Cluster, seconds: float) -> int:
    """Returns the tokens that a stream gets in this time beside others, by the servers' metrics."""
    name = "vllm:inter_token_latency_seconds"
    ready = cluster.ready()
    spent = sum(cluster.metric(server, f"{name}_sum") for server in ready)
    count = sum(cluster.metric(server, f"{name}_count") for server in ready)
    return min(MOST_TOKENS, int(seconds * count / spent))


@contextmanager
def long_streams(
    cluster: Cluster, texts: list[str], count: int, seconds: float
) -> Iterator[list[psutil.Process]]:
    """Runs two servers with these streams only; asserts that each stream completes."""
    with ThreadPoolExecutor(count) as pool:
        with load(cluster, 2 * TARGET):
            wait_for(lambda: len(cluster.ready()) == 2)
            servers = cluster.ready()
            max_tokens = tokens_of(cluster, seconds)
        before = [answered(cluster, server) for server in servers]
        wait_for(  # until Ray gives requests to both
            lambda: (
                all_are_answered(cluster, 2)
                and all(
                    answered(cluster, server) > earlier
                    for server, earlier in zip(servers, before, strict=True)
                )
            ),
            120,
        )
        wait_for(lambda: sum(map(cluster.held, servers)) == 0, 60)
        streams = []
        for prompt in PROMPTS[:count]:  # one after another, so that each goes where there are fewer
            streams.append(pool.submit(read_long, cluster, prompt, max_tokens))
            wait_for(lambda: sum(map(cluster.held, servers)) == len(streams), 60)
        assert all(cluster.metric(server, STATES[0]) for server in servers)
        yield servers
        for stream, expected in zip(streams, texts, strict=False):
            text, reason, tokens = stream.result()
            assert (reason, tokens) == ("length", max_tokens)
            assert text.startswith(expected)


def test_one_that_is_told_to_end_sends_nobody_away(cluster: Cluster, texts: list[str]) -> None:
    """It finishes its requests and answers 503; Ray hears of it only at the end."""
    with long_streams(cluster, texts, TARGET + 2, 20) as (told, _):  # two replicas' worth
        told.send_signal(signal.SIGTERM)
        wait_for(lambda: httpx.get(f"{_own_url(told)}/health").status_code == 503, 60)
        before = cluster.log.read_text().count(REFUSED)
        assert all_are_answered(cluster, 6)
        assert cluster.log.read_text().count(REFUSED) > before  # it was asked
    told.wait(120)


def test_a_server_that_leaves_answers_what_it_has(cluster: Cluster, texts: list[str]) -> None:
    """The open streams need one server less, and both compute some of them."""
    before = cluster.log.read_text().count(LEAVES)
    with long_streams(cluster, texts, 2, 4 * DOWNSCALE_S) as servers:
        wait_for(lambda: cluster.log.read_text().count(LEAVES) > before, 120)
        assert all(cluster.metric(server, STATES[0]) for server in servers)
        assert all_are_answered(cluster, TARGET - 2)  # with the streams, one replica's worth
    wait_for(lambda: len(cluster.servers()) == 1)
    assert cluster.servers()[0] in servers
    assert all_are_answered(cluster, 2)


def all_are_answered(cluster: Cluster, count: int) -> bool:
    """Returns whether this many concurrent short requests are answered."""
    prompts = [f"{number} {time.time()} {TEXT}" for number in range(count)]
    with ThreadPoolExecutor(count) as pool:
        asked = [pool.submit(cluster.ask, "acme", each, ignore_eos=True) for each in prompts]
        return [each.result().status_code for each in asked] == [200] * count


def answered(cluster: Cluster, server: psutil.Process) -> float:
    """Returns the number of requests that a server has answered completely."""
    return cluster.metric(server, "vllm:request_success_total", finished_reason="length")
