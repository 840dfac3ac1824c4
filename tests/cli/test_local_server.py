# SPDX-License-Identifier: Apache-2.0
"""Servers of commands: access and lifetime."""

import io
import os
import signal
import socket
import subprocess
import sys

import psutil
import pytest
from cli.vllm_double import write_vllm

from vllm_metal.cli import listeners, local_server
from vllm_metal.cli.start_progress import StartProgress

#: Replaces vLLM's command: answers every request with 200.
VLLM = """
import socket
from vllm.entrypoints.launchers import launcher

def main():
    with launcher.create_server_unix_socket("") as listener:
        while True:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"HTTP/1.1 200 OK\\r\\ncontent-length: 0\\r\\n\\r\\n")
"""
#: The same, started like the doctor's.
DOCTORED = """
import os, sys, time

def main():
    print(os.getpid(), file=open(os.environ["PID"], "w"), flush=True)
    time.sleep(600)
"""
DOCTOR = """
from vllm_metal.cli.doctor import server
from vllm_metal.cli.doctor.model import Model

server.try_server(Model("m", "/nowhere", local=True), True, lambda stage: None)
"""
COMMAND = """
import sys, time
from pathlib import Path
from vllm_metal.cli import local_server

folder = Path(sys.argv[1])
command = local_server.serve_command("m", "m", folder / "server", [])
with (
    local_server.listening(folder / "server") as listener,
    local_server.started(command, {}, listener, folder / "log", sys.stderr) as process,
):
    print(process.pid, flush=True)
    time.sleep(600)
"""


FAILING = """
def main():
    print("a warning", {last!r}, sep="\\n")
    raise SystemExit(1)
"""


@pytest.mark.parametrize(
    ("last", "told"),
    [
        ("vllm-metal: starting; the log is /a/log\nvllm: error: no weights", "no weights"),
        ("a fault", "the server ended with status 1; its log ends:\na warning\na fault"),
    ],
)  # fmt: skip
def test_a_server_that_does_not_start_says_why(tmp_path, monkeypatch, last, told):
    write_vllm(tmp_path / "packages", FAILING.format(last=last))
    path = os.pathsep.join([str(tmp_path / "packages"), *filter(None, sys.path)])
    command = local_server.serve_command("m", "m", tmp_path / "server", [])
    terminal = io.StringIO()
    with (
        local_server.listening(tmp_path / "server") as listener,
        pytest.raises(ValueError) as caught,
        local_server.started(command, {"PYTHONPATH": path}, listener, tmp_path / "log", terminal),
    ):
        pass
    assert str(caught.value) == told
    assert terminal.getvalue().count("the server's log is /a/log\n") == last.count("/a/log")


@pytest.mark.parametrize(
    ("printed", "told"),
    [
        ("", "the server starts (5 s)"),
        ("Fetching 5 files:  20%|██        | 1/5 [00:00<00:02,  1.9it/s]\r", "the server starts"),
        (
            "Fetching 5 files:  20%|██        | 1/5 [00:00<00:02,  1.9it/s]\n"
            "model.safetensors:   0%|          | 0.00/17.2G [00:00<?, ?B/s]\r"
            "model.safetensors:  18%|█▊        | 3.10G/17.2G [01:10<05:17, 44.4MB/s]\r",
            "the server downloads model.safetensors, 3.10GB of 17.2GB, 05:17 left (5 s)",
        ),
        (
            "model.safetensors: 100%|██████████| 17.2G/17.2G [06:10<00:00, 44.4MB/s]\n"
            "Loading weights:  80%|███████▉  | 113M/142M [00:00<00:00, 958MB/s]\r",
            "the server loads the weights, 113MB of 142MB (5 s)",
        ),
        ("Loading weights: 100%|██████████| 142M/142M [00:00<00:00, 952MB/s]", "starts (5 s)"),
    ],
)
def test_a_start_tells_what_is_fetched_and_how_long_that_takes(tmp_path, printed, told):
    output, terminal, seconds = tmp_path / "server.log", io.StringIO(), iter((0.0, 5.0, 9.0, 35.0))
    progress = StartProgress(output, terminal, clock=lambda: next(seconds))
    output.write_text(f"vllm-metal: starting; the log is /logs/serve-1.log\n{printed}")
    progress.show()
    log, line = terminal.getvalue().splitlines()
    assert log == "vllm-metal: the server's log is /logs/serve-1.log"
    assert told in line
    progress.show()  # which is no terminal: each half minute
    assert len(terminal.getvalue().splitlines()) == 2
    progress.ready()
    assert terminal.getvalue().splitlines()[2:] == ["vllm-metal: ready after 35 s"]


def test_what_a_server_prints_is_kept_where_its_log_is_no_file(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_METAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    kept = local_server.output_file("chat", tmp_path)
    assert kept.parent == tmp_path / "cache" / "logs" and kept.name.startswith("chat-")
    monkeypatch.delenv("VLLM_LOGGING_LEVEL")
    assert local_server.output_file("chat", tmp_path) == tmp_path / "server.log"


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_ends_with_its_command_however_that_ends(tmp_path, end):
    write_vllm(tmp_path / "packages", VLLM)
    path = os.pathsep.join([str(tmp_path / "packages"), *filter(None, sys.path)])
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    ) as command:
        server = psutil.Process(int(command.stdout.readline()))
        command.send_signal(end)
    check_gone(server)


def check_gone(server):
    gone, left = psutil.wait_procs([server], timeout=60)
    for process in left:
        process.kill()
    assert gone


def test_a_server_ends_with_a_doctor_that_is_killed(tmp_path):
    write_vllm(tmp_path / "packages", DOCTORED)
    path = os.pathsep.join([str(tmp_path / "packages"), *filter(None, sys.path)])
    pid = tmp_path / "pid"
    os.mkfifo(pid)
    with subprocess.Popen(
        [sys.executable, "-c", DOCTOR], env=os.environ | {"PYTHONPATH": path, "PID": str(pid)}
    ) as doctor:
        server = psutil.Process(int(pid.read_text()))
        doctor.kill()
    check_gone(server)


def test_a_listener_is_told_by_its_user(tmp_path, monkeypatch):
    with socket.socket() as mine:
        mine.bind(("127.0.0.1", 0))
        port = mine.getsockname()[1]
        assert listeners.owner(port) is None
        mine.listen()
        assert listeners.owner(port) == os.getuid()
    table = tmp_path / "tcp"
    lines = (
        f"0: 0100007F:{port:04X} 0:0 {state} 0:0 0:0 0 {uid} 0"
        for state, uid in (("0A", 65534), ("0A", os.getuid()), ("01", 5))
    )
    table.write_text("\n".join(["  sl  local_address", *lines]))
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(listeners, "TABLES", (table,))
    assert listeners.owner(port) == 65534
    assert listeners.owner(port + 1) is None


def test_a_listener_elsewhere_is_told_by_ones_own_processes(monkeypatch):
    """macOS shows a user the sockets of their own processes only."""
    here = psutil.Process()
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(psutil, "process_iter", lambda: [here])
    with socket.socket() as mine:
        mine.bind(("127.0.0.1", 0))
        port = mine.getsockname()[1]
        assert listeners.owner(port) is None
        mine.listen()
        assert listeners.owner(port) == os.getuid()
        monkeypatch.setattr(psutil, "process_iter", list)
        assert listeners.owner(port) not in (None, os.getuid())


def test_a_place_that_is_taken_is_an_error(tmp_path):
    for place in (0, tmp_path / "server"):
        with local_server.listening(place) as listener:
            address = listener.getsockname()
            taken = address[1] if place == 0 else place
            with (
                pytest.raises(ValueError, match="cannot listen on"),
                local_server.listening(taken),
            ):
                pass
