# SPDX-License-Identifier: Apache-2.0
"""Takes docs/chat-light.png and docs/chat-dark.png: `vllm-metal chat` with the embedded model.

    .venv/bin/python docs/chat_picture.py

It needs the developers' environment and Chromium.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

DOCS = Path(__file__).parent
SIZE = {"width": 1100, "height": 730}
QUESTIONS = (
    "Write a Python function that says hello.",
    "What is the capital of France?",
)
PORT = 8098


def main() -> None:
    command = [sys.executable, "-m", "vllm_metal.cli.main", "chat", "--no-open"]
    with subprocess.Popen(
        [*command, "--port", str(PORT)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    ) as process:
        assert process.stdout is not None
        address = next(
            found[0] for line in process.stdout if (found := re.search(r"http\S+", line))
        )
        try:
            take(address)
        finally:
            process.send_signal(signal.SIGINT)


def take(address: str) -> None:
    """Asks the questions, and takes a picture in each theme."""
    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page(viewport=SIZE)
        page.set_default_timeout(300_000)
        page.goto(address)
        page.get_by_role("button", name="Settings").click()
        page.locator("[name=temperature]").fill("0")
        page.locator("[name=max_tokens]").fill("200")
        page.get_by_role("button", name="Save").click()
        for number, question in enumerate(QUESTIONS, 1):
            page.get_by_label("Message", exact=True).fill(question)
            page.keyboard.press("Enter")
            page.locator(".answer").nth(number - 1).get_by_text("Regenerate").wait_for()
        page.wait_for_timeout(4000)  # for the plots
        for theme in ("light", "dark"):
            page.get_by_role("button", name="Theme").click()
            page.screenshot(path=DOCS / f"chat-{theme}.png")
        browser.close()


if __name__ == "__main__":
    main()
