# SPDX-License-Identifier: Apache-2.0
"""Start failures that print one line, and those that keep a traceback."""

import json
import logging
import os
import socket
import stat
import sys
from argparse import Namespace

import pytest
import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from vllm import logger
from vllm.config.logging import LoggingConfig
from vllm.engine.arg_utils import EngineArgs, human_readable_int, parse_type
from vllm.entrypoints.launchers import launcher
from vllm.exceptions import VLLMValidationError
from vllm.renderers import registry
from vllm.transformers_utils import config
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import utils
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_metal.identity.model_files import ModelLoadError
from vllm_metal.patches.vllm_patches import start_failures
from vllm_metal.patches.vllm_patches.start_failures import ERROR_PREFIX, StartError, cause
from vllm_metal.settings import log_files


@dataclass
class Settings:
    """Validated by pydantic when made, like vLLM's configurations."""

    block_size: int

    def __post_init__(self):
        if self.block_size == 48:
            raise ValueError("--block-size 48 is not supported:\n  choose one of (16, 32)")


def raised(act, kind=Exception):
    with pytest.raises(kind) as caught:
        act()
    return caught.value


def of_vllm(error):
    """Returns an error as raised by vLLM's code."""
    return raised(
        lambda: exec("raise error", {"__name__": "vllm.config.model", "error": error}),
        BaseException,
    )


def of_a_library(error):
    return raised(lambda: exec("raise error", {"__name__": "numpy.core", "error": error}))


FULL = "the disk is full: free some space, or name another folder by VLLM_METAL_CACHE and HF_HOME"
ROPE = (
    "rope_parameters have no rope_type: add one, such as yarn, to rope_parameters of "
    "--hf-overrides or config.json"
)
YAML = (
    "--config is not YAML: while parsing a flow node expected the node content, but found "
    "'<stream end>' in \"<unicode string>\", line 1, column 5: a: [ ^"
)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            raised(lambda: Settings(48), ValidationError),
            "--block-size 48 is not supported: choose one of (16, 32)",
        ),
        (
            raised(lambda: TypeAdapter(Settings).validate_python({"block_size": "x"})),
            "block_size='x': it must be a valid integer, unable to parse string as an integer",
        ),
        (of_vllm(ValueError("--runner is wrong")), "--runner is wrong"),
        (of_vllm(AssertionError("More than one file")), "More than one file"),
        (of_vllm(KeyError("No such parser")), "No such parser"),
        (of_vllm(KeyError("rope_type")), ROPE),
        (of_vllm(VLLMValidationError("The template is wrong")), "The template is wrong"),
        (of_vllm(FileNotFoundError(2, "Not there", "c.yaml")), "there is no file c.yaml"),
        (of_a_library(OSError(21, "Is a directory", "c.yaml")), "c.yaml: Is a directory"),
        (of_a_library(Exception("No space left (os error 28)")), FULL),
        (of_a_library(OSError(28, "No space left", "a")), f"{FULL} (a)"),
        (raised(lambda: yaml.safe_load("a: [")), YAML),
        (ModelLoadError("model.safetensors is cut off"), "model.safetensors is cut off"),
        (Exception("Call to add_lora method failed: no\nweights"), "no weights"),
        (of_a_library(OSError(28, "No space left")), "[Errno 28] No space left"),
        (of_vllm(AttributeError("'NoneType' has no attribute 'x'")), None),
        (of_vllm(KeyError("layers")), None),
        (of_a_library(TypeError("int() argument must be a string")), None),
        (of_a_library(ValueError("shapes (3,4) and (5,) not aligned")), None),
        (RuntimeError("Engine core initialization failed. See root cause above."), None),
        (KeyboardInterrupt(), None),
    ],
)  # fmt: skip
def test_a_users_mistake_is_one_line_and_a_fault_has_none(error, told):
    assert cause(error) == told


@pytest.fixture
def logs(tmp_path, monkeypatch):
    """Log folder of a user without log settings."""
    monkeypatch.setenv("VLLM_METAL_CACHE", str(tmp_path))
    for name in start_failures.start_log.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", ["vllm", "serve", "model"])
    return tmp_path / "logs"


def fail(error, message="EngineCore failed to start."):
    """Acts like an engine's process whose start or step fails."""
    start_failures.leave_causes()
    try:
        raise error
    except Exception:
        logging.getLogger("vllm.v1.engine.core").exception(message)


def given_to_its_parent(logs, monkeypatch):
    """Makes this process act like the parent of the failed one."""
    left = logs / f"cause-{os.getppid()}.json"
    left.rename(logs / f"cause-{os.getpid()}.json")


def test_the_engines_process_tells_its_parent_why_and_the_log_all(logs, monkeypatch):
    with pytest.raises(SystemExit):
        fail(ModelLoadError("no weights"))
    (log,) = logs.glob("*.log")
    assert "Traceback" in log.read_text() and "no weights" in log.read_text()
    assert {stat.S_IMODE(path.stat().st_mode) for path in logs.iterdir()} == {0o600}
    given_to_its_parent(logs, monkeypatch)

    def wait():
        raise RuntimeError("Engine core initialization failed. See root cause above.")

    monkeypatch.setattr(utils, "wait_for_engine_startup", wait)
    start_failures.name_causes()
    with pytest.raises(StartError, match=r"^no weights$") as caught:
        utils.wait_for_engine_startup()
    assert caught.value.__suppress_context__
    with pytest.raises(RuntimeError):  # another start has another cause
        utils.wait_for_engine_startup()


def test_a_call_that_fails_by_a_users_mistake_goes_to_the_log(logs, monkeypatch, capsys):
    start_failures.leave_causes()
    for error in (ModelLoadError("no weights"), KeyError("a fault")):
        try:
            raise error
        except Exception:
            logger = logging.getLogger("vllm.v1.engine.core")
            logger.exception("Invocation of %s method failed", "add_lora")
    (log,) = logs.glob("*.log")
    assert "no weights" in log.read_text() and "a fault" not in log.read_text()


def test_a_folder_is_read_once(tmp_path, caplog):
    reads = []

    def read():
        reads.append(1)
        raise ValueError("not a multiple")

    start_failures.name_causes()
    with pytest.raises(ValueError, match="not a multiple"):
        config.with_retry(read, f"Error parsing config for {tmp_path}")
    assert len(reads) == 1 and not caplog.records


def test_a_tokenizer_that_cannot_be_read_is_named(monkeypatch):
    def load(config):
        return {}["added_tokens"]

    monkeypatch.setattr(registry, "cached_tokenizer_from_config", load)
    start_failures.name_causes()
    told = r"^the tokenizer of ./model cannot be read \(KeyError: 'added_tokens'\): download its"
    with pytest.raises(StartError, match=told):
        registry.cached_tokenizer_from_config(Namespace(tokenizer="./model"))


FATAL = "EngineCore encountered a fatal error."


@pytest.fixture
def named(logs, monkeypatch):
    """Acts like a process that has started an engine."""
    monkeypatch.setattr(EngineDeadError, "__init__", EngineDeadError.__init__)
    monkeypatch.setattr(EngineArgs, "create_engine_config", lambda self: None)
    start_failures.name_causes()
    EngineArgs.create_engine_config(None)
    return logs


def test_an_engine_that_ends_late_tells_its_user_why(named, monkeypatch):
    fail(ModelLoadError("no weights"), FATAL)
    given_to_its_parent(named, monkeypatch)
    for _ in range(2):  # one engine's end is many requests'
        assert str(EngineDeadError()) == "no weights"
    EngineArgs.create_engine_config(None)  # of the next engine
    fail(KeyError("a fault"), FATAL)
    assert str(EngineDeadError()).startswith("EngineCore encountered an issue")


@pytest.mark.parametrize(("ended", "told"), [("no weights", "no weights"), ("a fault", None)])
def test_a_workers_cause_is_its_engines(named, monkeypatch, ended, told):
    fail(ModelLoadError("no weights"), "WorkerProc hit an exception.")
    given_to_its_parent(named, monkeypatch)
    assert cause(of_vllm(RuntimeError(f"Worker failed with error '{ended}', please"))) == told


def test_a_users_own_log_has_the_traceback_as_ever(logs, monkeypatch, caplog):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    logger = logging.getLogger("vllm.v1.engine.core")
    logger.addHandler(caplog.handler)
    try:
        fail(ModelLoadError("no weights"))
        fail(KeyError("a fault"))
    finally:
        logger.removeHandler(caplog.handler)
    assert {record.exc_info[0] for record in caplog.records} == {ModelLoadError, KeyError}
    assert json.loads((logs / f"cause-{os.getppid()}.json").read_text()) == "no weights"


def parser():
    made = FlexibleArgumentParser(prog="vllm")
    commands = made.add_subparsers(dest="command")
    serve = commands.add_parser("serve")
    serve.add_argument("--max-model-len", type=int)
    serve.add_argument("--speculative-config", "-sc", type=parse_type(json.loads))
    serve.add_argument("--kv-cache-memory-bytes", type=parse_type(human_readable_int))
    serve.add_argument("--kv-cache-dtype", choices=["auto", "fp8", "nvfp4"])
    serve.add_argument("--parser", choices=[f"parser{number}" for number in range(20)])
    return made


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--max-modelen", "5"], "unknown: --max-modelen 5; did you mean --max-model-len?"),
        (["--qqq"], "unknown: --qqq"),
        (
            ["--speculative-config", "{method: ngram}"],
            "--speculative-config={method: ngram} is not JSON, such as "
            """'{"method": "ngram", "num_speculative_tokens": 5}'""",
        ),
        (["--max-model-len", "x"], "--max-model-len=x is not a whole number"),
        (["--max-model-len"], "--max-model-len needs a value"),
        (
            ["--kv-cache-memory-bytes", "lots"],
            "--kv-cache-memory-bytes=lots is not a whole number, such as 8192 or 8k",
        ),
        (
            ["--kv-cache-dtype", "int3"],
            "--kv-cache-dtype=int3 is not supported: choose one of auto, fp8",
        ),
        (
            ["--parser", "parser99"],
            "--parser=parser99 is not supported; did you mean parser9? "
            "`vllm serve --help=--parser` lists what is",
        ),
    ],
)
def test_arguments_are_refused_without_usage(argv, told, capsys, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(FlexibleArgumentParser, "error", FlexibleArgumentParser.error)
    start_failures.end_commands_with_one_line({"--kv-cache-dtype": ("auto", "fp8")})
    with pytest.raises(SystemExit) as caught:
        parser().parse_args(["serve", *argv])
    assert caught.value.code == 1
    assert capsys.readouterr().err == f"{ERROR_PREFIX}{told}\n"


def test_a_log_that_cannot_be_written_goes_to_the_terminal(logs, monkeypatch, capsys):
    (logs.parent / "file").touch()
    monkeypatch.setenv("VLLM_METAL_CACHE", str(logs.parent / "file"))
    configured = []
    monkeypatch.setattr(
        logger, "configure_logging_if_needed", lambda config: configured.append(config)
    )
    start_failures.start_log.to_a_file()
    logger.configure_logging_if_needed(LoggingConfig())
    assert [config.pylogging_config_file for config in configured] == [None]
    told = capsys.readouterr().err
    assert told.startswith("vllm-metal: the log goes to the terminal: ")
    assert told.endswith("set VLLM_METAL_CACHE to another folder\n")


def test_a_taken_port_is_named_with_who_has_it(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(FlexibleArgumentParser, "error", FlexibleArgumentParser.error)
    start_failures.end_commands_with_one_line({})
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        by = rf"( by .*{os.getpid()}\))?"  # macOS tells root alone
        with pytest.raises(StartError, match=rf"^port {port} is in use{by}: stop that program"):
            launcher.create_server_socket(("127.0.0.1", port), reuse_port=False)


def test_an_address_that_is_not_here_is_named(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(FlexibleArgumentParser, "error", FlexibleArgumentParser.error)
    start_failures.end_commands_with_one_line({})
    with pytest.raises(
        StartError, match=r"^--host=203\.0\.113\.7 is not an address of this machine"
    ):
        launcher.create_server_socket(("203.0.113.7", 0), reuse_port=False)
    with pytest.raises(StartError, match=r"^cannot listen on --uds=/no/a\.sock"):
        launcher.create_server_unix_socket("/no/a.sock")


def test_logs_of_servers_that_ended_go_the_oldest_first(logs):
    folder = log_files.folder()
    folder.mkdir(parents=True)
    for number in range(12):
        for suffix in (".log", ".json"):
            (folder / f"serve-2026-{2**22 + number}").with_suffix(suffix).touch()  # no process's id
        os.utime(folder / f"serve-2026-{2**22 + number}.log", (number, number))
    running = folder / f"serve-2025-{os.getppid()}.log"
    running.touch()
    os.utime(running, (0, 0))
    made = log_files.begin("serve")
    assert running.exists() and made.exists()
    left = sorted(path.stem for path in folder.glob("serve-2026-*.json"))
    assert left == [f"serve-2026-{2**22 + number}" for number in range(3, 12)]
