# SPDX-License-Identifier: Apache-2.0
"""Runs live clients unattended against a real server that plays their scripts.

`python -m agents.install FOLDER` installs them. Then, best where only loopback can be reached:

    VLLM_METAL_AGENTS=FOLDER unshare -rn sh -c 'ip link set lo up; pytest -m slow tests/agents'

FOLDER then has results and recordings, which `python -m agents.keep FOLDER` puts into the tree.
"""

import json

import pytest
import scripted
from agents import answers, recordings, results, tasks
from agents.clients import CLIENTS, FOLDER_VARIABLE, SERVER_OPTIONS, installed
from agents.live import run
from agents.proxy import proxied
from agents.tasks import marker
from e2e.server import serve

pytestmark = pytest.mark.slow
AGENTS = [name for name in CLIENTS if name != "aider"]  # it calls no tools


@pytest.fixture(scope="module")
def installation():
    folder = installed()
    if folder is None:
        pytest.skip(f"{FOLDER_VARIABLE} names no folder of installed clients (agents/install.py)")
    return folder


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    return tmp_path_factory.mktemp("live") / "project"


@pytest.fixture(scope="module")
def server(installation, project, tmp_path_factory):
    model = scripted.checkpoint(tmp_path_factory.mktemp("scripts"), tasks.scripts(str(project)))
    with serve(str(model), SERVER_OPTIONS, tmp_path_factory.mktemp("server") / "log") as started:
        yield started


@pytest.fixture
def does(server, installation, project):
    """Makes a client do a task; returns its outcome and requests."""

    def do(name, task, cut=None):
        if not (CLIENTS[name].bin(installation) / name).exists():
            pytest.skip(f"{name} is not installed in {installation}")
        with proxied(server.url) as proxy:
            proxy.cut = cut
            outcome = run(CLIENTS[name], task, proxy, installation, project)
            return outcome, proxy.exchanges()

    return do


def keep(installation, name, task, said=()):
    results.note(installation / "results.json", name, CLIENTS[name].version, task, said)


def said(exchanges):
    """Returns every complete answer."""
    return [answers.read(each.path, each.answer) for each in exchanges if not each.cut]


def edited(outcome):
    return outcome.status == 0 and outcome.files["notes.txt"] == tasks.EDITED


@pytest.mark.parametrize("name", AGENTS)
def test_a_client_reads_edits_runs_a_command_and_sees_the_result(name, does, installation, project):
    outcome, exchanges = does(name, "edit")
    assert edited(outcome), outcome.printed
    assert outcome.files["seen.txt"] == tasks.EDITED  # the command ran, behind the edit
    assert tasks.DONE in outcome.printed
    assert tasks.PRINTED in json.dumps(exchanges[-1].body)  # and the model was told its result
    keep(installation, name, "edit")
    recordings.save(installation / "recordings", name, exchanges, str(project))


def test_aider_applies_edit_blocks(does, installation, project):
    outcome, exchanges = does("aider", "edit")
    assert edited(outcome), outcome.printed
    keep(installation, "aider", "edit")
    recordings.save(installation / "recordings", "aider", exchanges, str(project))


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_asks_again_where_its_stream_was_cut(name, does, installation):
    """Cuts the stream of its work, not of a title that an agent may request without tools."""
    agent = name in AGENTS

    def works(body):
        return bool(body.get("tools")) == agent and marker(name, "edit") in json.dumps(body)

    outcome, exchanges = does(name, "edit", cut=works)
    (lost,) = (each for each in exchanges if each.cut)
    assert works(lost.body)
    again = exchanges[exchanges.index(lost) + 1 :]
    assert any(_last(each.body) == _last(lost.body) for each in again)  # the same turn once more
    assert edited(outcome), outcome.printed
    if agent:
        assert outcome.files["seen.txt"] == tasks.EDITED and tasks.DONE in outcome.printed
    keep(installation, name, "cut")


def _last(body):
    """Returns a request's last message, in any of the three APIs."""
    return (body.get("messages") or body["input"])[-1]


@pytest.mark.parametrize("name", AGENTS)
def test_a_client_goes_on_behind_arguments_that_are_no_json(name, does, installation):
    outcome, _ = does(name, "broken")
    assert outcome.status == 0, outcome.printed
    assert outcome.files["right.txt"] == "right\n"
    keep(installation, name, "broken")


@pytest.mark.parametrize("name", AGENTS)
def test_twenty_turns_find_nine_tenths_of_their_prompts_cached(name, does, installation):
    outcome, exchanges = does(name, "steps")
    assert outcome.status == 0, outcome.printed
    steps = range(1, tasks.STEPS + 1)
    assert outcome.files["steps.txt"] == "".join(f"step {step}\n" for step in steps)
    shares = results.shares_of(said(exchanges))
    print(f"{name}: {len(shares) + 1} turns; cached {' '.join(f'{each:.3f}' for each in shares)}")
    assert len(shares) == tasks.STEPS
    assert min(shares) >= tasks.ENOUGH
    keep(installation, name, "steps", said(exchanges))
