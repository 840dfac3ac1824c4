# SPDX-License-Identifier: Apache-2.0
"""The server's time limit, on the test's clock."""

import asyncio
import json

import pytest
from serving_double import App, ask, counted, make, ready

from vllm_metal.serving.deadline import GRACE_S, incomplete

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "temperature": 0}


class Clock:
    """An `asyncio.sleep` controlled by the tests."""

    def __init__(self):
        self.now, self._sleepers = 0.0, []

    async def sleep(self, seconds):
        woken = asyncio.Event()
        self._sleepers.append((self.now + seconds, woken))
        await woken.wait()

    async def pass_by(self, seconds):
        """Advances time, and lets woken tasks run."""
        end = self.now + seconds
        while due := [pair for pair in self._sleepers if pair[0] <= end]:
            first = min(due, key=lambda pair: pair[0])
            self._sleepers.remove(first)
            self.now = first[0]
            first[1].set()
            await run_tasks()
        self.now = end
        await run_tasks()


async def until(condition):
    """Waits for the store's threads in real time."""
    while not condition():
        await asyncio.sleep(0.001)


async def run_tasks():
    for _ in range(20):
        await asyncio.sleep(0)


def late(tmp_path, app, seconds, **request):
    """Makes a request during whose computation `seconds` pass; limit 10 s."""

    async def play():
        clock = Clock()
        app.gate = asyncio.Event()
        gate, keys = make(app, tmp_path, cache=False, timeout_s=10.0, sleep=clock.sleep)
        asked = asyncio.create_task(ask(gate, key=keys["acme"], **request))
        await run_tasks()
        await clock.pass_by(seconds)
        app.gate.set()
        return await asked, counted(gate, "vllm:request_timeouts_total")

    return asyncio.run(play())


def test_a_request_within_the_limit_ends_by_itself(tmp_path):
    app = App()
    reply, timeouts = late(tmp_path, app, 9.9, fields=CHAT)
    assert (reply.json()["choices"][0]["finish_reason"], timeouts) == ("stop", 0)
    assert app.engine.aborted == []


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_past_the_limit_is_aborted_and_says_so(tmp_path, path, stream):
    app = App()
    fields = CHAT | {"stream": stream, "prompt": "a"}
    reply, timeouts = late(tmp_path, app, 10.1, path=path, fields=fields)
    assert reply.status == 200 and reply.ended and timeouts == 1
    choices = [c for x in (reply.chunks() if stream else [reply.json()]) for c in x["choices"]]
    assert choices[-1]["finish_reason"] == "abort"
    assert len(app.engine.aborted) == 1  # whose blocks vLLM frees


def test_a_response_past_the_limit_is_not_called_completed(tmp_path):
    app = App()
    reply, timeouts = late(tmp_path, app, 10.1, path="/v1/responses", fields=CHAT)
    assert (reply.json()["status"], timeouts) == ("incomplete", 1)
    assert reply.json()["incomplete_details"] == {"reason": "timeout"}
    in_time, _ = late(tmp_path, App(), 1, path="/v1/responses", fields=CHAT)
    assert in_time.json()["status"] == "completed"


def test_a_request_that_cannot_be_aborted_is_cut_off(tmp_path):
    """For example, because it never reaches the engine."""
    app = App(deaf=True)
    reply, timeouts = late(tmp_path, app, 10 + GRACE_S + 1, fields=CHAT)
    assert (reply.status, timeouts, reply.ended) == (504, 1, True)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_has_nothing_when_its_time_is_up_gets_an_error(tmp_path, stream):
    app = App(quiet=True)
    reply, timeouts = late(tmp_path, app, 10.1, fields=CHAT | {"stream": stream})
    assert (reply.status, timeouts, reply.ended) == (504, 1, True)
    assert len(app.engine.aborted) == 1


def test_a_request_that_vllm_fails_at_when_its_time_is_up_gets_the_same_error(tmp_path):
    reply, timeouts = late(tmp_path, App(status=500), 10.1, fields=CHAT)
    assert (reply.status, timeouts, reply.ended) == (504, 1, True)
    in_time, _ = late(tmp_path, App(status=500), 1, fields=CHAT)
    assert in_time.status == 500


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_does_not_read_is_hung_up_on(tmp_path, cache, stream):
    """When its answer is cut off, whether or not the engine still waits for it."""

    async def play():
        clock, app, hung_up = Clock(), App(), asyncio.Event()
        gate, keys = make(app, tmp_path, cache=cache, timeout_s=10.0, sleep=clock.sleep)
        await ready(gate)
        reading = asyncio.Event()
        fields = CHAT | {"stream": stream}
        slow = asyncio.create_task(
            ask(gate, fields=fields, key=keys["acme"], reads=reading, hang_up=hung_up.set)
        )
        while app.asked == 0:
            await asyncio.sleep(0.001)
        await clock.pass_by(9)
        assert not slow.done()
        await clock.pass_by(1 + GRACE_S + 1)
        await asyncio.wait_for(hung_up.wait(), 30)
        reading.set()  # the server's `send` does nothing for a connection that has ended
        await asyncio.wait([slow], timeout=30)
        assert slow.done() and counted(gate, "vllm:request_timeouts_total") == 1

    asyncio.run(play())


def test_only_the_request_itself_is_aborted(tmp_path):
    async def play():
        clock, app = Clock(), App(gate=asyncio.Event())
        gate, keys = make(app, tmp_path, cache=False, timeout_s=10.0, sleep=clock.sleep)
        first = asyncio.create_task(ask(gate, fields=CHAT, key=keys["acme"]))
        await run_tasks()
        await clock.pass_by(6)
        second = asyncio.create_task(ask(gate, fields=CHAT, key=keys["other"]))
        await run_tasks()
        await clock.pass_by(6)
        assert first.done() and not second.done()
        app.gate.set()
        return await second

    assert asyncio.run(play()).json()["choices"][0]["finish_reason"] == "stop"


def test_an_aborted_answer_is_not_kept_and_its_twins_end_in_time(tmp_path):
    async def play():
        clock, app = Clock(), App(gate=asyncio.Event())
        gate, keys = make(app, tmp_path, timeout_s=10.0, sleep=clock.sleep)
        await ready(gate)
        coalesced = [
            asyncio.create_task(ask(gate, fields=CHAT, key=keys["acme"])) for _ in range(4)
        ]
        while app.asked == 0:
            await asyncio.sleep(0.001)
        await clock.pass_by(10.1)
        replies = await asyncio.gather(*coalesced)
        app.gate.set()
        again = await ask(gate, fields=CHAT, key=keys["acme"])
        return replies, again

    replies, again = asyncio.run(play())
    for reply in replies:  # those that waited may still have asked for themselves
        ended = reply.status == 200 and reply.json()["choices"][0]["finish_reason"]
        assert reply.status == 504 or ended == "abort"
    assert again.x_cache == "MISS"


@pytest.mark.parametrize("leader", ["times out", "hangs up", "does not read"])
def test_a_twin_ends_at_its_own_limit_whatever_becomes_of_the_first(tmp_path, leader):
    """It asks itself if the first gets no answer, and ends 10 s after it came."""

    async def play():
        clock, app = Clock(), App(gate=asyncio.Event())
        reads, gone = asyncio.Event(), asyncio.Event()
        gate, keys = make(app, tmp_path, timeout_s=10.0, sleep=clock.sleep, max_answer_bytes=200)
        await ready(gate)
        fields = CHAT | {"stream": True}
        slow = {"reads": reads} if leader == "does not read" else {"gone": gone}
        first = asyncio.create_task(ask(gate, fields=fields, key=keys["acme"], **slow))
        await until(lambda: app.asked == 1)
        await clock.pass_by(6)
        second = asyncio.create_task(ask(gate, fields=fields, key=keys["acme"]))
        await run_tasks()  # in which its time begins, and it waits
        await clock.pass_by(1)
        if leader == "hangs up":
            gone.set()
        elif leader == "does not read":
            app.gate.set()  # the answer is longer than what is kept, and waits for its client
        await clock.pass_by(3.1)  # 10.1 s after the first one came
        if leader == "does not read":
            await until(second.done)  # it has its own answer already
            assert (await second).ended and not first.done()
            reads.set()
            await first
            return
        await until(lambda: app.asked == 2)
        assert not second.done() and first.done()
        await clock.pass_by(5.8)
        assert not second.done()
        await clock.pass_by(0.2)  # 10.1 s after the second came
        await until(second.done)
        assert (await second).chunks()[-1]["choices"][0]["finish_reason"] == "abort"

    asyncio.run(asyncio.wait_for(play(), 60))


def test_a_twin_does_not_wait_for_a_first_one_that_cannot_be_ended(tmp_path):
    async def play():
        clock, app = Clock(), App(gate=asyncio.Event(), deaf=True)
        gate, keys = make(app, tmp_path, timeout_s=10.0, sleep=clock.sleep)
        await ready(gate)
        first = asyncio.create_task(ask(gate, fields=CHAT, key=keys["acme"]))
        await until(lambda: app.asked == 1)
        await clock.pass_by(1)
        second = asyncio.create_task(ask(gate, fields=CHAT, key=keys["acme"]))
        await run_tasks()
        await clock.pass_by(10.1)
        await until(second.done)
        assert (await second).status == 504 and not first.done()
        await clock.pass_by(GRACE_S)
        assert (await first).status == 504 and app.asked == 1

    asyncio.run(asyncio.wait_for(play(), 30))


def test_a_response_in_the_background_is_ended_too(tmp_path):
    async def play():
        clock, app = Clock(), App()
        gate, keys = make(app, tmp_path, cache=False, timeout_s=10.0, sleep=clock.sleep)
        fields = CHAT | {"background": True}
        for goes_on in (False, True):
            reply = await ask(gate, "/v1/responses", fields, keys["acme"])
            if goes_on:
                app.engine.begin(f"{reply.json()['id']}_0", None)
            await run_tasks()
            await clock.pass_by(10.1)
            assert bool(app.engine.aborted) == goes_on
            assert counted(gate, "vllm:request_timeouts_total") == goes_on

    asyncio.run(play())


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
