# SPDX-License-Identifier: Apache-2.0
"""A response that the server ended."""

import json

from vllm_metal.serving.cut_short import incomplete


def test_a_completed_response_becomes_an_incomplete_one():
    made = json.loads(incomplete(b'{"id":"r","status":"completed","output":["\xc3\xa9"]}'))
    assert made == {
        "id": "r",
        "status": "incomplete",
        "incomplete_details": {"reason": "timeout"},
        "output": ["é"],
    }


def test_the_last_event_of_a_stream_says_so_too():
    event = {"type": "response.completed", "response": {"id": "r", "status": "completed"}}
    made = incomplete(f"event: response.completed\ndata: {json.dumps(event)}\n\n".encode())
    name, data, *_ = made.decode().split("\n")
    assert name == "event: response.incomplete" and made.endswith(b"\n\n")
    found = json.loads(data.removeprefix("data: "))
    assert found["type"] == "response.incomplete"
    assert found["response"]["status"] == "incomplete"


def test_all_else_stays_as_it_is():
    for part in (
        b'{"status":"incomplete","incomplete_details":{"reason":"max_output_tokens"}}',
        b'{"error":{}}',
        b"event: response.output_text.delta\ndata: {}\n\n",
        b"event: response.completed\ndata: no\n\n",
        b"",
        b"{",
    ):
        assert incomplete(part) == part
