# SPDX-License-Identifier: Apache-2.0
"""A server that frees its memory while idle, from the view of clients and user."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from e2e.server import engine_core, serve
from prometheus_client.parser import text_string_to_metric_families

pytestmark = pytest.mark.more

POOL = 256 << 20
#: vLLM's names of levels 0, 1 and 2 (`sleep_state` of vllm:engine_sleep_state).
STATES = ("awake", "weights_offloaded", "discard_all")
SPELL, WEIGHTS = 1.0, 4.0  # seconds without a request


@contextmanager
def idle_server(model, folder, *more, environment=None, **settings):
    options = (
        *more,
        *("--served-model-name", "m"),
        *("--max-model-len", "512"),
        *("--max-num-batched-tokens", "256"),
        *("--kv-cache-memory-bytes", str(POOL)),
        "--enable-prompt-tokens-details",
        *("--additional-config", json.dumps(settings)),
    )
    with serve(model, options, folder / "log", environment=environment or {}) as started:
        yield started


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("idle")


@pytest.fixture(scope="module")
def server(short, folder):
    """A server that sleeps after a second, deeper after three more; with all caches."""
    (folder / "serving.toml").write_text('[response_cache]\npath = "answers"\n')
    environment = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_METAL_SERVING_CONFIG": str(folder / "serving.toml"),
    }
    settings = {
        "idle_sleep": SPELL,
        "idle_sleep_weights": WEIGHTS,
        "prefix_cache_dir": str(folder / "blocks"),
    }
    middleware = ("--middleware", "vllm_metal.serving.Tenants")
    with idle_server(short, folder, *middleware, environment=environment, **settings) as started:
        yield started


def state(server):
    """Returns the engine's sleep level from its metric."""
    families = text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text)
    (now,) = (
        sample.labels["sleep_state"]
        for family in families
        for sample in family.samples
        if sample.name == "vllm:engine_sleep_state" and sample.value
    )
    return STATES.index(now)


def wait_for(level, server, seconds=240, pause=0.2):
    """Waits until the engine sleeps at `level` or deeper, checking at intervals."""
    deadline = time.monotonic() + seconds
    while state(server) < level:
        assert time.monotonic() < deadline, f"the level is {state(server)}"
        time.sleep(pause)


def post(server, path, **body):
    return httpx.post(f"{server.url}{path}", json={"model": "m", **body}, timeout=120)


def complete(server, prompt, **options):
    settings = {"prompt": prompt, "max_tokens": 4, "temperature": 0}
    return post(server, "/v1/completions", **(settings | options))


def resident(server):
    return engine_core(server).memory_info().rss


def text_and_resident(server, **options):
    """An answer, and the engine's memory before it sleeps again; a slow machine may look late."""
    while True:
        text = complete(server, "Of levels", **options).json()["choices"][0]["text"]
        found = resident(server)
        if state(server) == 0:
            return text, found


def test_memory_comes_back_and_the_next_request_is_answered(server):
    fresh, awake = text_and_resident(server)
    wait_for(1, server)
    without_pool = resident(server)
    assert awake - without_pool > 0.9 * POOL
    wait_for(2, server)
    assert without_pool - resident(server) > 50 << 20  # embeddings and two layers, in float32
    again, found = text_and_resident(server, max_tokens=5)
    assert again.startswith(fresh)
    assert found == pytest.approx(awake, abs=100 << 20)


def test_what_needs_no_engine_does_not_wake_it(server):
    kept = {"prompt": "A cached response", "max_tokens": 4, "temperature": 0}
    first = post(server, "/v1/completions", **kept)
    wait_for(1, server)
    assert server.health() == 200
    assert httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"] == "m"
    assert post(server, "/tokenize", prompt="Hello").json()["count"] > 0
    again = post(server, "/v1/completions", **kept)
    assert (again.headers["x-cache"], again.text) == ("HIT", first.text)
    assert httpx.get(f"{server.url}/is_sleeping").json() == {"is_sleeping": True}
    assert state(server) >= 1


def test_requests_at_the_moment_of_falling_asleep_are_answered(server):
    with ThreadPoolExecutor(4) as pool:
        for round_, late in enumerate((-0.05, -0.01, 0.0, 0.01, 0.05)):
            time.sleep(SPELL + late)
            prompts = [f"Of moments: {round_}, {number}" for number in range(3)]
            for answer in pool.map(lambda prompt: complete(server, prompt), prompts):
                assert answer.status_code == 200, answer.text
                assert answer.json()["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("level", [1, 2])
def test_a_prefix_is_on_the_disk_after_waking(server, level):
    text = f"{level}: " + "The quick brown fox jumps over the lazy dog. " * 20
    assert complete(server, text).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    wait_for(level, server)
    usage = complete(server, text + "Then it sleeps.").json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 190


def test_a_client_that_leaves_while_it_waits_harms_nobody(server):
    complete(server, "Of those who leave")
    wait_for(1, server)
    with pytest.raises(httpx.TimeoutException):
        httpx.post(f"{server.url}/v1/completions", json={"model": "m", "prompt": "a"}, timeout=0.01)
    assert complete(server, "Of those who stay").status_code == 200
    wait_for(1, server)


def test_a_failed_wake_is_a_503_and_the_next_request_tries_again(server, short):
    weights = Path(short) / "model.safetensors"
    assert weights.exists()
    complete(server, "Of weights")
    wait_for(2, server)
    away = weights.rename(weights.with_suffix(".away"))
    try:
        for stream in (False, True):
            failed = complete(server, "Of failures", stream=stream)
            assert failed.status_code == 503
            assert "Try again later" in failed.json()["error"]["message"]
            assert state(server) == 2
    finally:
        away.rename(weights)
    assert complete(server, "Of failures").status_code == 200


def test_what_the_user_puts_to_sleep_is_woken_by_the_user(server):
    complete(server, "Of users")
    wait_for(1, server)
    assert httpx.post(f"{server.url}/sleep?level=1", timeout=240).json()["status"] == "sleeping"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(complete, server, "Of those who wait for a user")
        time.sleep(2 * SPELL)
        assert not waiting.done()
        assert httpx.post(f"{server.url}/wake_up", timeout=240).json()["status"] == "awake"
        assert waiting.result().status_code == 200
    wait_for(1, server)


def test_it_ends_while_it_sleeps(server):
    """Runs last, because it ends the server."""
    complete(server, "Of ends")
    wait_for(2, server)
    before = len(server.log.read_text())
    server.process.terminate()
    assert server.process.wait(240) == 0
    log = server.log.read_text()[before:]
    assert "Traceback" not in log and "never awaited" not in log and "pending" not in log


@pytest.mark.slow
@pytest.mark.timeout(3600)  # it took 14 minutes on a machine that did much else
def test_a_hundred_cycles_take_no_memory(short, tmp_path):
    with idle_server(short, tmp_path, idle_sleep=0.2, idle_sleep_weights=0.2) as server:
        asleep = []
        for cycle in range(100):
            assert complete(server, f"{cycle}: Of cycles").status_code == 200
            wait_for(2, server)
            asleep.append(resident(server))
    first, last = asleep[9], asleep[-1]  # some buffers are made once
    print(f"{first >> 20} MiB after 10 cycles, {last >> 20} MiB after 100")
    assert last - first < 20 << 20
