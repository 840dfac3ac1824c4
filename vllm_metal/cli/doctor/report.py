# SPDX-License-Identifier: Apache-2.0
"""Prints findings and writes them to a file, without secrets or names of user and machine."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from vllm_metal.settings.secret_file import write_private

Status = Literal["ok", "warning", "failed"]
#: Advice for failures that are our fault.
REPORT_IT = "Attach the report to a bug report."
REPORT_BUG = "This is a bug: attach the report to a bug report."
#: Lines of a failed process's output that are printed; the file has all that are kept.
SHOWN_LINES = 15
_INDENT = " " * 9
#: Variables whose values never appear in a report, whatever process prints them.
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSW", re.IGNORECASE)
#: IP addresses; 127.* and 0.* identify nobody.
_ADDRESSES = (
    re.compile(r"\b(?!127\.|0\.)\d{1,3}(?:\.\d{1,3}){3}\b"),
    re.compile(r"(?<![\w:])(?:[0-9a-fA-F]{0,4}:){3,7}[0-9a-fA-F]{0,4}(?![\w:])"),
)


@dataclass(frozen=True)
class Finding:
    """The result of one check, and what to do about it."""

    name: str  # the check's name
    status: Status
    seen: str  # one line
    advice: str = ""  # what the user can do
    #: Output of a process; the last lines are shown if the check failed.
    log: tuple[str, ...] = ()


class Report:
    """Prints findings, and writes them to a JSON file that is complete after each of them."""

    def __init__(self, path: Path) -> None:
        """Creates or replaces the file at `path`; raises OSError if it cannot be written."""
        self._path = path
        self._findings: list[Finding] = []
        self._facts: dict[str, Any] = {}
        self._on_terminal = sys.stderr.isatty()
        self._private = _private_words()
        self._begun = time.monotonic()
        self._write(complete=False)

    @property
    def failed(self) -> list[str]:
        return [finding.name for finding in self._findings if finding.status == "failed"]

    def add(self, finding: Finding) -> None:
        """Prints and writes a finding."""
        self._findings.append(finding)
        self._write(complete=False)
        self._clear()
        self._print(f"{finding.status:8} {finding.name}: {finding.seen}", indent=_INDENT)
        if finding.status == "failed":
            for line in finding.log[-SHOWN_LINES:]:
                print(f"{_INDENT}| {self._redact(line)[:200]}")
        for paragraph in filter(None, finding.advice.split("\n")):
            self._print(_INDENT + paragraph, indent=_INDENT)
        sys.stdout.flush()

    def add_facts(self, **facts: Any) -> None:
        """Writes facts that belong to no finding; the values must be JSON."""
        self._facts |= facts
        self._write(complete=False)

    def announce(self, text: str) -> None:
        """Prints which check starts now, for checks that take a while."""
        self._clear()
        self._print(f"{'...':8} {text}", indent=_INDENT)
        sys.stdout.flush()

    def show(self, lines: Iterable[str]) -> None:
        """Prints the lines of a table as they are."""
        self._clear()
        for line in lines:
            print(self._redact(line), flush=True)

    def progress(self, text: str) -> None:
        """Shows the current activity on a terminal, in a line that the next call replaces."""
        if self._on_terminal:
            line = f"{_INDENT}[{time.monotonic() - self._begun:.0f} s] {text}"
            width = shutil.get_terminal_size().columns - 1
            print(f"\r{line[:width]}\033[K", end="", file=sys.stderr, flush=True)

    def close(self) -> int:
        """Prints the outcome; returns the exit status, 1 if anything failed."""
        self._write(complete=True)
        self._clear()
        warnings = sum(finding.status == "warning" for finding in self._findings)
        if failed := self.failed:
            print(f"\nFailed: {', '.join(failed)}. The whole report is {self._path}")
        else:
            summary = "Nothing failed" if warnings else "All is well"
            summary += f", {warnings} warning{'s' * (warnings > 1)}" if warnings else ""
            print(f"\n{summary}. Report: {self._path}")
        return 1 if failed else 0

    def _print(self, text: str, indent: str) -> None:
        width = max(shutil.get_terminal_size((100, 24)).columns, 60)
        # A command keeps its line and its paths, so that it can be copied. Nothing else does.
        if " pip install " in text:
            print(text)
            return
        text = self._redact(text)
        options: Any = {"break_long_words": False, "break_on_hyphens": False}
        print(textwrap.fill(text, width, subsequent_indent=indent, **options))

    def _clear(self) -> None:
        if self._on_terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def _write(self, complete: bool) -> None:
        found = {
            "complete": complete,
            "failed": self.failed,
            "findings": [asdict(finding) for finding in self._findings],
            **self._facts,
        }
        write_private(self._path, json.dumps(self._redact_values(found), indent=1) + "\n")

    def _redact_values(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._redact(value)
        if isinstance(value, dict):
            return {self._redact(key): self._redact_values(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._redact_values(item) for item in value]
        return value

    def _redact(self, text: str) -> str:
        for pattern, replacement in self._private:
            text = pattern.sub(replacement, text)
        return text


def _private_words() -> list[tuple[re.Pattern[str], str]]:
    """Returns patterns of secrets and of names of user and machine, with their replacements."""
    home, host = Path.home(), platform.node()
    secrets = {value for name, value in os.environ.items() if _SECRET.search(name)}
    # Both paths, because some folders are links on macOS; the longer first, as it may contain the
    # other.
    homes = sorted({str(home), os.path.realpath(home)}, key=len, reverse=True)
    # Secrets first, because they may contain what other patterns replace. Shorter values would
    # match parts of words.
    words = [(re.compile(re.escape(value)), "SECRET") for value in secrets if len(value) >= 8]
    words += [(address, "ADDRESS") for address in _ADDRESSES]
    words += [(re.compile(rf"{re.escape(path)}(?![\w.-])"), "~") for path in homes if path != "/"]
    if user := home.name:
        words.append((re.compile(rf"(?<=/){re.escape(user)}\b|\b{re.escape(user)}(?=@)"), "USER"))
    for name in {host, host.partition(".")[0]}:
        if len(name) > 3:  # shorter names would match parts of words
            words.append((re.compile(rf"\b{re.escape(name)}\b"), "HOST"))
    return words
