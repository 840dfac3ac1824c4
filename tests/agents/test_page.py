# SPDX-License-Identifier: Apache-2.0
"""The table of docs/agents.md matches the recorded results of the pinned clients."""

from agents import page, recordings, results
from agents.clients import CLIENTS
from agents.tasks import ENOUGH


def test_the_page_has_the_table_of_the_results():
    assert page.PAGE.read_text() == page.written(page.PAGE.read_text())


def test_the_results_are_of_the_pinned_clients():
    kept = results.load()
    assert {name: kept[name].version for name in CLIENTS} == {
        name: client.version for name, client in CLIENTS.items()
    }
    for name, result in kept.items():
        assert "edit" in result.did, name
        assert not result.turns or result.least >= ENOUGH, name


def test_recordings_are_small_and_name_no_machine():
    files = sorted(recordings.FOLDER.glob("*.json.xz"))
    assert sum(path.stat().st_size for path in files) < 300_000
    for path in files:
        asked = str(recordings.load(path.name.partition(".")[0]))
        assert not [word for word in ("/tmp/", "/work", "/root") if word in asked], path.name
