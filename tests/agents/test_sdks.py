# SPDX-License-Identifier: Apache-2.0
"""Loops around the `openai` and `anthropic` libraries do their tasks at a real server."""

from importlib.metadata import version

import pytest
from agents import answers, results, tasks
from agents.clients import installed
from agents.live import fill
from agents.loops import anthropic_loop, openai_loop
from agents.proxy import proxied

pytestmark = pytest.mark.more
LOOPS = {"openai": openai_loop, "anthropic": anthropic_loop}


def run(server, name, task, folder):
    """What a loop said last, and all the answers it got."""
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


@pytest.mark.parametrize("name", tasks.SDKS)
def test_twenty_turns_find_nine_tenths_of_their_prompts_cached(server, name, tmp_path):
    last, said = run(server, name, "steps", tmp_path)
    assert last.strip() == tasks.ALL_STEPS
    shares = results.shares_of(said)
    print(f"{name}: {len(shares) + 1} turns; cached {' '.join(f'{each:.3f}' for each in shares)}")
    assert len(shares) == tasks.STEPS
    assert min(shares) >= tasks.ENOUGH
    keep(name, "steps", said)
