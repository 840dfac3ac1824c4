# SPDX-License-Identifier: Apache-2.0
"""Runs the commands of examples/README.md as printed."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import scripted
from e2e.server import serve
from scripted import Call, Script, Turn

from vllm_metal.engine.models.embedded import embedded_model_path

pytestmark = pytest.mark.more
ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```sh\n(.*?)```", (ROOT / "examples" / "README.md").read_text(), re.DOTALL)
LINES = [line for block in BLOCKS for line in block.splitlines()]


def command(words):
    """Returns the page's only line with these words."""
    (found,) = (line for line in LINES if all(word in line for word in words.split()))
    return found


def options(line):
    """Returns the options after the model in a line that starts a server."""
    _, _, behind = line.partition(" serve ")
    return shlex.split(behind)[1:] if "$(" not in behind else shlex.split(behind.split(')"', 1)[1])


def run(script, server=None):
    """Runs a script as on the page; returns its output."""
    environment = {} if server is None else {"SERVER_URL": server.url}
    done = subprocess.run(
        ["bash", "-c", command(script)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ
        | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        | environment,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The page's server on MLX's CPU backend, on a free port."""
    log = tmp_path_factory.mktemp("server") / "log"
    model = str(embedded_model_path(dequantize=True))
    with serve(model, options(command("VLLM_METAL_DEVICE=cpu")), log) as started:
        yield started


@pytest.mark.slow
def test_a_batch_shares_its_system_prompt():
    printed = run("offline.py")
    cached = [int(count) for count in re.findall(r"(\d+) from the prefix cache", printed)]
    assert len(cached) == 4
    assert max(cached) >= 16


@pytest.mark.slow
def test_requests_stream_side_by_side_until_one_is_cancelled():
    streamed, *answers = run("async_llm.py").split("\n\n")
    names = re.findall(r"(\w+):", streamed)
    assert names[:3] != [names[0]] * 3  # they come by turns
    assert names.count("Rome") > names.count("story") >= 5
    assert "pieces, cancelled" in "".join(answers)


@pytest.mark.slow
def test_the_openai_client_streams_and_follows_a_schema(server):
    printed = run("openai_client.py", server)
    assert "Paris" in printed
    assert re.search(r"\{'country': '.*', 'capital': '.*'\}", printed)


@pytest.mark.slow
def test_what_was_retrieved_before_is_cached(server):
    printed = run("rag.py", server)
    sources = re.findall(r"from ([\w, -]+)\n", printed)
    pages = [each.split(", ")[0] for each in sources]
    assert pages == ["prefix-cache-on-disk", "prefix-cache-on-disk", "production"]
    shares = [int(share) for share in re.findall(r"(\d+)% of them cached", printed)]
    assert shares[1] >= 40
    assert shares[2] >= 40


@pytest.mark.slow
def test_responses_stream_and_a_second_turn_finds_the_first(server):
    printed = run("responses_client.py", server)
    assert "Paris" in printed
    assert cached(printed) >= 32


@pytest.mark.slow
def test_the_agent_reads_files_with_its_tools_and_answers(tmp_path):
    read = [
        Call("read_file", {"name": name}) for name in ("bakery-supplies.txt", "oven-repair.txt")
    ]
    add_up = Call("add_up", {"numbers": [54.7, 216]})
    answer = Turn("Together they come to 270.70.")
    turns = (Turn(calls=(Call("list_files", {}),)), Turn(calls=tuple(read)), Turn(calls=(add_up,)))
    model = scripted.checkpoint(tmp_path / "model", [Script((*turns, answer))])
    with serve(str(model), options(command("max-model-len 8192")), tmp_path / "log") as server:
        printed = run("agent.py", server)
    calls = re.findall(r"^(\w+)\(.*\) = (.*)$", printed, re.MULTILINE)
    assert [name for name, _ in calls] == ["list_files", "read_file", "read_file", "add_up"]
    assert "54.70" in calls[1][1]
    assert "216.00" in calls[2][1]
    assert calls[3][1] == "270.7"
    assert printed.splitlines()[-1] == answer.text


@pytest.mark.slow
def test_messages_are_counted_and_a_second_turn_finds_the_first(server):
    printed = run("messages_client.py", server)
    assert "Oslo" in printed
    assert cached(printed) >= 32


@pytest.mark.slow
def test_vectors_find_the_passage_of_each_question(tmp_path):
    model = str(embedded_model_path(dequantize=True))
    with serve(model, options(command("runner pooling")), tmp_path / "log") as embedder:
        printed = run("embeddings.py", embedder)
    found = re.findall(r"^  \d\.\d+  (.*)$", printed, re.MULTILINE)
    assert [each.split(" ")[1] for each in found] == ["ferry", "is", "library"]


def cached(printed):
    """Returns the cached tokens of the last turn."""
    return int(re.findall(r"(\d+)(?: of them)? cached\)", printed)[-1])
