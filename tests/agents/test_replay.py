# SPDX-License-Identifier: Apache-2.0
"""Requests of real clients, as they were recorded, get the answers of their scripts."""

import httpx
import pytest
from agents import answers, recordings
from agents.clients import CLIENTS
from agents.tasks import ENOUGH, TITLE, scripts


def expected(client):
    """Text and calls of each turn of a client's recorded task."""
    script = next(each for each in scripts(recordings.PROJECT) if each.marker == f"[{client} edit]")
    return [
        (turn.text, tuple((call.name, call.arguments) for call in turn.calls))
        for turn in script.turns
    ]


@pytest.mark.parametrize("client", CLIENTS)
def test_each_recorded_request_is_answered_as_the_script_says(server, client):
    said = []
    with httpx.Client(base_url=server.url, timeout=120) as http:
        for path, body in recordings.load(client):
            reply = http.post(path, json=body)
            assert reply.status_code == 200, reply.text
            said.append(answers.read(path, reply.text))
    turns = [answer for answer in said if answer.text != TITLE]
    assert [(answer.text.strip(), answer.calls) for answer in turns] == expected(client)
    shares = [answer.share for answer in turns[1:]]
    print(f"{client}: cached shares {shares}")
    assert all(share >= ENOUGH for share in shares)
