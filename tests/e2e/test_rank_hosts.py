# SPDX-License-Identifier: Apache-2.0
"""Two hosts with a rank each: the tokens of one process; an error when unplugged."""

import os
import re
import shutil
import time
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest
from e2e import ranks
from e2e.fuzz.models import VOCAB
from e2e.harness import Dense
from network import hosts as network

import vllm_metal

pytestmark = [pytest.mark.slow, ranks.by_layers_and_by_heads]
PROMPTS = [[3 + (each * 7 + place) % (VOCAB - 3) for place in range(40)] for each in range(4)]


@pytest.fixture
def model(tiny, tmp_path):
    return ranks.endless(tiny, tmp_path / "model")


def test_a_rank_on_each_of_two_hosts(model, tmp_path, shape):
    network.need_hosts()
    dense = Dense(model)
    with network.hosts(2) as pair:
        with ranks.on_two_hosts((model, model), pair, shape, tmp_path) as (server, processes):
            ranks.wait_until_healthy(server, processes)
            before = pair[1].sent_bytes
            for prompt in PROMPTS:
                dense.check(prompt, ranks.tokens(server.url, prompt))
            assert pair[1].sent_bytes > before
            waiting = ranks.clients(server)
            since = time.monotonic()
            pair[1].cut()
            ranks.all_hear(waiting, since)
            for process in processes:
                process.wait(60)
            deadline = time.monotonic() + 30
            while any(host.pids() for host in pair):
                assert time.monotonic() < deadline
                time.sleep(0.1)
        pair[1].mend()
        with ranks.on_two_hosts((model, model), pair, shape, tmp_path) as (server, processes):
            ranks.wait_until_healthy(server, processes)
            dense.check(PROMPTS[1], ranks.tokens(server.url, PROMPTS[1]))


def is_worker(process):
    return "VLLM::Worker" in " ".join(process.cmdline())


@pytest.mark.parametrize("killed", [0, 1])
def test_the_rank_of_one_host_is_killed(model, tmp_path, shape, killed):
    network.need_hosts()
    with (
        network.hosts(2) as pair,
        ranks.on_two_hosts((model, model), pair, shape, tmp_path) as (server, processes),
    ):
        ranks.wait_until_healthy(server, processes)
        waiting = ranks.clients(server)
        since = time.monotonic()
        if killed:
            pair[1].kill()  # and its launcher
        else:
            (worker,) = [each for each in map(psutil.Process, pair[0].pids()) if is_worker(each)]
            worker.kill()  # the server stays
        ranks.all_hear(waiting, since)
        for process in processes:
            process.wait(60)


def _refused(pair, models, shape, folder, environments=({}, {})):
    """Returns both hosts' errors about the difference; neither starts."""
    with ranks.on_two_hosts(models, pair, shape, folder, environments) as (_, processes):
        for process in processes:
            assert process.wait(600) != 0
    logs = [(folder / f"log{node}").read_text() for node in range(2)]
    found = [
        re.search(r"RanksDiffer: ranks 0 and 1 of the engine differ: (.*?)\. Give", log)
        for log in logs
    ]
    assert all(found), [log[-2000:] for log in logs]
    return [each[1] for each in found]


def test_other_weights_are_refused_on_both(model, tmp_path, shape):
    network.need_hosts()
    other = tmp_path / "other"
    other.mkdir()
    for path in os.scandir(model):
        content = bytearray(Path(path).read_bytes())
        if path.name.endswith(".safetensors"):
            content[-1] ^= 1
        (other / path.name).write_bytes(content)
    with network.hosts(2) as pair:
        for said in _refused(pair, (model, str(other)), shape, tmp_path):
            assert "weights" in said


def test_another_release_is_refused_on_both(model, tmp_path, shape):
    """The second host's package metadata states another mlx-lm."""
    network.need_hosts()
    installed = version("mlx-lm")
    package = tmp_path / "packages" / f"mlx_lm-{installed}.post9.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text(f"Name: mlx-lm\nVersion: {installed}.post9\n")
    other = {"PYTHONPATH": f"{package.parent}:{os.environ.get('PYTHONPATH', '')}"}
    with network.hosts(2) as pair:
        for said in _refused(pair, (model, model), shape, tmp_path, ({}, other)):
            assert said == f"mlx_lm {installed}.post9, rank 0 has {installed}"


def test_another_plugin_is_refused_on_both(model, tmp_path, shape):
    """The second host's plugin has the same version and one more line in a module."""
    network.need_hosts()
    copy = tmp_path / "packages" / "vllm_metal"
    shutil.copytree(vllm_metal.__path__[0], copy, ignore=shutil.ignore_patterns("__pycache__"))
    with (copy / "distributed" / "tokens.py").open("a") as module:
        module.write("MINE = True\n")
    other = {"PYTHONPATH": f"{copy.parent}:{os.environ.get('PYTHONPATH', '')}"}
    with network.hosts(2) as pair:
        for said in _refused(pair, (model, model), shape, tmp_path, ({}, other)):
            assert said == "vllm_metal differ"
