# SPDX-License-Identifier: Apache-2.0
"""A real browser for tests of pages: Debian's Chromium, headless, driven by Playwright."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome")
#: How bad a fault that axe-core finds may be.
_SERIOUS = ("serious", "critical")


@contextmanager
def browser() -> Iterator[object]:
    """A browser; skips where there is none."""
    pytest.importorskip("axe_playwright_python", reason="axe-playwright-python is not installed")
    driver = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        pytest.skip("no Chromium is installed (apt-get install chromium)")
    with driver.sync_playwright() as running:
        # A sandbox of its own is more than a root user of a container may make.
        started = running.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()


class Watched:
    """A page of its own profile, and what must not happen on it.

    Attributes:
        page: Playwright's.
        errors: what was written to the console as an error or a warning, or raised.
        outside: addresses that are not the page's own, which it asked for.
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
        """What axe-core calls serious or critical of the page as it is."""
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
