# SPDX-License-Identifier: Apache-2.0
"""`vllm-metal doctor --tune`: results are stored and shown; failures store nothing."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import metal_interpreter
import mlx.core as mx
import pytest
from cli.doctor.conftest import script  # noqa: F401 (a fixture)

from metal_kernels import kernel
from metal_kernels.paged_attention import AttentionShape, Tiles
from metal_kernels.selfcheck import Case, Outcome, StateKind
from metal_kernels.tuner import decode_rows
from metal_kernels.tuner.choice import Layer
from metal_kernels.tuner.shares import Share
from metal_kernels.tuner.stopwatch import Unsteady
from tests.metal_kernels.tuner.fakes import Once
from vllm_metal.cli.doctor import tune
from vllm_metal.cli.doctor.children import tuning
from vllm_metal.cli.doctor.report import Report
from vllm_metal.cli.doctor.tune import Commands
from vllm_metal.cli.main import main
from vllm_metal.device import child, identity, steadiness, tuned
from vllm_metal.device.record import Record
from vllm_metal.device.tuned import Choices

FACTS = {"copy_bytes_per_second": 4e11, "matmul_flops_per_second": 1.4e13, "dispatch_seconds": 2e-6}
SEARCH = f"""
send_message(stage='what the machine does at most')
send_message(facts={FACTS})
send_message(shares=[{{'name': '1 x 1 of 32768', 'moved': 10**8, 'ours': 5e-4, 'mlx': 4e-4}},
            {{'name': '8 x 1 of 4096', 'moved': 10**8, 'ours': 5e-4, 'mlx': None}}])
send_message(chosen='parts of contexts', kind=None, values={{'part_cost': 48, 'slots': 90}},
    gain=1.3)
for kind, rows in (('llama', 32), ('gemma', 16)):
    send_message(chosen=f'tiles of drafts ({{kind}})', kind=kind, values={{'decode_rows': rows}},
        gain=1.1)
send_message(chosen='prompts (llama)', kind='llama',
    values={{'prompt_rows': {{'1024': 64, '8192': None}}}}, gain=1.2)
send_message(left=LEFT, timings=[{{'arm': 'a', 'windows': [1.0] * 5}}])
"""
#: A step takes so many milliseconds by MLX_MAX_OPS_PER_BUFFER; 200 is quickest.
PROCESS = """
import os, sys
assert sys.argv[1:] == ['dispatches']
value = int(os.environ['MLX_MAX_OPS_PER_BUFFER'])
send_message(windows=[1e-3 * (1.5 if value == 50 else 1.0 if value == 200 else 1.2)] * 5)
"""


@pytest.fixture(autouse=True)
def calm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(steadiness, "disturbance", lambda: None)
    monkeypatch.setattr(identity, "chip", lambda: None)  # of no family that has choices
    monkeypatch.setenv("VLLM_METAL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def run(script, tmp_path, capsys):  # noqa: F811
    """Tunes with such processes; returns the report and the output."""

    def tuned_by(search: str = SEARCH, process: str = PROCESS, left: str = "[]", works=True):
        path = tmp_path / "report.json"
        found = Report(path)
        commands = Commands(script(search.replace("LEFT", left)), script(process))
        tune.tune(found, commands, lambda: works)
        found.close()
        return json.loads(path.read_text()), capsys.readouterr().out

    return tuned_by


def test_what_was_found_is_kept_for_servers_and_shown(run):
    report, said = run(left="['long prompts']")
    assert tuned.load().complaint is None
    kept = tuned.load().choices
    assert kept == Choices(
        dispatches=200,
        part_cost=48,
        slots=90,
        decode_rows={"llama": 32, "gemma": 16},
        prompt_rows={"llama": {"1024": 64, "8192": None}},
    )
    assert Choices.from_json(report["tuning"]["choices"]) == kept
    assert len(report["tuning"]["timings"]) > 8 and report["tuning"]["facts"] == FACTS
    assert report["failed"] == []
    for words in (
        "A copy moves 400 GB/s here, a float16 product does 14.0 TFLOP/s",
        "parts of contexts: part_cost 48, slots 90 (1.30 times",
        "tiles of drafts (gemma): decode_rows 16",
        "prompts (llama): prompt_rows 1024:64 8192:None (1.20 times",
        "dispatches of a command buffer: dispatches 200 (1.50 times",
        "not tuned, for lack of time: long prompts",
    ):
        assert words in said
    long, short = (line for line in said.splitlines() if "x 1 of" in line)
    # 100 MB in 500 µs are 200 GB/s, half of a copy's; MLX takes 400 µs.
    assert long.split()[5:] == ["500", "200.0", "50%", "400", "80%"]
    assert short.split()[5:] == ["500", "200.0", "50%", "-", "-"]


def test_dispatches_that_do_not_pay_stay_as_they_are(run):
    run(process="send_message(windows=[1e-3] * 5)\n")
    assert tuned.load().choices.dispatches is None


@pytest.mark.parametrize(
    ("search", "process", "words"),
    [
        (
            "send_message(unsteady='decode took 28 % longer: hot')\n",
            PROCESS,
            "stopped: decode took 28 %",
        ),
        (
            SEARCH,
            "send_message(unsteady='this machine is on battery')\n",
            "stopped: this machine is on ba",
        ),
        (
            SEARCH,
            "import time\nsend_message(windows=[1, 1, 2, 2, 3])\n",
            "something else is running",
        ),
        ("send_message(stage='x')\nimport os\nos.abort()\n", PROCESS, "SIGABRT"),
        (SEARCH, "raise RuntimeError('planted')\n", "RuntimeError: planted"),
    ],
)
def test_trouble_is_named_and_keeps_nothing(run, search, process, words):
    before = Choices(slots=7)
    tuned.save(before)
    report, said = run(search, process)
    assert report["failed"] == ["tuner"]
    assert words in " ".join(said.split())
    assert tuned.load().choices == before


def test_an_unsteady_machine_is_not_begun_with(run, monkeypatch):
    monkeypatch.setattr(steadiness, "disturbance", lambda: "this machine is hot")
    report, said = run("raise SystemExit('begun')")
    assert "stopped: this machine is hot" in said and "let it cool down" in " ".join(said.split())
    assert report["failed"] == ["tuner"]


def test_kernels_that_are_wrong_are_not_timed(run):
    report, said = run("raise SystemExit('begun')", works=False)
    assert "fail their self-check" in said and report["failed"] == ["tuner"]


def test_the_process_says_what_it_finds(capsys):
    """Runs interpreted kernels on a small layer."""
    case = Case(AttentionShape(4, 1, 64, 64), mx.float16, mx.float16, 16)
    layer = Layer(case, Tiles.for_layer(case.shape), context=256)
    once = replace(decode_rows.CHOICE, name="once", of_layer=False)
    small = {"copied": 2**12, "matrix": 8, "chain": 4}
    with kernel.using(metal_interpreter.metal_kernel), pytest.MonkeyPatch.context() as patch:
        facts = tuning.facts
        patch.setattr(tuning, "facts", lambda stopwatch: facts(stopwatch, **small))
        patch.setattr(tuning, "shares", lambda layer, stopwatch: [Share("one", 1, 1.0, None)])
        tuning.tune([layer, layer], Once(), None, [once])
        first = [
            reported
            for line in capsys.readouterr().out.splitlines()
            if (reported := child.parse_message(line))
        ]
        tuning.tune([layer], Once(), -1.0, [decode_rows.CHOICE])
        late = [
            reported
            for line in capsys.readouterr().out.splitlines()
            if (reported := child.parse_message(line))
        ]
    (chosen,) = (reported for reported in first if "chosen" in reported)
    assert chosen["kind"] is None and set(chosen["values"]) == {"decode_rows"}
    assert [reported["left"] for reported in first if "left" in reported] == [[]]
    (shares,) = (reported["shares"] for reported in first if "shares" in reported)
    assert shares == [{"name": "one", "moved": 1, "ours": 1.0, "mlx": None}]
    assert not any("chosen" in reported for reported in late)
    assert late[-1]["left"] == [f"tiles of drafts ({case})"]


@pytest.mark.parametrize("passed", ["recurrence", "gathered"])
def test_a_way_by_mlx_is_timed_where_the_self_check_found_it_right(passed, tmp_path):
    states = StateKind((2, 64, 4, 32), delta=True)
    case = Case(AttentionShape(4, 1, 64, 64), mx.float16, mx.float16, 16, states=states)
    known = Record(tmp_path)
    for name in ("recurrence", "gathered"):
        known.add_outcome(Outcome(name, case, name == passed))
    layer = tuning.layer_of(case, known)
    assert (layer.states, layer.gathered) == (passed == "recurrence", passed == "gathered")


def test_the_process_stops_where_the_machine_says_that_it_is_unsteady(monkeypatch):
    tuning.watch()
    monkeypatch.setattr(steadiness, "disturbance", lambda: "on battery")
    with pytest.raises(Unsteady, match="on battery"):
        tuning.watch()


@pytest.mark.skipif(mx.metal.is_available(), reason="has a Metal device")
@pytest.mark.parametrize(
    ("options", "device", "error"),
    [
        (["--tune"], "cpu", "doctor --tune times a Mac's GPU: run it on one"),
        (["--tune", "--full"], "metal", "doctor --tune times a Mac's GPU, and MLX finds none here"),
        (["--full"], "cpu", "doctor --full needs --tune"),
        (["--tune", "--quick", "--only", "kernels"], "cpu", "leave out --quick, --only"),
    ],
)
def test_without_a_gpu_one_error_says_so(monkeypatch, capsys, tmp_path, options, device, error):
    monkeypatch.setenv("VLLM_METAL_DEVICE", device)
    report = tmp_path / "report.json"
    assert main(["doctor", *options, "--report", str(report)]) == 1
    said = capsys.readouterr()
    assert error in said.err and len(said.err.strip().splitlines()) == 1 and not said.out
    assert not report.exists()


def test_a_process_for_one_value_says_its_windows():
    command = [sys.executable, "-m", "vllm_metal.cli.doctor.children.tuning"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MLX_")}
    result = subprocess.run(
        [*command, "--process", "dispatches"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    reported = [
        reported for line in result.stdout.splitlines() if (reported := child.parse_message(line))
    ]
    assert len(reported[-1].get("windows", [])) == 5 or "unsteady" in reported[-1]
