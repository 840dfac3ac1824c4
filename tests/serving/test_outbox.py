# SPDX-License-Identifier: Apache-2.0
"""Messages reach the client in order, and whoever sends them waits for no more than is said."""

import asyncio

import pytest

from vllm_metal.serving.outbox import Outbox


def part(text):
    return {"type": "http.response.body", "body": text, "more_body": True}


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


def test_messages_come_in_order_and_only_a_full_outbox_waits():
    async def play():
        taken, reads = [], asyncio.Event()

        async def send(message):
            await reads.wait()
            taken.append(message["body"])

        outbox = Outbox(send, 4)
        await outbox.put(part(b"ab"))
        await outbox.put(part(b"cd"))
        third = asyncio.create_task(outbox.put(part(b"e")))
        await settle()
        assert not third.done() and taken == []
        reads.set()
        await third
        await outbox.put(part(b"f"))
        await outbox.empty()
        assert taken == [b"ab", b"cd", b"e", b"f"]

    asyncio.run(play())


def test_what_sending_raises_reaches_who_sends():
    async def play():
        async def send(message):
            raise RuntimeError("no such header")

        outbox = Outbox(send, 100)
        await outbox.put(part(b"a"))
        await settle()
        for raises in (outbox.put(part(b"b")), outbox.empty()):
            with pytest.raises(RuntimeError, match="no such header"):
                await raises

    asyncio.run(play())


def test_a_full_outbox_whose_client_fails_does_not_wait_for_ever():
    async def play():
        reads = asyncio.Event()

        async def send(message):
            await reads.wait()
            raise RuntimeError

        outbox = Outbox(send, 1)
        put = asyncio.create_task(outbox.put(part(b"abc")))
        await settle()
        reads.set()
        await put
        with pytest.raises(RuntimeError):
            await outbox.empty()

    asyncio.run(play())
