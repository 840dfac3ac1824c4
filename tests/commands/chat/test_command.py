# SPDX-License-Identifier: Apache-2.0
"""`vllm-metal chat`'s options, and what it says before a model is loaded."""

import socket

import pytest

from vllm_metal.commands import cli
from vllm_metal.commands.chat import command


@pytest.mark.parametrize("other", [["--terminal"], ["some-model"]])
def test_a_running_server_leaves_nothing_to_load(capsys, other):
    assert cli.main(["chat", "--url", "http://127.0.0.1:8000", *other]) == 1
    assert "--url" in (told := capsys.readouterr().err) and "leave out" in told


def test_a_port_that_is_taken_is_named(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert cli.main(["chat", "--url", "http://127.0.0.1:8000", "--port", str(port)]) == 1
    assert f"port {port} is taken" in (told := capsys.readouterr().err) and "--port" in told


def test_what_is_not_installed_is_named_with_its_command(capsys, monkeypatch):
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "markdown_it" else name)
    assert cli.main(["chat", "--no-open"]) == 1
    told = capsys.readouterr().err
    assert "markdown_it" in told and "markdown-it-py" in told and "install" in told


@pytest.mark.parametrize(
    "option", ["--port=0", "--port=70000", "--kv-cache-gib=0", "--temperature=-1", "--max-tokens=0"]
)
def test_values_that_make_no_sense_are_refused(capsys, option):
    with pytest.raises(SystemExit):
        cli.main(["chat", option])
    assert option.partition("=")[0] in capsys.readouterr().err
