# SPDX-License-Identifier: Apache-2.0
"""docs/vllm-settings.md matches the tables, and the tests that they name exist."""

import ast
from functools import cache
from pathlib import Path

import pytest
from vllm_settings.page import PAGE, TABLES, page
from vllm_settings.row import differences, named_test, refused, union, without_meaning

TESTS = Path(__file__).parents[1]


def test_the_page_is_what_the_tables_say():
    command = "python -m vllm_settings.page"
    assert PAGE.read_text() == page(), f"{PAGE.name} is behind: run `{command}` from tests/"


def test_what_a_table_lacks_is_named():
    """Adds a field to vLLM's, and removes one."""
    table = without_meaning({"nothing": "a b"})
    assert differences(table, ["a", "b"]) == ([], [])
    assert differences(table, ["a", "new"]) == (["new"], ["b"])


def test_a_setting_stands_once():
    with pytest.raises(AssertionError, match=r"\['a'\] stand in the table twice"):
        union((without_meaning({"nothing": "a b"}), refused({"no": "a"})))


@cache
def functions_of(file):
    tree = ast.parse((TESTS / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_named_test_exists():
    named = {named_test(row) for table in TABLES.values() for row in table.values()} - {None}
    assert len(named) > 30
    assert not [f"{file}::{name}" for file, name in named if name not in functions_of(file)]
