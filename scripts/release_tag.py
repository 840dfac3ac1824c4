# SPDX-License-Identifier: Apache-2.0
"""Checks a release's tag against the sources, and prints its notes from CHANGELOG.md.

    python scripts/release_tag.py check v0.33.0.1    # exit status 1 with reasons if it is invalid
    python scripts/release_tag.py notes v0.33.0.1

A version combines vLLM's and ours, see docs/compatibility.md.
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def problems(root: Path, tag: str) -> list[str]:
    """Returns why a tag does not match the sources in `root`; empty if it does."""
    version = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    found = []
    if tag != f"v{version}":
        found.append(f"the tag is {tag}, and pyproject.toml has {version}: tag v{version}")
    if not re.fullmatch(r"\d+\.\d+\.\d+\.\d+", version):
        found.append(f"{version} is no release: four numbers, vLLM's three and ours")
    pinned = (root / "requirements" / "vllm.txt").read_text()
    served = re.search(r"^vllm==(\S+)", pinned, re.MULTILINE)
    if served is None or not version.startswith(f"{served[1]}."):
        found.append(f"{version} does not begin with the vLLM that requirements/ pin")
    if not notes(root, tag):
        found.append(f"CHANGELOG.md has nothing under a heading ## [{tag.removeprefix('v')}]")
    return found


def notes(root: Path, tag: str) -> str:
    """Returns a version's section of CHANGELOG.md, empty if there is none."""
    text = (root / "CHANGELOG.md").read_text()
    heading = rf"^## \[{re.escape(tag.removeprefix('v'))}\][^\n]*\n(.*?)(?=^## |\Z)"
    section = re.search(heading, text, re.MULTILINE | re.DOTALL)
    return section[1].strip() if section else ""


def main(command: str, tag: str) -> int:
    if command == "notes":
        print(notes(ROOT, tag))
        return 0
    assert command == "check", command
    found = problems(ROOT, tag)
    for problem in found:
        print(f"release: {problem}", file=sys.stderr)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
