# SPDX-License-Identifier: Apache-2.0
"""The page's display of limits, failures and lost servers, with a fake server."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import uvicorn
from cli.chat.browser import Watched, browser

from vllm_metal.cli.chat import page as pages
from vllm_metal.cli.chat.upstream import Upstream

pytestmark = pytest.mark.more

CONTEXT = 512
TOO_LONG = (
    "This model's maximum context length is 512 tokens. However, your prompt contains at least 512 "
    "input tokens, which exceeds this limit even without any output tokens."
)
MISS = (
    'date;cached=16;lost=209;token=37;message=0;role="system";'
    'before=%"on the 25th<|im_end|> <";now=%"on the 26th<|im_end|> <|im"'
)
METRICS = "vllm:kv_cache_usage_perc 0.25\nvllm:num_requests_waiting 0\n"


class Double(BaseHTTPRequestHandler):
    """A server whose answer depends on a word of the question; records questions."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        if self.path == "/metrics":
            return self._send(METRICS, "text/plain")
        model = {"id": self.server.model, "max_model_len": CONTEXT}
        return self._send(json.dumps({"data": [model]}))

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(asked)
        last = asked["messages"][-1]
        if last["role"] == "assistant":
            return self._answer(" and more.", finish="stop", tokens=3)
        word = last["content"].split()[0]
        if word == "long":
            return self._send(json.dumps({"error": {"message": TOO_LONG}}), status=400)
        if word == "die":
            return self._answer("Half of", finish=None)
        if word == "most":
            return self._answer("Some", finish="length", tokens=asked["max_tokens"])
        if word == "context":
            return self._answer("Some", finish="length", tokens=CONTEXT - 7)
        if word == "think":
            return self._answer("", finish="length", tokens=20, reasoning="Let me see.")
        return self._answer("Whole.", finish="stop", tokens=2, miss=MISS if word == "miss" else "")

    def end_headers(self):
        self.send_header("Connection", "close")  # else its threads would answer after its end
        super().end_headers()

    def _send(self, text, kind="application/json", status=200):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def _answer(self, text, finish, tokens=1, reasoning="", miss=""):
        """Returns a stream of one piece; without `finish` it breaks off."""
        delta = {"content": text, "reasoning": reasoning}
        usage = {"prompt_tokens": 7, "completion_tokens": tokens}
        chunk = {"choices": [{"delta": delta, "finish_reason": finish}], "usage": usage}
        piece = f"data: {json.dumps(chunk)}\n\n"
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        if miss:
            self.send_header("prefix-cache-miss", miss)
        self.end_headers()
        self.wfile.write(f"{len(piece):x}\r\n{piece}\r\n".encode())
        if finish:
            self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_):
        pass


class Chat:
    """The page's server and the fake one behind it, each of which can end."""

    def __init__(self, model):
        self.double = ThreadingHTTPServer(("127.0.0.1", 0), Double)
        self.double.model, self.double.asked = model, []
        self._start(self.double.serve_forever)
        self.url = f"http://127.0.0.1:{self.double.server_port}"
        config = uvicorn.Config(
            pages.app(Upstream(self.url, None), "t"), port=0, log_level="error",
            timeout_graceful_shutdown=1,
        )  # fmt: skip
        self._page = uvicorn.Server(config)
        self._serving = self._start(self._page.run)
        while not self._page.started:
            self._serving.join(0.02)
        port = self._page.servers[0].sockets[0].getsockname()[1]
        self.address = f"http://127.0.0.1:{port}/?token=t"

    @staticmethod
    def _start(run):
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def end_double(self):
        self.double.shutdown()
        self.double.server_close()

    def end_page(self):
        self._page.should_exit = True
        self._serving.join()


@contextmanager
def chatting(chromium, model="/cache/models/SmolLM2-135M-Instruct", **options):
    chat = Chat(model)
    watched = Watched(chromium, chat.address, **options)
    watched.page.set_default_timeout(60_000)
    try:
        yield chat, watched
    finally:
        watched.context.close()
        chat.end_page()
        chat.end_double()


@pytest.fixture(scope="module")
def chromium():
    with browser() as started:
        yield started


def ask(page, text):
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
    page.locator(".answer .actions").last.filter(visible=True).wait_for()


def notes(page):
    return page.locator(".answer").last.locator(".notes p").all_inner_texts()


def buttons(page):
    """Returns the actions offered for the last answer."""
    shown = page.locator(".answer").last.locator(".actions button").filter(visible=True)
    return shown.all_inner_texts()


def test_a_small_model_is_called_a_toy_and_its_answers_have_a_limit(chromium):
    with chatting(chromium) as (chat, watched):
        page = watched.page
        page.locator("#toy").filter(visible=True).wait_for()
        assert page.locator("#model").inner_text() == "SmolLM2-135M-Instruct"
        hint = page.locator("#toy").inner_text()
        assert "135 million" in hint and "vllm-metal chat " in hint
        ask(page, "most")
        assert chat.double.asked[-1]["max_tokens"] == CONTEXT  # the smaller one of it and 1024
        assert watched.errors == []


def test_others_may_reason_as_long_as_they_like(chromium):
    hub = "/home/me/.cache/huggingface/hub/models--mlx-community--Qwen3-4B-4bit/snapshots/0a1b2c"
    with chatting(chromium, hub) as (chat, watched):
        page = watched.page
        page.locator("#model", has_text="Qwen3-4B-4bit").wait_for()
        assert page.locator("#model").inner_text() == "Qwen3-4B-4bit"
        assert not page.locator("#toy").is_visible()
        ask(page, "think")
        assert "max_tokens" not in chat.double.asked[-1]


def test_the_limit_that_cut_an_answer_is_named_and_continue_goes_on(chromium):
    with chatting(chromium) as (chat, watched):
        page = watched.page
        page.get_by_role("button", name="Settings").click()
        page.locator("[name=max_tokens]").fill("20")
        page.get_by_role("button", name="Save").click()
        ask(page, "think")
        assert notes(page) == [
            "Stopped at Max tokens (20) while reasoning. Raise Max tokens in the settings."
        ]
        assert buttons(page) == ["Regenerate"]
        ask(page, "context")
        assert "end of the context (512 tokens)" in notes(page)[0]
        assert "Continue" not in buttons(page)
        ask(page, "most")
        assert notes(page) == ["Stopped at Max tokens (20)."]
        page.get_by_role("button", name="Continue").click()
        page.locator(".blocks", has_text="Some and more.").wait_for()
        page.locator(".answer .actions").last.filter(visible=True).wait_for()
        assert chat.double.asked[-1]["continue_final_message"] is True
        assert chat.double.asked[-1]["messages"][-1] == {"role": "assistant", "content": "Some"}
        assert notes(page) == [] and "Continue" not in buttons(page)
        assert "23 tokens" in page.locator("dl.metrics").last.inner_text()


def test_a_prompt_that_is_too_long_says_what_to_do(chromium):
    with chatting(chromium) as (_, watched):
        ask(watched.page, "long")
        (told,) = notes(watched.page)
        assert told.startswith("The conversation is longer than the model's context of 512 tokens.")
        assert "Start a new conversation" in told
        assert buttons(watched.page) == ["Try again"]


def test_a_changed_system_prompt_is_told_without_special_tokens(chromium):
    with chatting(chromium) as (_, watched):
        ask(watched.page, "miss")
        assert notes(watched.page) == [
            "The system prompt changed (a date or time: “on the 25th” became “on the 26th”): "
            "209 tokens were computed again."
        ]


def test_a_server_that_ends_is_told_in_a_sentence_wherever_it_ends(chromium):
    with chatting(chromium) as (chat, watched):
        page = watched.page
        ask(page, "die")
        again = "Start it again, then try again."
        assert notes(page) == [
            f"The server at {chat.url} ended in the middle of the answer. {again}"
        ]
        assert page.locator(".blocks").inner_text() == "Half of"
        chat.end_double()
        page.get_by_role("button", name="Try again").click()
        page.locator(".error", has_text="does not answer").wait_for()
        assert notes(page) == [f"The server at {chat.url} does not answer. {again}"]
        page.reload()
        notice = page.locator("#notice")
        notice.filter(visible=True).wait_for()
        assert "does not answer" in notice.inner_text()
        assert page.locator("#model").inner_text() == ""
        chat.end_page()
        notice.get_by_role("button", name="Try again").click()
        page.locator("#notice", has_text="Run vllm-metal chat again").wait_for()


def test_enter_in_the_edit_box_asks_again(chromium):
    with chatting(chromium) as (_, watched):
        page = watched.page
        ask(page, "one")
        page.get_by_role("button", name="Edit").click()
        area = page.get_by_label("Edit the message")
        area.fill("two")
        area.press("Shift+Enter")
        assert area.input_value() == "two\n"
        area.press("Enter")
        page.locator(".question .text", has_text="two").wait_for()
        assert page.locator(".question .text").all_inner_texts() == ["two"]


def test_panels_close_when_the_window_gets_narrow_and_show_only_what_is_known(chromium):
    with chatting(chromium) as (_, watched):
        page = watched.page
        page.locator(".plot", has_text="KV cache in use").filter(visible=True).wait_for()
        shown = page.locator(".plot").filter(visible=True).locator("dt").all_inner_texts()
        assert shown == ["KV cache in use", "Requests waiting"]
        page.set_viewport_size({"width": 375, "height": 720})
        page.locator("#list").wait_for(state="hidden")
        page.locator("#metrics").wait_for(state="hidden")
        page.set_viewport_size({"width": 1280, "height": 720})
        page.locator("#list").wait_for(state="visible")


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (375, "dark")])
def test_limits_and_failures_have_no_serious_fault(chromium, scheme, width):
    options = {"width": width, "height": 720, "color_scheme": scheme}
    with chatting(chromium, **options) as (_, watched):
        assert watched.faults() == []
        for word in ("most", "long", "die", "miss"):
            ask(watched.page, word)
        assert watched.faults() == []
        assert watched.page.evaluate("document.documentElement.scrollWidth") == width
