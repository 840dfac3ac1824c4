# SPDX-License-Identifier: Apache-2.0
"""A real browser for page tests: Debian's Chromium, headless, driven by Playwright."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome")
#: Severities of axe-core's findings that fail a test.
_SERIOUS = ("serious", "critical")


@contextmanager
def browser() -> Iterator[object]:
    """Yields a browser; skips without one."""
    pytest.importorskip("axe_playwright_python", reason="axe-playwright-python is not installed")
    driver = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        pytest.skip("no Chromium is installed (apt-get install chromium)")
    with driver.sync_playwright() as running:
        # a container's root user may not create a sandbox
        started = running.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()


class Watched:
    """A page with its own profile, and unwanted events on it.

    Attributes:
        page: Playwright's page.
        errors: console errors and warnings, and exceptions.
        outside: requested addresses of other origins.
    """

    def __init__(self, started, address: str, width: int = 1280, height: int = 800, **options):
        self.context = started.new_context(viewport={"width": width, "height": height}, **options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(300_000)
        self.errors, self.outside = [], []
        self.page.on("console", self._heard)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", self._asked)
        self._address = address.partition("?")[0]
        self.page.goto(address)

    def faults(self) -> list[str]:
        """Returns what axe-core finds serious or critical in the page's current state."""
        source = files("axe_playwright_python").joinpath("axe.min.js").read_text()
        self.page.evaluate(source)
        found = self.page.evaluate("axe.run()")["violations"]
        return [
            f"{fault['id']}: {node['html']}"
            for fault in found
            if fault["impact"] in _SERIOUS
            for node in fault["nodes"]
        ]

    def _heard(self, message):
        if message.type in ("error", "warning"):
            self.errors.append(message.text)

    def _asked(self, request):
        if not request.url.startswith((self._address, "data:")):
            self.outside.append(request.url)
