# SPDX-License-Identifier: Apache-2.0
"""Clients of agents at one real server: recorded requests of real ones get the answers of their
scripts, and loops around the `openai` and `anthropic` libraries do their tasks."""

from importlib.metadata import version

import httpx
import pytest
from agents import answers, recordings, results, tasks
from agents.clients import CLIENTS, installed
from agents.live import fill
from agents.loops import anthropic_loop, openai_loop
from agents.proxy import proxied

pytestmark = pytest.mark.more
#: One of each interface.
INTERFACES = ("claude", "codex", "opencode")
LOOPS = {"openai": openai_loop, "anthropic": anthropic_loop}


def expected(client):
    """Returns text and calls of each turn of a client's recorded task."""
    script = next(
        each
        for each in tasks.scripts(recordings.PROJECT)
        if each.marker == tasks.marker(client, "edit")
    )
    return [
        (turn.text, tuple((call.name, call.arguments) for call in turn.calls))
        for turn in script.turns
    ]


@pytest.mark.parametrize(
    "client",
    [
        pytest.param(client, marks=() if client in INTERFACES else pytest.mark.slow)
        for client in CLIENTS
    ],
)
def test_each_recorded_request_is_answered_as_the_script_says(server, client):
    said = []
    with httpx.Client(base_url=server.url, timeout=120) as http:
        for path, body in recordings.load(client):
            reply = http.post(path, json=body)
            assert reply.status_code == 200, reply.text
            said.append(answers.read(path, reply.text))
    turns = [answer for answer in said if answer.text != tasks.TITLE]
    assert [(answer.text.strip(), answer.calls) for answer in turns] == expected(client)
    shares = [answer.share for answer in turns[1:]]
    print(f"{client}: cached shares {shares}")
    assert all(share >= tasks.ENOUGH for share in shares)


def run(server, name, task, folder):
    """Returns a loop's last text, and all answers that it got."""
    fill(folder)
    with proxied(server.url) as proxy:
        said = LOOPS[name](proxy.url, f"Do the task {tasks.marker(name, task)}.", folder)
        return said, [answers.read(each.path, each.answer) for each in proxy.exchanges()]


def keep(name, task, said=()):
    folder = installed()
    if folder:
        results.note(folder / "results.json", name, version(name), task, said)


@pytest.mark.parametrize("name", tasks.SDKS)
def test_a_loop_reads_edits_runs_a_command_and_ends(server, name, tmp_path):
    last, _ = run(server, name, "edit", tmp_path)
    assert last.strip() == tasks.DONE
    assert (tmp_path / "notes.txt").read_text() == tasks.EDITED
    assert (tmp_path / "seen.txt").read_text() == tasks.EDITED
    keep(name, "edit")


@pytest.mark.slow
@pytest.mark.parametrize("name", tasks.SDKS)
def test_twenty_turns_find_nine_tenths_of_their_prompts_cached(server, name, tmp_path):
    last, said = run(server, name, "steps", tmp_path)
    assert last.strip() == tasks.ALL_STEPS
    shares = results.shares_of(said)
    print(f"{name}: {len(shares) + 1} turns; cached {' '.join(f'{each:.3f}' for each in shares)}")
    assert len(shares) == tasks.STEPS
    assert min(shares) >= tasks.ENOUGH
    keep(name, "steps", said)
