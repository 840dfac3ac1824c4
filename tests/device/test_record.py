# SPDX-License-Identifier: Apache-2.0
"""Results for this machine are available to later and concurrent processes."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import mlx.core as mx

from metal_kernels.paged_attention import AttentionShape
from metal_kernels.selfcheck import CHOICES, KERNELS, Case, Outcome
from vllm_metal.device import identity, record
from vllm_metal.device.record import Record

CASE = Case(AttentionShape(4, 2, 64, 64), mx.float16, mx.uint8, 16, window=100)
TIMES = {"metal": {"a": 2e-3}, "mlx": {"a": 1e-3}}


def test_outcomes_come_back_whole_for_any_case_of_the_layer(tmp_path: Path):
    kept = Record(tmp_path)
    found = [
        Outcome("kv_write", CASE, True, largest_error=0.5, tolerance=1.0),
        Outcome("decode", CASE, False, "wrong", rows=8, log="whole"),
        Outcome("prefill_way", CASE, True, times=TIMES),
    ]
    for outcome in found:
        kept.add_outcome(outcome)
    server = replace(CASE, kernels=("kv_write", "decode", *CHOICES))
    of_server = Record(tmp_path).outcomes([server])
    assert of_server == [replace(outcome, case=server) for outcome in found]
    assert Record(tmp_path).outcomes([CASE]) == found[:2]  # asks for no choice
    assert CASE.kernels == KERNELS
    assert Record(tmp_path).outcomes([replace(CASE, block_size=32)]) == []


def test_the_last_row_on_a_subject_counts(tmp_path: Path):
    kept = Record(tmp_path)
    for ok in (True, False):
        kept.add_outcome(Outcome("kv_write", CASE, ok))
    assert [outcome.ok for outcome in kept.outcomes([CASE])] == [False]


def test_what_was_cut_off_or_is_not_known_costs_itself_only(tmp_path: Path):
    kept = Record(tmp_path)
    kept.add_outcome(Outcome("kv_write", CASE, True))
    (path,) = tmp_path.glob("*.jsonl")
    whole = path.read_text()
    with path.open("a") as file:
        file.write('{"outcome": {"kernel": "decode"}}\n[]\n{"later": {"kind": 1}}\n')
        file.write(whole.strip()[:50])  # a process ended here
    kept.add_outcome(Outcome("kv_blocks", CASE, True))
    assert [outcome.kernel for outcome in kept.outcomes([CASE])] == ["kv_write", "kv_blocks"]
    assert list(kept.rows("later")) == [{"kind": 1}]


def test_processes_write_at_once(tmp_path: Path):
    text = (
        "import sys\nfrom pathlib import Path\nfrom vllm_metal.device.record import Record\n"
        "kept = Record(Path(sys.argv[1]))\n"
        "for number in range(60): kept.add(sys.argv[2], {'number': number, 'long': 'x' * 3000})\n"
    )
    processes = [subprocess.Popen([sys.executable, "-c", text, tmp_path, kind]) for kind in "ab"]
    assert [process.wait() for process in processes] == [0, 0]
    for kind in "ab":
        assert [row["number"] for row in Record(tmp_path).rows(kind)] == list(range(60))


def test_another_mlx_knows_nothing_and_old_records_are_deleted(tmp_path: Path, monkeypatch):
    former = tmp_path / "0123.json"
    former.write_text(json.dumps({"format": 2, "outcomes": []}))
    kept = Record(tmp_path)
    kept.add_served([CASE])
    kept.add_outcome(Outcome("kv_write", CASE, True))
    assert not former.exists()
    (path,) = tmp_path.glob("*.jsonl")
    monkeypatch.setattr(identity, "version", lambda package: "99.0")
    other = Record(tmp_path)
    assert other.outcomes([CASE]) == []
    assert record.served(tmp_path) == [CASE]  # models stay the same
    month = time.time() - 31 * 86400
    os.utime(path, (month, month))
    other.add_served([CASE])
    assert not path.exists() and record.served(tmp_path) == [CASE]


def test_a_folder_that_cannot_be_written_keeps_nothing(tmp_path: Path):
    (tmp_path / "file").touch()
    kept = Record(tmp_path / "file" / "results")
    kept.add_outcome(Outcome("kv_write", CASE, True))
    assert kept.outcomes([CASE]) == []
    kept.forget()
