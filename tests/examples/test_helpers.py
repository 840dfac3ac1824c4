# SPDX-License-Identifier: Apache-2.0
"""The example proxy's choice of a prefill server."""

import asyncio

import httpx
import pytest
from helpers import PAUSE_S, Choice, Helper, Pace
from proxy import make_app, watch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

LONG = 1000  # tokens


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def nobody(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused")


def helper(clock: Clock, seconds_a_token: float | None = None) -> Helper:
    """Makes a helper with this measured speed."""
    made = Helper(httpx.AsyncClient(transport=httpx.MockTransport(nobody)), clock)
    if seconds_a_token is not None:
        made.compute.note(LONG, LONG * seconds_a_token)
    return made


def test_a_pace_is_a_line_through_what_was_seen() -> None:
    pace = Pace()
    assert pace.seconds(10) is None
    pace.note(100, 1.0)
    assert pace.seconds(300) == pytest.approx(3.0)
    pace.note(300, 2.0)  # 0.5 s, and 5 ms a token
    assert pace.seconds(500) == pytest.approx(3.0)
    assert pace.longest == 300


def test_a_pace_that_falls_is_not_believed() -> None:
    pace = Pace()
    pace.note(100, 3.0)
    pace.note(300, 1.0)
    assert pace.seconds(1000) == pytest.approx(10.0)


def test_the_faster_helper_is_asked_until_it_has_more_to_do() -> None:
    clock = Clock()
    fast, slow = helper(clock, 0.001), helper(clock, 0.003)
    choice = Choice([slow, fast])
    assert choice.order(LONG, LONG) == [fast, slow]
    fast.waiting = 3 * LONG
    assert choice.order(LONG, LONG) == [slow, fast]


def test_the_link_counts() -> None:
    clock = Clock()
    near, far = helper(clock, 0.003), helper(clock, 0.001)
    near.fetch.note(LONG, 0.1)
    far.fetch.note(LONG, 5.0)
    assert Choice([far, near]).order(LONG, LONG) == [near, far]


def test_helpers_of_which_nothing_is_known_are_tried_first() -> None:
    clock = Clock()
    known, busy, new = helper(clock, 0.001), helper(clock), helper(clock)
    busy.waiting = 1
    assert Choice([known, busy, new]).order(LONG, LONG) == [new, busy, known]


def test_short_prompts_are_no_helpers() -> None:
    choice = Choice([helper(Clock(), 0.001)], shortest=256)
    assert choice.order(LONG, 255) == []
    assert len(choice.order(LONG, 256)) == 1


def test_what_is_computed_as_soon_by_itself_is_no_helpers() -> None:
    """The server keeps prompts up to the length it computed in time, and little longer."""
    choice = Choice([helper(Clock(), 0.001)], shortest=256)
    choice.alone.note(400, 0.3)
    assert choice.order(700, 700) == []
    assert len(choice.order(900, 900)) == 1
    choice.alone.note(700, 2.0)
    assert len(choice.order(700, 700)) == 1


def test_a_helper_that_failed_is_left_alone_for_a_while() -> None:
    clock = Clock()
    only = helper(clock, 0.001)
    only.failed()
    assert Choice([only]).order(LONG, LONG) == []
    clock.now += PAUSE_S
    assert Choice([only]).order(LONG, LONG) == [only]


def test_a_prompt_at_a_helper_that_hangs_is_given_up() -> None:
    """Two looks without an answer end the wait; one with an answer restores the helper."""
    answers = [False, False, True]

    async def serve(request: httpx.Request) -> httpx.Response:
        if request.url.path != "/health":
            await asyncio.sleep(3600)
        if answers and not answers.pop(0):
            raise httpx.ReadTimeout("no answer")
        return httpx.Response(200)

    async def run() -> None:
        client = httpx.AsyncClient(transport=httpx.MockTransport(serve), base_url="http://h")
        one = Helper(client)
        asked = asyncio.create_task(one.post("/v1/completions", {}, {}, LONG))
        await asyncio.sleep(0)
        assert one.waiting == LONG
        watching = asyncio.create_task(watch(one, 0.001))
        with pytest.raises(TimeoutError):
            await asked
        assert one.waiting == 0
        while answers or one.is_away:
            await asyncio.sleep(0.001)
        watching.cancel()

    asyncio.run(asyncio.wait_for(run(), 240))


def test_one_that_is_about_to_end_may_finish_what_it_has() -> None:
    clock = Clock()

    async def run() -> None:
        transport = httpx.MockTransport(lambda request: httpx.Response(503))
        one = Helper(httpx.AsyncClient(transport=transport, base_url="http://h"), clock)
        watching = asyncio.create_task(watch(one, 3600.0))
        while not one.is_away:
            await asyncio.sleep(0)
        watching.cancel()
        clock.now += PAUSE_S  # not gone: that alone would have made it stay away
        assert not one.is_away

    asyncio.run(asyncio.wait_for(run(), 240))


def served(name: str, status: int = 200) -> httpx.AsyncClient:
    """Makes a helper that identifies itself."""

    def serve(request: httpx.Request) -> httpx.Response:
        params = {"remote_engine_id": name}
        return httpx.Response(status, json={"kv_transfer_params": params})

    return httpx.AsyncClient(transport=httpx.MockTransport(serve), base_url=f"http://{name}")


class Decode:
    """The decode server; records its requests."""

    def __init__(self) -> None:
        self.bodies: list[dict] = []

    def client(self) -> httpx.AsyncClient:
        app = Starlette(routes=[Route("/v1/completions", self._serve, methods=["POST"])])
        return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://d")

    async def _serve(self, request: Request) -> Response:
        self.bodies.append(await request.json())
        return JSONResponse({})


@pytest.mark.parametrize(
    ("statuses", "expected", "failures"),
    [
        ((200, 200), "a", [0, 0]),
        ((500, 200), "b", [1, 0]),
        ((503, 200), "b", [1, 0]),
        ((500, 500), None, [1, 1]),
        ((400, 200), None, [0, 0]),  # the request is wrong: the server that answers says how
    ],
)
def test_the_next_helper_does_what_one_did_not(
    statuses: tuple[int, int], expected: str | None, failures: list[int]
) -> None:
    decode = Decode()

    async def run() -> dict:
        helpers = [served(*each) for each in zip("ab", statuses, strict=True)]
        transport = httpx.ASGITransport(make_app(helpers, decode.client()))
        async with httpx.AsyncClient(transport=transport, base_url="http://p") as client:
            await client.post("/v1/completions", json={"prompt": list(range(LONG))})
            return (await client.get("/status")).json()

    of_helpers = asyncio.run(run())["helpers"]
    params = decode.bodies[0].get("kv_transfer_params", {})
    assert params.get("remote_engine_id") == expected
    assert [each["failures"] for each in of_helpers] == failures
    assert sum(each["tokens"] for each in of_helpers) == (LONG if expected else 0)
