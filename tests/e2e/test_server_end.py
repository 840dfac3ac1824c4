# SPDX-License-Identifier: Apache-2.0
"""A server as a service: engine killed, restarted, stopped, updated."""

import json
import plistlib
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from e2e.server import SPAWNED, engine_core
from e2e.tenants import (
    serve_tenants,
    wait_until_answers_are_kept,
    write_settings,
)

import vllm_metal
from vllm_metal.patches.vllm_patches.server_end import RETRY_AFTER_S

ROOT = Path(__file__).parents[2]
PLIST = ROOT / "deploy" / "launchd" / "org.vllm-metal.server.plist"
ENDING_S = 240  # on a busy two-core machine
LONG = 1000  # tokens: some seconds of two layers, far less than the server may take to stop
OPTIONS = ("--shutdown-timeout", "60")

pytestmark = pytest.mark.more


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("service")


@pytest.fixture(scope="module")
def keys(folder):
    return write_settings(folder, limits="timeout_s = 600\n")


def launchd_starts_again(status):
    """Returns whether KeepAlive restarts it (launchd.plist(5)), by SuccessfulExit."""
    keep_alive = plistlib.loads(PLIST.read_bytes())["KeepAlive"]
    if isinstance(keep_alive, bool):
        return keep_alive
    return keep_alive["SuccessfulExit"] == (status == 0)


def ask(running):
    return running.ask("acme", prompt="The river", max_tokens=8)


def stream(running, **fields):
    """Yields a stream's chunks until it ends in any way."""
    asked = {"model": "m", "prompt": "Once", "stream": True, "ignore_eos": True, "temperature": 0}
    key = {"Authorization": f"Bearer {running.keys['acme']}"}
    with (
        httpx.Client(timeout=ENDING_S) as client,
        client.stream(
            "POST", f"{running.server.url}/v1/completions", json=asked | fields, headers=key
        ) as reply,
    ):
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


def test_a_killed_engine_fails_the_service_which_is_started_again(long_texts, folder, keys):
    with serve_tenants(long_texts, folder, keys, "first", OPTIONS, SPAWNED) as running:
        wait_until_answers_are_kept(running)
        kept = ask(running)
        assert kept.headers["x-cache"] == "MISS"
        chunks = stream(running, max_tokens=LONG)
        next(chunks)
        engine_core(running.server).kill()
        assert any("error" in chunk for chunk in chunks)
        status = running.server.process.wait(ENDING_S)
    assert status == 1 and launchd_starts_again(status)
    with serve_tenants(long_texts, folder, keys, "second", OPTIONS, SPAWNED) as running:
        wait_until_answers_are_kept(running)
        again = ask(running)
        assert again.headers["x-cache"] == "HIT" and again.content == kept.content
        stop_amid_a_stream(running)
    assert not [path.name for path in (folder / "answers").glob("*") if "-wal" in path.name]
    log = running.server.log.read_text()
    assert "lifespan" not in log and "Traceback" not in log


def test_an_engine_whose_server_is_killed_ends(long_texts, folder, keys):
    with serve_tenants(long_texts, folder, keys, "killed", OPTIONS, SPAWNED) as running:
        chunks = stream(running, max_tokens=LONG)
        next(chunks)  # the engine has much to do
        engine = engine_core(running.server)
        running.server.process.kill()
        deadline = time.monotonic() + ENDING_S
        while engine.is_running() and engine.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert "this engine is gone: shutting down the engine" in running.server.log.read_text()


def stop_amid_a_stream(running):
    """Checks that the stream completes while new requests are rejected."""
    with ThreadPoolExecutor() as pool:
        chunks = stream(running, max_tokens=LONG)
        next(chunks)
        rest = pool.submit(list, chunks)
        running.server.process.terminate()
        deadline = time.monotonic() + ENDING_S
        while running.send("GET", "/health", None).status_code != 503:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        refused = ask(running)
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == str(RETRY_AFTER_S)
        assert not rest.done(), "the stream ended before the server was told to stop"
        (end,) = rest.result()[-1]["choices"]
    assert end["finish_reason"] == "length"
    assert running.server.process.wait(ENDING_S) == 0


@pytest.mark.slow
def test_another_version_of_the_sources_has_no_old_answers(long_texts, folder, keys, tmp_path):
    package = tmp_path / "vllm_metal"
    shutil.copytree(Path(vllm_metal.__file__).parent, package)
    with (package / "sample" / "transforms.py").open("a") as file:
        file.write("# Another release.\n")
    changed = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PYTHONSAFEPATH": "1"}
    with serve_tenants(long_texts, folder, keys, "third", OPTIONS, changed) as running:
        wait_until_answers_are_kept(running)
        assert ask(running).headers["x-cache"] == "MISS"
        assert ask(running).headers["x-cache"] == "HIT"
