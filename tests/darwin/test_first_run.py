# SPDX-License-Identifier: Apache-2.0
"""A user's first commands on a Mac, under the double, succeed without warnings."""

import json
import os
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest
from darwin.run import CRASH, run, start
from e2e.server import free_port

from vllm_metal.engine.models.embedded import embedded_model_path

pytestmark = pytest.mark.more
ROOT = Path(__file__).parents[2]
SMALL = {"max_model_len": 128, "kv_cache_memory_bytes": 32 << 20, "max_num_batched_tokens": 64}
#: Its KV pool is what is left of this; bytes.
SMALL_MAC = {"DARWIN_DOUBLE_TOTAL": str(6 << 30), "DARWIN_DOUBLE_AVAILABLE": str(4 << 30)}
#: Permitted patterns in a line of stderr.
RECOGNIZED = (
    re.compile(r"\d+%\|.*\|.*\[.*\]?$|\d+(it|B) \[.*\]$"),  # tqdm's bars
    re.compile(r"^(\S+ pid=\d+\) )?INFO: +"),  # uvicorn's
)
#: Forbidden on stdout and stderr after a start and an end without a fault.
ALARMS = (CRASH, "Traceback", "ERROR", "Error:", "WARNING", "unexpectedly", "leaked", "killing")
#: Except vLLM's lines about a low limit of open files, and about each model whose
#: generation_config.json sets sampling parameters.
ALLOWED = ("Found ulimit of", "sampling parameters have been overridden by the model's")


@pytest.fixture(scope="module")
def model() -> str:
    """SmolLM2-135M-Instruct in float32, from its package."""
    return str(embedded_model_path(dequantize=True))


def unrecognized(stderr: str) -> list[str]:
    """Returns unrecognized lines, or overwritten parts of lines."""
    lines = filter(str.strip, re.split(r"[\r\n]", stderr))
    return [line for line in lines if not any(known.search(line) for known in RECOGNIZED)]


def assert_clean(status: int, stdout: str, stderr: str) -> None:
    """Asserts exit status 0, no errors or warnings, and only RECOGNIZED lines on stderr."""
    said = f"{stdout}\n--- stderr\n{stderr}"
    assert status == 0, said
    assert unrecognized(stderr) == [], said
    lines = [line for line in said.splitlines() if not any(each in line for each in ALLOWED)]
    alarming = [line for line in lines if any(alarm in line for alarm in ALARMS)]
    assert alarming == [], said


def assert_runs_clean(program: subprocess.CompletedProcess[str]) -> None:
    assert_clean(program.returncode, program.stdout, program.stderr)


@pytest.mark.slow
def test_the_demo() -> None:
    shown = run([ROOT / "examples" / "demo.py"], timeout=240)
    assert_runs_clean(shown)
    assert "All answers are right" in shown.stdout


@pytest.mark.slow
def test_the_readme_s_snippet_pasted_into_a_file(model: str, tmp_path: Path) -> None:
    snippets = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (snippet,) = (each for each in snippets if "LLM(" in each)
    (name,) = re.findall(r'LLM\("([^"]+)"', snippet)
    assert "__main__" not in snippet
    script = tmp_path / "snippet.py"
    script.write_text(snippet.replace(name, model))
    pasted = run([script], timeout=240, **SMALL_MAC)
    assert_runs_clean(pasted)
    assert len(pasted.stdout.splitlines()[-1]) > 0


@pytest.mark.slow
def test_engines_one_after_the_other(model: str, tmp_path: Path) -> None:
    """Two engines run in this process, then one in a process of its own, as a user may set."""
    code = f"""
        import os, random
        from vllm import LLM, SamplingParams

        def run():
            state = random.getstate()
            llm = LLM({model!r}, **{SMALL!r})
            params = SamplingParams(temperature=0, max_tokens=3)
            text = llm.generate("1, 2, 3,", params)[0].outputs[0].text
            print("answer", type(llm.llm_engine.engine_core).__name__, text, flush=True)
            print("random state kept", random.getstate() == state, flush=True)

        if __name__ == "__main__":
            run()
            run()
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
            run()
    """
    script = tmp_path / "engines.py"
    script.write_text(dedent(code))
    program = run([script], timeout=240)
    assert_runs_clean(program)
    answers = re.findall(r"^answer (\w+) ( 4,)", program.stdout, re.MULTILINE)
    assert program.stdout.count("random state kept True") == 3
    assert answers == [("InprocClient", " 4,")] * 2 + [("SyncMPClient", " 4,")]


class Served:
    """A server under the double, with its stdout and stderr."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, folder: Path) -> None:
        self.process, self.url, self._folder = process, url, folder

    def texts(self) -> tuple[str, str]:
        return (self._folder / "out").read_text(), (self._folder / "err").read_text()

    def ask(self, model: str) -> str:
        body = json.dumps({"model": model, "prompt": "1, 2, 3,", "max_tokens": 3, "temperature": 0})
        headers = {"Content-Type": "application/json"}
        asked = urllib.request.Request(f"{self.url}/v1/completions", body.encode(), headers)
        with urllib.request.urlopen(asked, timeout=240) as reply:
            return str(json.load(reply)["choices"][0]["text"])

    def wait_until_healthy(self) -> None:
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=30).close()
                return
            except OSError:
                time.sleep(0.25)
        raise AssertionError("\n".join(self.texts()))


@pytest.fixture
def served(model: str, tmp_path: Path) -> Iterator[Served]:
    port = free_port()
    flags = (f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items())
    command = ["-m", "vllm.entrypoints.cli.main", "serve", model, "--host=127.0.0.1"]
    with (
        (tmp_path / "out").open("w") as out,
        (tmp_path / "err").open("w") as err,
        start([*command, f"--port={port}", *flags], out, err) as process,
    ):
        server = Served(process, f"http://127.0.0.1:{port}", tmp_path)
        server.wait_until_healthy()
        yield server


def test_a_server_and_ctrl_c(served: Served, model: str) -> None:
    assert served.ask(model).startswith(" 4,")
    os.killpg(served.process.pid, signal.SIGINT)  # as a terminal does
    assert_clean(served.process.wait(240), *served.texts())


@pytest.mark.slow
def test_an_engine_that_dies_is_still_reported(served: Served) -> None:
    (engine,) = re.findall(r"\(EngineCore pid=(\d+)\)", served.texts()[0])[:1]
    os.kill(int(engine), signal.SIGKILL)
    served.process.wait(240)
    assert "engine core exited unexpectedly" in served.texts()[0]
