# SPDX-License-Identifier: Apache-2.0
"""Processes that die, are interrupted, or cannot start end quickly and say why."""

import os
import shutil
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import httpx
import mlx.core as mx
import openai
import psutil
import pytest
from e2e.fuzz.models import MAX_LEN, VOCAB, write_models
from e2e.server import SPAWNED, engine_core, free_port, refused_start, serve, started

pytestmark = pytest.mark.more

OPTIONS = (
    *("--max-model-len", str(MAX_LEN)),
    *("--max-num-seqs", "4"),
    *("--kv-cache-memory-bytes", str(8 << 20)),
)
PROMPT = [index % (VOCAB - 1) + 1 for index in range(40)]
#: On a busy two-core machine; clients are told within a minute.
STARTING_UP_S, ENDING_S, TOLD_S = 240, 240, 60


def wait_for(condition, seconds):
    """Waits until `condition()` is true; returns its value."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"still not so after {seconds} s"
        time.sleep(0.05)
    return found


def group_of(process):
    """Returns the remaining processes of a server."""
    left = []
    for other in psutil.process_iter():
        with suppress(ProcessLookupError, PermissionError, psutil.Error):  # ended, or another's
            if os.getpgid(other.pid) == process.pid and other.status() != psutil.STATUS_ZOMBIE:
                left.append(other)
    return left


def complete(client, **options):
    settings = {"prompt": PROMPT, "temperature": 0, "max_tokens": 8}
    settings["extra_body"] = {"ignore_eos": True}
    return client.completions.create(model=client.models.list().data[0].id, **(settings | options))


@pytest.mark.slow
def test_a_killed_engine_ends_its_streams_and_its_server_and_leaves_the_port(tiny, tmp_path):
    port, log = free_port(), tmp_path / "first"
    with serve(tiny, OPTIONS, log, port, SPAWNED) as server, server.client() as client:
        expected = complete(client).choices[0].text
        assert len(expected.split()) == 8
        stream = iter(complete(client, max_tokens=MAX_LEN - len(PROMPT) - 1, stream=True))
        next(stream)
        killed = time.monotonic()
        engine_core(server).kill()
        with pytest.raises((openai.APIError, httpx.HTTPError)):
            for _ in stream:
                pass
        assert time.monotonic() - killed < TOLD_S
        assert server.process.wait(ENDING_S) == 1
        wait_for(lambda: not group_of(server.process), ENDING_S)
        assert "EngineDeadError" in server.log.read_text()
    with serve(tiny, OPTIONS, tmp_path / "second", port) as server, server.client() as client:
        assert complete(client).choices[0].text == expected


@pytest.fixture
def scratch():
    """A folder with a short path: vLLM makes sockets in TMPDIR, whose names end at 103 letters on
    macOS; its own folder for temporary files takes up 49 of them."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def spoiled(tiny, tmp_path_factory):
    """A model whose last token turns everything after it into NaN."""
    folder = tmp_path_factory.mktemp("models") / "spoiled"
    shutil.copytree(tiny, folder)
    weights = mx.load(str(folder / "model.safetensors"))
    weights["model.embed_tokens.weight"][VOCAB - 1] = mx.nan
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return str(folder)


@pytest.mark.slow
def test_a_request_without_logits_fails_and_no_other_does(spoiled, tmp_path):
    with serve(spoiled, OPTIONS, tmp_path / "log") as server, server.client() as client:
        expected = complete(client).choices[0].text
        extra = {"ignore_eos": True, "return_token_ids": True}
        stream = iter(complete(client, max_tokens=100, stream=True, extra_body=extra))
        before = next(stream).choices[0].token_ids
        for streamed in (False, True):
            with pytest.raises(openai.APIError, match="Internal server error"):
                list(complete(client, prompt=[*PROMPT[:20], VOCAB - 1], stream=streamed))
        # A chunk has several tokens where the client was busy.
        after = [token for chunk in stream for c in chunk.choices for token in c.token_ids]
        assert len(before) + len(after) == 100
        assert complete(client).choices[0].text == expected
        assert server.metric("vllm:corrupted_requests_total") == 2
        assert server.health() == 200
    assert server.log.read_text().count("failed: the model's logits are not numbers") == 2


def test_an_interrupted_start_leaves_nothing_behind(tiny, tmp_path, scratch):
    log, cache = tmp_path / "log", tmp_path / "cache"
    environment = {**SPAWNED, "TMPDIR": str(scratch), "VLLM_METAL_CACHE": str(cache)}

    def engine_starts():
        assert process.poll() is None, log.read_text()
        return "Initializing a V1 LLM engine" in log.read_text()

    with started(tiny, [*OPTIONS, "--port", str(free_port())], environment, log) as process:
        wait_for(engine_starts, STARTING_UP_S)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal's Ctrl-C does
        process.wait(ENDING_S)
        wait_for(lambda: not group_of(process), ENDING_S)
    # Files, that is: vLLM's sockets stay where its start is cut short. MLX's compiler for CPUs
    # keeps what it made in a folder of its own, for any process.
    left = [path for path in scratch.rglob("*") if path.is_file()]
    assert [path for path in left if not path.is_relative_to(scratch / "mlx")] == []
    assert not cache.exists() or list(cache.rglob("*.partial*")) == []


@pytest.mark.slow
def test_a_start_with_weights_cut_off_names_the_file(tiny, tmp_path):
    write_models(tmp_path)
    weights = tmp_path / "full" / "model.safetensors"
    size = weights.stat().st_size
    os.truncate(weights, size // 2)
    log = tmp_path / "log"
    assert refused_start(str(weights.parent), OPTIONS, {}, log) > 0
    says = f"{weights} is cut off: it has {size // 2:,} bytes of {size:,}"
    assert [line for line in log.read_text().splitlines() if says in line]
