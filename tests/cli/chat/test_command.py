# SPDX-License-Identifier: Apache-2.0
"""Options of `vllm-metal chat`, and checks before a model is loaded."""

import gc
import socket

import pytest
import uvicorn

from vllm_metal.cli import local_server
from vllm_metal.cli import main as cli
from vllm_metal.cli.chat import command


@pytest.mark.parametrize("other", [["--terminal"], ["m", "--system", "be brief", "--terminal"]])
def test_the_chat_in_the_terminal_names_its_replacement_in_one_line(capsys, other):
    assert cli.main(["chat", *other]) == 1
    told = capsys.readouterr().err
    assert "vllm chat --url http://" in told and told.count("\n") == 1


def test_a_running_server_leaves_nothing_to_load(capsys):
    assert cli.main(["chat", "--url", "http://127.0.0.1:8000", "some-model"]) == 1
    assert "--url" in (told := capsys.readouterr().err) and "leave out" in told


def test_a_port_that_is_taken_is_named(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert cli.main(["chat", "--url", "http://127.0.0.1:8000", "--port", str(port)]) == 1
    assert f"port {port} is in use" in (told := capsys.readouterr().err) and "--port" in told


def test_what_is_not_installed_is_named_with_its_command(capsys, monkeypatch):
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "markdown_it" else name)
    assert cli.main(["chat", "--no-open"]) == 1
    told = capsys.readouterr().err
    assert "markdown_it" in told and "markdown-it-py" in told and "install" in told


@pytest.mark.parametrize("option", ["--port=0", "--port=70000", "--kv-cache-gib=0"])
def test_values_that_make_no_sense_are_refused(capsys, option):
    with pytest.raises(SystemExit):
        cli.main(["chat", option])
    assert option.partition("=")[0] in capsys.readouterr().err


def test_options_for_a_server_that_is_not_started_are_refused(capsys):
    url = "http://127.0.0.1:8000"
    assert cli.main(["chat", "--url", url, "--serve", "--kv-cache-dtype", "fp8"]) == 1
    assert "chat --url starts no server" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "advice"),
    [
        ("--max-model-len=4k", "write it before --serve"),
        ("--kv_cache_memory_bytes=1", "write --kv-cache-gib"),
        ("--api-key", "this command sets it"),
    ],
)
def test_options_that_the_command_sets_are_not_for_the_server(capsys, option, advice):
    assert cli.main(["chat", "--serve", option]) == 1
    assert advice in capsys.readouterr().err


def test_a_started_server_gets_the_options_behind_serve(monkeypatch):
    commands = []

    def started(given, *_):
        commands.append(given)
        raise ValueError("not in this test")

    monkeypatch.setattr(command.local_server, "started", started)
    monkeypatch.setattr(command.surroundings, "prepare", lambda offline, quiet: None)
    for check in ("check_model", "check_template"):
        monkeypatch.setattr(command.early_checks, check, lambda model: None)
    words = ["chat", "m", "--port", str(local_server.free_port())]
    assert cli.main([*words, "--serve", "--speculative-config", '{"method": "ngram"}']) == 1
    assert commands[0][-2:] == ("--speculative-config", '{"method": "ngram"}')


def test_a_model_without_a_chat_template_is_refused_before_it_starts(tmp_path, monkeypatch, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    monkeypatch.setattr(command.surroundings, "prepare", lambda **_: None)
    monkeypatch.setattr(command.early_checks, "check_model", lambda *_, **__: None)
    port = str(local_server.free_port())
    assert cli.main(["chat", str(tmp_path), "--port", port]) == 1
    told = capsys.readouterr().err
    assert "has no chat template, so it cannot chat: choose" in told and told.count("\n") == 1


def test_a_page_that_is_told_to_end_does_so_quietly(monkeypatch, caplog):
    async def serve(server, sockets):
        server.started = True
        raise SystemExit(143)  # as uvicorn does, which passes SIGTERM on to this program

    monkeypatch.setattr(uvicorn.Server, "serve", serve)
    url = f"http://127.0.0.1:{local_server.free_port()}"
    with pytest.raises(SystemExit) as caught:
        cli.main(["chat", "--url", url, "--port", str(local_server.free_port())])
    assert caught.value.code == 143
    del caught
    gc.collect()  # asyncio tells of a task's error when nothing refers to the task
    assert not caplog.records
