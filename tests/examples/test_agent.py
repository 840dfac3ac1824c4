# SPDX-License-Identifier: Apache-2.0
"""The agent's tools, and their results for the model."""

import inspect
import json

import pytest
from agent import FOLDER, call, described, tools


@pytest.fixture
def callables(tmp_path):
    (tmp_path / "one.txt").write_text("54.70")
    (tmp_path / "folder").mkdir()
    return tools(tmp_path)


def test_tools_work_on_the_folder(callables):
    assert call(callables, "list_files", "{}") == '["one.txt"]'
    assert call(callables, "read_file", '{"name": "one.txt"}') == '"54.70"'
    assert call(callables, "add_up", '{"numbers": [54.7, 216]}') == "270.7"


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("read_file", '{"name": "../../etc/passwd"}'),
        ("read_file", '{"name": "two.txt"}'),
        ("read_file", '{"path": "one.txt"}'),
        ("read_file", '{"name": '),
        ("read_file", '["one.txt"]'),
        ("add_up", '{"numbers": ["a"]}'),
        ("delete_file", "{}"),
    ],
)
def test_a_wrong_call_is_an_error_for_the_model(callables, name, arguments):
    assert list(json.loads(call(callables, name, arguments))) == ["error"]


def test_the_model_is_told_of_each_tool_and_its_arguments():
    callables = tools(FOLDER)
    for tool in described(callables):
        function = tool["function"]
        signature = inspect.signature(callables[function["name"]])
        assert function["parameters"]["required"] == list(signature.parameters)
        assert function["description"]
