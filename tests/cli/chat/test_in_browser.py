# SPDX-License-Identifier: Apache-2.0
"""`vllm-metal chat` with a real server and a real browser."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
from cli.chat.browser import Watched, browser
from e2e.server import FORKED, free_port
from scripted import Script, Turn, checkpoint

pytestmark = pytest.mark.more

CODE = "```python\nfor number in range(3):\n    print(number)\n```"
PLAIN = f"A <script>window.pwned = 1</script> tag and *stress*.\n\n{CODE}\n\n- one\n- two"
OTHER = "Another answer."
LONG = "More words of a long answer. " * 150
SCRIPTS = (
    Script((Turn(LONG),), marker="at length"),
    Script((Turn(OTHER),), marker="otherwise"),
    Script((Turn(PLAIN),)),
)
#: With the last, Python would compile all of vLLM anew.
NOT_A_USER_S = ("VLLM_API_KEY", "VLLM_ENABLE_V1_MULTIPROCESSING", "PYTHONDONTWRITEBYTECODE")
RULES = "Today is {}. " + "Follow the rules of the house. " * 30


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """Address of the page of a command that serves its own model."""
    model = checkpoint(tmp_path_factory.mktemp("model"), SCRIPTS)
    options = ["--port", str(free_port()), "--no-open", "--max-model-len", "8192"]
    command = [sys.executable, "-m", "vllm_metal.cli.main", "chat", str(model), *options]
    process = subprocess.Popen(
        [*command, "--kv-cache-gib", "0.1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={k: v for k, v in os.environ.items() if k not in NOT_A_USER_S} | FORKED,
    )
    try:
        found, seen = None, []
        while found is None:
            line = process.stdout.readline()
            assert line, "".join(seen)
            seen.append(line)
            found = re.search(r"http://127\.0\.0\.1:\d+/\S*", line)
        yield found[0]
        process.send_signal(signal.SIGINT)
        assert process.wait(240) == 0
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def chromium():
    with browser() as started:
        yield started


@pytest.fixture
def opened(chromium, address):
    """Opens pages with new profiles, without errors or external requests."""
    pages = []

    def one(**options):
        pages.append(Watched(chromium, address, **options))
        return pages[-1]

    yield one
    for watched in pages:
        assert (watched.errors, watched.outside) == ([], [])
        watched.context.close()


def ask(page, text):
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def answered(page, status="The answer is complete."):
    page.get_by_role("status").filter(has_text=status).wait_for(state="attached")


def blocks(page):
    """Returns the HTML of each answer."""
    return page.locator(".blocks").evaluate_all("all => all.map(one => one.innerHTML)")


def metrics(page):
    """Returns the metrics under the last answer by label."""
    pairs = page.locator("dl.metrics").last.locator("div")
    return dict(
        pairs.evaluate_all("all => all.map(one => [...one.children].map(c => c.innerText))")
    )


def set_up(page, **values):
    """Opens the settings with the keyboard only, fills them in, and saves them."""
    page.get_by_role("button", name="Settings").focus()
    page.keyboard.press("Enter")
    for name, value in values.items():
        page.locator(f"[name={name}]").fill(value)
    page.get_by_role("button", name="Save").focus()
    page.keyboard.press("Enter")


def test_an_answer_is_markdown_its_tags_stay_text_and_a_reload_keeps_it(opened):
    page = opened().page
    ask(page, "Say it.")
    answered(page)
    assert page.locator(".blocks").inner_text().startswith("A <script>window.pwned = 1</script>")
    assert page.locator(".blocks em").inner_text() == "stress"
    assert page.locator(".blocks pre code").inner_text() == CODE[10:-3]
    assert page.locator(".blocks li").all_inner_texts() == ["one", "two"]
    shown, told = blocks(page), metrics(page)
    assert {"First token", "Speed", "Answer", "Prompt"} == set(told) - {"Cached"}
    page.reload()
    page.locator(".blocks em").wait_for()
    assert (blocks(page), metrics(page)) == (shown, told)
    assert page.locator(".question .text").all_inner_texts() == ["Say it."]
    assert page.evaluate("window.pwned") is None


def test_an_answer_streams_and_escape_stops_it(opened):
    page = opened().page
    set_up(page, max_tokens="4000")
    ask(page, "Tell me at length.")
    text = page.locator(".blocks")
    page.locator(".blocks", has_text=LONG[:30]).wait_for()
    assert page.get_by_role("button", name="Stop").is_visible()
    page.keyboard.press("Escape")
    answered(page, "Stopped.")
    first = text.inner_text()
    assert LONG.startswith(first) and len(first) < len(LONG)
    assert page.get_by_role("button", name="Send").is_visible()
    deadline = time.monotonic() + 240
    while running(page):  # at the engine, too
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert text.inner_text() == first


def running(page):
    return page.evaluate("fetch('api/metrics').then(reply => reply.json())")["running"]


def test_a_question_is_edited_and_an_answer_regenerated(opened):
    page = opened().page
    ask(page, "Say it.")
    answered(page)
    ask(page, "And again.")
    page.locator(".answer").nth(1).get_by_role("button", name="Regenerate").wait_for()
    page.get_by_role("button", name="Edit").first.click()
    page.keyboard.press("Escape")  # and nothing has changed
    assert page.locator("article").count() == 4
    page.get_by_role("button", name="Edit").first.click()
    changed = f"Say it otherwise, {'and in many words, ' * 20}please."
    page.get_by_label("Edit the message").fill(changed)
    page.get_by_role("button", name="Ask again").click()
    page.locator(".blocks", has_text=OTHER).wait_for()
    answered(page)
    assert page.locator(".question .text").all_inner_texts() == [changed]
    page.get_by_role("button", name="Regenerate").click()
    answered(page)
    assert page.locator(".blocks").all_inner_texts() == [OTHER]
    # The prompt is the same, and in the cache.
    assert int(metrics(page)["Cached"].split()[0]) >= 16


def test_a_missed_prefix_is_explained_with_its_text(opened):
    page = opened().page
    set_up(page, system=RULES.format("2026-11-25"))
    ask(page, "Say it otherwise.")
    answered(page)
    set_up(page, system=RULES.format("2026-11-26"))
    page.get_by_role("button", name="Regenerate").click()
    page.locator(".miss").wait_for()
    told = page.locator(".miss").inner_text()
    assert told.startswith("The system prompt changed (a date or time: ")
    assert "25" in told and "26" in told


def test_conversations_are_listed_opened_and_deleted(opened):
    page = opened().page
    ask(page, "Say it.")
    answered(page)
    page.get_by_role("button", name="New conversation").click()
    ask(page, "Say it otherwise.")
    page.locator(".blocks", has_text=OTHER).wait_for()
    answered(page)
    kept = page.locator("nav .open")
    assert kept.all_inner_texts() == ["Say it otherwise.", "Say it."]
    kept.nth(1).click()
    page.locator(".blocks em").wait_for()
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete Say it.", exact=True).click()
    page.locator(".blocks", has_text=OTHER).wait_for()
    assert kept.all_inner_texts() == ["Say it otherwise."]


def test_the_panel_plots_what_the_engine_does(opened):
    page = opened().page
    ask(page, "Say it.")
    answered(page)
    for label in ("KV cache in use", "Requests waiting", "Tokens per second"):
        page.locator(".plot", has_text=label).filter(visible=True).wait_for()
    assert not page.locator(".plot", has_text="Drafts accepted").is_visible()
    page.locator(".plot", has_text="KV cache in use").locator("dd", has_text="%").wait_for()


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (375, "dark")])
def test_no_serious_fault_and_no_width_beyond_the_window(opened, scheme, width):
    watched = opened(width=width, height=720, color_scheme=scheme)
    page = watched.page
    ask(page, "Say it.")
    answered(page)
    assert watched.faults() == []
    assert page.evaluate("document.documentElement.scrollWidth") == width
    for name in ("Conversations", "Server metrics") if width < 1000 else ():
        page.get_by_role("button", name=name).click()
        assert watched.faults() == []
        page.get_by_role("button", name=name).click()
    page.get_by_role("button", name="Settings").click()
    assert watched.faults() == []
