# SPDX-License-Identifier: Apache-2.0
"""`vllm-metal launch`, with a client that records how it was started.

The server is a double that says what vLLM's says of its models; one test has the real one.
"""

import json
import os
import re
import runpy
import shlex
import socket
import subprocess
import sys
import tomllib
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest
from cli.vllm_double import write_vllm
from vllm.entrypoints.common.cli_args import FrontendArgs

from vllm_metal.cli import listeners, options
from vllm_metal.cli import main as cli
from vllm_metal.cli.fit.known import KNOWN
from vllm_metal.cli.fit.machine import Machine
from vllm_metal.cli.launch import planning
from vllm_metal.identity import model_names

CLIENTS = ("claude", "codex", "opencode", "pi")
#: A client: `RECORDER OUT STATUS ARGUMENTS...`.
RECORDER = """
import json, os, sys
_, out, status, *given = sys.argv
files = {path: open(path).read() for path in given if os.path.isfile(path)}
found = {"arguments": given, "environment": dict(os.environ), "files": files}
json.dump(found, open(out, "w"))
sys.exit(int(status))
"""


class Models(BaseHTTPRequestHandler):
    """Answers /v1/models like vLLM to holders of the key."""

    def do_GET(self):
        allowed = self.headers.get("Authorization") in self.server.accepted
        entry = {"id": "tiny", "object": "model", "max_model_len": 40000}
        body = json.dumps({"object": "list", "data": [entry]} if allowed else {}).encode()
        self.send_response(200 if allowed else 401)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@contextmanager
def listening(key=None):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Models)
    server.accepted = [f"Bearer {key}"] if key else [None]
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def user(tmp_path, monkeypatch, capfd):
    """A user with all clients, each a program that records how it was started."""
    return User(tmp_path, monkeypatch, capfd)


class User:
    def __init__(self, root: Path, monkeypatch, capfd):
        self.bin, self.home, self.out = root / "bin", root / "home", root / "started.json"
        self._monkeypatch, self._capfd = monkeypatch, capfd
        self.bin.mkdir()
        self.home.mkdir()
        for name in CLIENTS:
            self.install(name)

    def install(self, name, program=RECORDER, status=0):
        """Installs a client program that only uses Python's standard library."""
        script = self.bin / f"{name}.py"
        script.write_text(program)
        # Through a shell: the path of an interpreter may have spaces.
        line = shlex.join([sys.executable, "-S", str(script), str(self.out), str(status)])
        (self.bin / name).write_text(f'#!/bin/sh\nexec {line} "$@"\n')
        (self.bin / name).chmod(0o755)

    def variables(self, **variables):
        return {"PATH": str(self.bin), "HOME": str(self.home), "VLLM_API_KEY": "", **variables}

    def launch(self, *arguments, **variables):
        """Launches in this process; returns the status and output."""
        with self._monkeypatch.context() as patch:
            for name, value in self.variables(**variables).items():
                patch.setenv(name, value)
            status = cli.main(["launch", *arguments])
        said = self._capfd.readouterr()
        return subprocess.CompletedProcess(arguments, status, said.out, said.err)

    def launch_process(self, *arguments, **variables):
        return subprocess.run(
            [sys.executable, "-m", "vllm_metal.cli.main", "launch", *arguments],
            env=os.environ | self.variables(**variables),
            capture_output=True,
            text=True,
        )

    def started(self, *arguments, **variables):
        done = self.launch(*arguments, **variables)
        assert done.returncode == 0, done.stderr
        assert list(self.home.iterdir()) == [], "something is written where the user keeps things"
        return json.loads(self.out.read_text())


def test_claude_code_is_told_by_its_environment(user):
    with listening() as port:
        found = user.started("claude", "--port", str(port), ANTHROPIC_API_KEY="the user's own")
    variables = found["environment"]
    assert variables["ANTHROPIC_BASE_URL"] == f"http://127.0.0.1:{port}"
    assert "ANTHROPIC_API_KEY" not in variables  # it goes before ANTHROPIC_AUTH_TOKEN
    named = {name: value for name, value in variables.items() if name.endswith("_MODEL")}
    assert set(named.values()) == {"tiny"} and len(named) == 5
    assert int(variables["CLAUDE_CODE_MAX_OUTPUT_TOKENS"]) == 10000
    assert found["arguments"] == []


def test_codex_is_told_by_its_arguments(user):
    with listening() as port:
        found = user.started("codex", "--port", str(port))
    flags, settings = found["arguments"][::2], found["arguments"][1::2]
    assert set(flags) == {"-c"}
    read = tomllib.loads("\n".join(settings))
    (name,) = read["model_providers"]
    provider = read["model_providers"][name]
    assert (read["model"], read["model_provider"]) == ("tiny", name)
    assert read["model_context_window"] == 40000
    assert provider["base_url"] == f"http://127.0.0.1:{port}/v1"
    assert provider["wire_api"] == "responses"
    assert found["environment"][provider["env_key"]] == "none"


def test_opencode_is_told_by_its_environment(user):
    with listening("k1") as port:
        found = user.started("opencode", "--port", str(port), VLLM_API_KEY="k1")
    config = json.loads(found["environment"]["OPENCODE_CONFIG_CONTENT"])
    name, _, model = config["model"].partition("/")
    provider = config["provider"][name]
    assert model in provider["models"] and config["small_model"] == config["model"]
    assert provider["models"][model]["limit"] == {"context": 40000, "output": 10000}
    assert provider["options"]["baseURL"] == f"http://127.0.0.1:{port}/v1"
    variable = re.fullmatch(r"\{env:(\w+)\}", provider["options"]["apiKey"])[1]
    assert found["environment"][variable] == "k1"


def test_pi_is_told_by_a_temporary_file(user):
    with listening() as port:
        found = user.started("pi", "--port", str(port))
    ((path, extension),) = found["files"].items()
    assert not Path(path).exists()
    flag, given, *rest = found["arguments"]
    assert (flag, given) == ("--extension", path)
    assert rest == ["--provider", "vllm-metal", "--model", "tiny"]
    stated = re.search(r'registerProvider\("vllm-metal", (\{.*\})\);', extension)[1]
    provider = json.loads(stated)
    assert provider["baseUrl"] == f"http://127.0.0.1:{port}/v1"
    assert provider["models"][0]["contextWindow"] == 40000
    assert found["environment"][provider["apiKey"].removeprefix("$")] == "none"


def test_arguments_behind_two_dashes_are_the_clients(user):
    with listening() as port:
        found = user.started("claude", "--port", str(port), "--", "-p", "a b", "--", "--print")
    assert found["arguments"] == ["-p", "a b", "--", "--print"]


def test_the_exit_status_is_the_clients(user):
    """Also runs the command as a process."""
    user.install("claude", status=7)
    with listening() as port:
        assert user.launch_process("claude", "--port", str(port)).returncode == 7


def test_a_client_that_is_missing_is_named_with_what_installs_it(user):
    (user.bin / "codex").unlink()
    done = user.launch("codex")
    assert done.returncode == 1
    assert done.stderr == (
        "vllm-metal: error: codex is not installed: npm install -g @openai/codex\n"
    )


def test_print_says_what_would_be_done_and_no_key(user):
    with listening("secret-key") as port:
        done = user.launch(
            "pi", "--port", str(port), "--print", "--", "x", VLLM_API_KEY="secret-key"
        )
    assert done.returncode == 0 and not user.out.exists()
    assert "secret-key" not in done.stdout + done.stderr
    assert f"http://127.0.0.1:{port}" in done.stdout
    assert "Temporary file vllm-metal.js" in done.stdout and "--model tiny x" in done.stdout


def test_another_users_server_is_sent_nothing(user, monkeypatch):
    monkeypatch.setattr(listeners, "owner", lambda port: 65534)
    with listening("k") as port:
        done = user.launch("claude", "--port", str(port), VLLM_API_KEY="k")
    assert done.returncode == 1 and "another user (uid 65534)" in done.stderr
    assert not user.out.exists()


def test_without_a_model_and_a_network_it_ends_at_once(user, monkeypatch):
    monkeypatch.setattr(model_names, "unreachable", lambda: "the hub does not answer: try later")
    done = user.launch("claude", "--print")
    assert done.returncode == 1
    assert "no MODEL is given, and the hub does not answer: try later. Or name" in done.stderr


def test_nobody_takes_the_port_while_a_server_is_planned(user, monkeypatch):
    with socket.socket() as stranger:

        def planned(model, context):
            stranger.bind(("127.0.0.1", int(port)))
            stranger.listen()
            return planning.ServerPlan("m", 512, [], [])

        monkeypatch.setattr(planning, "planned", planned)
        port = free_port()
        done = user.launch("claude", "m", "--port", port)
    assert done.returncode == 1 and f"cannot listen on port {port}" in done.stderr
    assert not user.out.exists()


@pytest.mark.parametrize(
    ("arguments", "key", "said"),
    [
        (["claude", "other"], "k", "serves tiny and not other"),
        (["claude"], "wrong", "requires an API key: set VLLM_API_KEY"),
    ],
)
def test_a_server_that_is_another_is_not_used(user, arguments, key, said):
    with listening("k") as port:
        done = user.launch(*arguments, "--port", str(port), VLLM_API_KEY=key)
    assert done.returncode == 1 and said in done.stderr and not user.out.exists()


def test_options_of_the_server_stand_between_the_commands_and_the_clients(monkeypatch, capsys):
    plan = planning.ServerPlan("m", 4096, ["--max-model-len", "4096"], [])
    monkeypatch.setattr(planning, "planned", lambda model, context: plan)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        port = str(nobody.getsockname()[1])
        words = ["launch", "claude", "m", "--port", port, "--print"]
        assert cli.main([*words, "--serve", "--kv-cache-dtype", "fp8", "--", "-p", "x"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (server,) = (line for line in lines if " serve m " in line)
    assert " --max-model-len 4096 --kv-cache-dtype fp8 " in server
    assert server.endswith(" --middleware vllm_metal.serving.local_only.LocalOnly")
    assert "  claude -p x" in lines


@pytest.mark.parametrize(
    ("option", "advice"),
    [
        ("--max-model-len=4k", "write --context"),
        ("--model", "write MODEL"),
        ("--served_model_name=x", "this command sets it"),
        ("--port", "this command sets it"),
    ],
)
def test_options_that_the_command_sets_are_not_for_the_server(capsys, option, advice):
    assert cli.main(["launch", "claude", "--print", "--serve", option]) == 1
    assert advice in capsys.readouterr().err


def test_a_running_server_gets_no_options(user):
    with listening() as port:
        done = user.launch("claude", "--port", str(port), "--serve", "--kv-cache-dtype", "fp8")
    assert done.returncode == 1 and "--serve has no effect" in done.stderr


def test_a_port_is_a_ports_number(capsys):
    with pytest.raises(SystemExit):
        cli.main(["launch", "claude", "--port", "70000"])
    assert "'70000' is not a port" in capsys.readouterr().err


def test_the_port_is_by_default_that_of_vllm_serve():
    assert options.parser().parse_args(["launch", "claude"]).port == FrontendArgs.port


def run_here(line, **_):
    """Runs `python -m MODULE ARGUMENTS...` in this process, which has imported vLLM."""
    _, dash_m, module, *arguments = line
    assert dash_m == "-m"
    printed = StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        patch.setattr(sys, "argv", [module, *arguments])
        patch.delitem(sys.modules, module)
        runpy.run_module(module, run_name="__main__")
    return subprocess.CompletedProcess(line, 0, printed.getvalue())


def free_port():
    """Returns a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.mark.parametrize(
    "how", ["in this process", pytest.param("as a process", marks=pytest.mark.slow)]
)
def test_a_model_that_is_not_there_is_an_error_before_anything_starts(
    user, tmp_path, monkeypatch, how
):
    if how == "in this process":
        here = SimpleNamespace(run=run_here, PIPE=subprocess.PIPE)
        monkeypatch.setattr(planning, "subprocess", here)
    done = user.launch("claude", str(tmp_path), "--port", free_port())
    assert done.returncode == 1 and "has no config.json" in done.stderr
    assert not user.out.exists()


def test_ctrl_c_ends_the_plan_by_this_process_alone(monkeypatch):
    def run(line, **options):
        assert options["start_new_session"]  # else its traceback would be printed as well
        raise KeyboardInterrupt

    monkeypatch.setattr(planning.early_checks, "check_model", lambda model: None)
    monkeypatch.setattr(planning, "subprocess", SimpleNamespace(run=run, PIPE=subprocess.PIPE))
    with pytest.raises(KeyboardInterrupt):
        planning.planned("m", None)


@pytest.mark.parametrize(("memory", "context"), [(8, 14_720), (16, 32_768), (64, 40_960)])
@pytest.mark.more
def test_an_agent_s_context_may_take_more_than_is_taken_unasked(memory, context, monkeypatch):
    """Qwen3-4B, 4-bit, by default: 18k tokens on 16 GB; on 8 GB, all that fit."""
    monkeypatch.setattr(planning, "subprocess", SimpleNamespace(run=run_here, PIPE=subprocess.PIPE))
    monkeypatch.setattr(Machine, "this", lambda: Machine.mac(memory * 2**30))
    (smaller,) = (each for each in KNOWN if each.name.endswith("/Qwen3-0.6B-4bit"))
    sizes = {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36}
    model = replace(smaller, config={**smaller.config, **sizes, "num_attention_heads": 32})
    with model.folder() as path:
        (path / "tokenizer.json").write_text('{"model": {}}')
        assert planning.planned(str(path), None).context == pytest.approx(context, rel=0.05)


#: A client that asks its server once: `ASKER OUT STATUS`.
ASKER = """
import json, os, sys, urllib.request
_, out, status = sys.argv
root, key = os.environ["ANTHROPIC_BASE_URL"], os.environ["ANTHROPIC_AUTH_TOKEN"]
body = {"model": os.environ["ANTHROPIC_MODEL"], "max_tokens": 3,
        "messages": [{"role": "user", "content": "hello"}]}
request = urllib.request.Request(root + "/v1/messages", json.dumps(body).encode(),
    {"Authorization": "Bearer " + key, "Content-Type": "application/json"})
answer = json.load(urllib.request.urlopen(request))
json.dump(answer, open(out, "w"))
sys.exit(int(status))
"""


#: A server's double, in the place of vLLM's command. It is not ready when first asked, and writes
#: down by whom it was started.
VLLM = """
import http.server, json, os, socket, sys

from vllm.entrypoints.launchers import launcher

class Handler(http.server.BaseHTTPRequestHandler):
    ready = False

    def do_GET(self):
        self.reply(200 if Handler.ready else 503, {})
        Handler.ready = True

    def do_POST(self):
        known = self.headers["Authorization"] == "Bearer " + os.environ["VLLM_API_KEY"]
        self.reply(200 if known else 401, {"model": NAME, "usage": {"output_tokens": 2}})

    def reply(self, status, value):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())

NAME = sys.argv[sys.argv.index("--served-model-name") + 1]

def main():
    server = http.server.HTTPServer(("", 0), Handler, bind_and_activate=False)
    server.socket = launcher.create_server_socket(("127.0.0.1", 0), reuse_port=False)
    server.serve_forever()
"""


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_server_is_started_for_the_client_and_ends_with_it(user, tmp_path, monkeypatch, real):
    model = tmp_path / "small"
    if real:
        make = [sys.executable, "-m", "vllm_metal.cli.doctor.children.tiny_model", str(model)]
        subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
        launch = user.launch_process
    else:
        model.mkdir()
        write_vllm(tmp_path / "packages", VLLM)
        path = os.pathsep.join([str(tmp_path / "packages"), *filter(None, sys.path)])
        monkeypatch.setenv("PYTHONPATH", path)
        plan = planning.ServerPlan(str(model), 512, ["--max-model-len", "512"], [])
        monkeypatch.setattr(planning, "planned", lambda model, context: plan)
        launch = user.launch
    user.install("claude", ASKER, status=3)
    port = free_port()
    shorter = ("--serve", "--override-generation-config", '{"max_new_tokens": 2}')
    done = launch("claude", str(model), "--port", port, *shorter)
    assert done.returncode == 3, done.stderr
    answer = json.loads(user.out.read_text())
    assert answer["model"] == "small" and answer["usage"]["output_tokens"] == 2
    assert "the server starts (" in done.stderr
    with socket.socket() as probe, pytest.raises(ConnectionRefusedError):
        probe.connect(("127.0.0.1", int(port)))
