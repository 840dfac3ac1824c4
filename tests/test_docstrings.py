# SPDX-License-Identifier: Apache-2.0
"""Docstrings begin with what they are about: none opens with "Of", "The same" or "Those"."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("vllm_metal", "metal_kernels", "interpreter/metal_interpreter")
NO_SUBJECT = re.compile(r"(Of|The same|Those)\b")


def docstrings(text: str) -> Iterator[str]:
    """Docstrings of a module, its classes and functions, and texts that stand below a field."""
    for node in ast.walk(ast.parse(text)):
        for before, statement in zip([None, *body(node)], body(node), strict=False):
            documents = before is None or isinstance(before, ast.Assign | ast.AnnAssign)
            if documents and (found := text_of(statement)) is not None:
                yield found


def body(node: ast.AST) -> list[ast.stmt]:
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return node.body if isinstance(node, kinds) else []


def text_of(statement: ast.stmt) -> str | None:
    value = statement.value if isinstance(statement, ast.Expr) else None
    text = value.value if isinstance(value, ast.Constant) else None
    return text if isinstance(text, str) else None


def without_subject(text: str) -> list[str]:
    return [found for found in docstrings(text) if NO_SUBJECT.match(found)]


def test_every_docstring_opens_with_its_subject():
    found = [
        f"{path.relative_to(ROOT)}: {text.splitlines()[0]}"
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for text in without_subject(path.read_text())
    ]
    assert not found, "say first what it is of: " + "; ".join(found)


def test_what_has_no_subject_is_found():
    text = '''
"""Of a module."""
class C:
    """The same."""
    field = 1
    """Those of a field."""
    def f(self):
        """Of a method."""
        async def g():
            """Of a coroutine."""
            print()
            "Of no docstring."
def sound():
    """Offers: the same of those."""
'''
    assert [found.split()[-1] for found in without_subject(text)] == [
        *("module.", "same.", "field.", "method.", "coroutine.")
    ]
