# SPDX-License-Identifier: Apache-2.0
"""Limits of bodies, and client bodies that must be accepted."""

import asyncio
import json
from dataclasses import fields

import pytest

from vllm_metal.serving import body
from vllm_metal.serving.config import BodyLimits
from vllm_metal.serving.refusal import Refusal

SMALL = BodyLimits(
    max_body_bytes=1000,
    max_body_depth=4,
    max_body_values=250,
    max_body_names=20,
    max_body_items=5,
)
TEXT = '{"a": ["b", {"c": [1, 2]}], "\\"}]:": 3}'


def schema(depth):
    """Makes a tool schema with nested objects."""
    if depth == 0:
        return {"type": "string", "enum": ["a", "b"], "description": TEXT}
    properties = {f"name_{number}": schema(depth - 1) for number in range(4)}
    return {"type": "object", "properties": properties, "required": [*properties]}


def tool(number):
    return {"type": "function", "function": {"name": f"f{number}", "parameters": schema(3)}}


def message(number):
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": TEXT}}
    if number % 3 == 0:
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    return {"role": "user", "content": [{"type": "text", "text": TEXT}]}


@pytest.mark.parametrize(
    "made",
    [
        # 7 MB of code: more marks in texts than a body may have values.
        lambda: {"prompt": TEXT * 150_000},
        lambda: {"prompt": list(range(100_000, 1_100_000))},
        pytest.param(lambda: {"prompt": [list(range(1000))] * 1000}, marks=pytest.mark.more),
        lambda: {"messages": [message(number) for number in range(4000)]},
        lambda: {"messages": [], "tools": [tool(number) for number in range(300)]},
    ],
    ids=["a million tokens as text", "as ids", "batch", "messages", "tools"],
)
def test_what_agents_send_is_within_the_limits(made):
    fields = made()
    raw = json.dumps(fields, separators=(",", ":")).encode()
    assert body.parse(raw, BodyLimits()) == fields


@pytest.mark.parametrize(
    ("raw", "setting"),
    [
        ('{"a": [[[1]]]}', None),
        ('{"a": [[[[1]]]]}', "max_body_depth"),
        ('{"a": {"b": {"c": {"d": 1}}}}', None),
        ('{"a": {"b": {"c": {"d": {}}}}}', "max_body_depth"),
        ("[" * 21, "max_body_names"),
        ('{"a": [{}, {}, {}, {}, {}]}', None),
        ('{"a": [{}, {}, {}, {}, {}, []]}', "max_body_items"),
        ('{"a": [{}, {}, {}], "b": [[], [], []]}', "max_body_items"),
        ('{"a": [' + "1, " * 200 + "1]}", None),
        ('{"a": [' + "1, " * 250 + "1]}", "max_body_values"),
        ('{"a": "' + "1, " * 250 + '"}', None),
        ('{"a": "' + "{[:" * 200 + '"}', None),
        ('{"a": "' + '\\"{' * 200 + '"}', None),
        ("{" + ", ".join(f'"{number}": 1' for number in range(19)) + "}", None),
        ("{" + ", ".join(f'"{number}": 1' for number in range(20)) + "}", "max_body_names"),
        (
            '{"a": "\\\\", "b": {' + ", ".join(f'"{n}": 1' for n in range(20)) + "}}",
            "max_body_names",
        ),
    ],
)
def test_limits_count_what_is_there(raw, setting):
    if setting is None:
        assert body.parse(raw.encode(), SMALL) == json.loads(raw)
        return
    with pytest.raises(Refusal, match=setting) as refused:
        body.parse(raw.encode(), SMALL)
    assert refused.value.status == 400


def test_no_body_is_read_in_the_square_of_its_length():
    """8 MB of strings without an end would take hours."""
    for raw in (b'"\\"' * 10**6, b"\\" * 10**6 + b"{" * 10**6, b'{"a":"' + b'\\"' * 10**6):
        with pytest.raises(Refusal):
            body.parse(raw, SMALL)


def read(messages, limits=SMALL, length=None):
    """Parses a connection's messages; nothing follows the last."""

    async def play():
        waiting = list(messages)

        async def receive():
            if not waiting:
                await asyncio.Event().wait()
            return waiting.pop(0)

        return await body.read(receive, limits, length)

    return asyncio.run(play())


def part(text, more=True):
    return {"type": "http.request", "body": text, "more_body": more}


def test_a_body_may_come_in_parts():
    assert read([part(b"a"), part(b""), part(b"b", more=False)]) == b"ab"


@pytest.mark.parametrize("begun", [[], [part(b"a")], [part(b"a"), part(b"b")]])
def test_a_body_that_does_not_come_is_refused(begun):
    with pytest.raises(Refusal, match="max_body_s") as refused:
        read(begun, BodyLimits(max_body_s=0.01))
    assert refused.value.status == 408


@pytest.mark.parametrize("length", [None, 5, 1001])
def test_a_body_that_is_too_long_is_refused_before_its_end(length):
    parts = [part(b"a" * 600), part(b"a" * 401)]
    with pytest.raises(Refusal, match="max_body_bytes") as refused:
        read(parts, length=length)
    assert refused.value.status == 413


def test_every_limit_is_a_setting_of_its_name():
    assert all(field.name.startswith("max_body_") for field in fields(BodyLimits))
