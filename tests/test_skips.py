# SPDX-License-Identifier: Apache-2.0
"""Every skipped or expected failure has a reason, printed by `-ra`."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
#: Name: how many arguments stand before the reason.
SKIPS = {"skip": 0, "skipif": 1, "xfail": 1, "importorskip": 2}


def skips_without_a_reason(text: str) -> Iterator[int]:
    """Returns lines of a test file with unexplained skips."""
    tree = ast.parse(text)
    called = {node.func: node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in SKIPS and _is_pytests(node.value):
            call = called.get(node)
            if call is None or not _has_reason(call, SKIPS[node.attr]):
                yield node.lineno


def _is_pytests(owner: ast.expr) -> bool:
    return ast.unparse(owner) in ("pytest", "pytest.mark")


def _has_reason(call: ast.Call, before: int) -> bool:
    given = [keyword.value for keyword in call.keywords if keyword.arg == "reason"]
    given += call.args[before : before + 1]
    return any(not (isinstance(value, ast.Constant) and not value.value) for value in given)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("@pytest.mark.skip\ndef test(): ...", [1]),
        ("\n@pytest.mark.skipif(sys.platform == 'darwin')\ndef test(): ...", [2]),
        ("@pytest.mark.skipif(True, reason='')\ndef test(): ...", [1]),
        ("pytest.param(1, marks=pytest.mark.xfail)", [1]),
        ("pytest.skip()\npytest.importorskip('gguf')", [1, 2]),
        ("pytest.skip('no network')\npytest.skip(str(error))", []),
        ("@pytest.mark.skipif(True, reason='no GPU')\ndef test(): ...", []),
        ("pytest.mark.xfail(reason='known')\nlist.skip()", []),
    ],
)
def test_what_counts_as_a_reason(text: str, lines: list[int]):
    assert list(skips_without_a_reason(text)) == lines


def test_every_skip_names_its_reason():
    found = [
        f"{path.relative_to(TESTS)}:{line}"
        for path in sorted(TESTS.rglob("*.py"))
        for line in skips_without_a_reason(path.read_text())
    ]
    assert found == []
