# SPDX-License-Identifier: Apache-2.0
"""Messages reach the client in order, and senders wait a bounded time."""

import asyncio

import pytest

from vllm_metal.serving.backlog import Backlog


def part(text):
    return {"type": "http.response.body", "body": text, "more_body": True}


async def run_tasks():
    for _ in range(10):
        await asyncio.sleep(0)


def test_messages_come_in_order_and_only_a_full_backlog_waits():
    async def play():
        taken, reads = [], asyncio.Event()

        async def send(message):
            await reads.wait()
            taken.append(message["body"])

        backlog = Backlog(send, 4)
        await backlog.put(part(b"ab"))
        await backlog.put(part(b"cd"))
        third = asyncio.create_task(backlog.put(part(b"e")))
        await run_tasks()
        assert not third.done() and taken == []
        reads.set()
        await third
        await backlog.put(part(b"f"))
        await backlog.empty()
        assert taken == [b"ab", b"cd", b"e", b"f"]

    asyncio.run(play())


def test_what_sending_raises_reaches_who_sends():
    async def play():
        async def send(message):
            raise RuntimeError("no such header")

        backlog = Backlog(send, 100)
        await backlog.put(part(b"a"))
        await run_tasks()
        for raises in (backlog.put(part(b"b")), backlog.empty()):
            with pytest.raises(RuntimeError, match="no such header"):
                await raises

    asyncio.run(play())


def test_a_full_backlog_whose_client_fails_does_not_wait_for_ever():
    async def play():
        reads = asyncio.Event()

        async def send(message):
            await reads.wait()
            raise RuntimeError

        backlog = Backlog(send, 1)
        put = asyncio.create_task(backlog.put(part(b"abc")))
        await run_tasks()
        reads.set()
        await put
        with pytest.raises(RuntimeError):
            await backlog.empty()

    asyncio.run(play())
