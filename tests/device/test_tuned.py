# SPDX-License-Identifier: Apache-2.0
"""Tuned settings are read once, before MLX; errors cost a log line and use defaults."""

import json
import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
from mac import tell_numbers

from vllm_metal.device import gpu_cores, identity, tuned
from vllm_metal.device.tuned import Choices

KIND = "32/8 heads of 128, bfloat16, bfloat16 cache in blocks of 16"
CHOSEN = Choices(
    dispatches=500,
    part_cost=48,
    slots=120,
    decode_rows={KIND: 32},
    shared={KIND: 9000, "another": None},
    long_prompt={KIND: 256, "another": None},
    prompt_rows={KIND: {"1024": 64, "8192": None}},
    force_fused={KIND: False},
)
BY_FAMILY = Choices(dispatches=84)


@pytest.fixture(autouse=True)
def an_m3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    tell_numbers(monkeypatch, {"machdep.cpu.brand_string": b"Apple M3 Max\0"})
    monkeypatch.setattr(gpu_cores, "count", lambda: 40)


def written(folder: Path) -> Path:
    (path,) = folder.glob("*.json")
    return path


def test_what_is_kept_comes_back_whole(tmp_path):
    path = tuned.save(CHOSEN, {"facts": {"copy": 1.0}, "timings": []}, tmp_path)
    assert path == written(tmp_path)
    assert tuned.load(tmp_path) == tuned.Loaded(CHOSEN)
    assert json.loads(path.read_text())["facts"] == {"copy": 1.0}
    # A field that is not kept would be lost.
    assert all(getattr(CHOSEN, one.name) != getattr(Choices(), one.name) for one in fields(Choices))


def test_choices_do_not_change_once_they_are_read():
    with pytest.raises(AttributeError):
        CHOSEN.slots = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("chip", "dispatches"),
    [
        ("Apple M1", 84),
        ("Apple M1 Ultra", 84),
        ("Apple M4 Pro", 84),
        ("Apple M5", None),
        ("Apple M12", None),
        ("Intel(R) Core(TM) i9", None),
        (None, None),
    ],
)
def test_without_a_file_the_chips_family_decides(chip, dispatches):
    assert tuned.defaults(chip) == Choices(dispatches=dispatches)


def test_without_a_file_nothing_is_slower_to_start(monkeypatch, tmp_path):
    """No source is read and no process is started."""
    for module, name in ((identity, "software"), (gpu_cores, "count")):
        monkeypatch.setattr(module, name, lambda: pytest.fail("asked without a file"))
    assert tuned.load(tmp_path) == tuned.Loaded(BY_FAMILY)
    assert not list(tmp_path.iterdir())


def change(path: Path, **changed: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


def other_key(path: Path, **changed: object) -> None:
    change(path, key=json.loads(path.read_text())["key"] | changed)


SPOILED = {
    "empty": (lambda path: path.write_text(""), "is broken"),
    "cut off": (lambda path: path.write_text(path.read_text()[:-20]), "is broken"),
    "bytes": (lambda path: path.write_bytes(b"\xff\xfe\x00"), "cannot be read"),
    "a list": (lambda path: path.write_text("[]"), "is broken"),
    "no key": (lambda path: path.write_text("{}"), "is broken"),
    "a wrong value": (lambda path: change(path, choices={"slots": -3}), "-3 is not a positive"),
    "a wrong type": (lambda path: change(path, choices={"slots": True}), "True is not a positive"),
    "no layers": (lambda path: change(path, choices={"decode_rows": [32]}), "is not an object"),
    "no contexts": (lambda path: change(path, choices={"prompt_rows": {KIND: {}}}), "no contexts"),
    "a context in words": (
        lambda path: change(path, choices={"prompt_rows": {KIND: {"8k": 64}}}),
        "no contexts",
    ),
    "rows as a choice": (
        lambda path: change(path, choices={"force_fused": {KIND: 1}}),
        "1 is neither true nor false",
    ),
    "a later choice": (lambda path: change(path, choices={"flat": 1}), "unknown settings: flat"),
    "choices gone": (lambda path: change(path, choices=None), "is broken"),
    "another chip": (lambda path: other_key(path, chip="Apple M1"), "with another chip;"),
    "more cores": (lambda path: other_key(path, **{"GPU cores": 30}), "with another GPU cores;"),
    "an older MLX": (lambda path: other_key(path, mlx="0.1", sources="x"), "another mlx, sources;"),
    "an older format": (lambda path: other_key(path, format=0), "with another format;"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "cannot be read"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_broken_foreign_or_older_file_costs_one_line(name, tmp_path):
    spoil, why = SPOILED[name]
    spoil(tuned.save(CHOSEN, folder=tmp_path))
    loaded = tuned.load(tmp_path)
    assert loaded.choices == BY_FAMILY
    assert loaded.complaint is not None and "\n" not in loaded.complaint
    assert why in loaded.complaint and str(tmp_path) in loaded.complaint
    assert "doctor --tune` again" in loaded.complaint


def test_two_processes_may_write_at_once(tmp_path):
    """A concurrent reader finds one complete file."""
    text = (
        "import sys\nfrom pathlib import Path\nfrom vllm_metal.device import tuned\n"
        "choices = tuned.Choices(slots=int(sys.argv[2]), decode_rows={'x' * 9000: 8})\n"
        "for _ in range(20): tuned.save(choices, folder=Path(sys.argv[1]))\n"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", text, tmp_path, slots]) for slots in ("11", "22")
    ]
    seen = set()
    while any(process.poll() is None for process in processes):
        if (tmp_path / "choices.json").exists():
            found = json.loads((tmp_path / "choices.json").read_text())["choices"]
            assert len(found["decode_rows"]) == 1
            seen.add(found["slots"])
    assert [process.wait() for process in processes] == [0, 0]
    assert seen <= {11, 22} and seen
    assert [path.name for path in tmp_path.iterdir()] == ["choices.json"]


def test_the_plugins_entry_point_applies_it_before_mlx(tmp_path, monkeypatch):
    monkeypatch.undo()
    folder = tmp_path / "tuned"
    told = "print(os.environ.get('MLX_MAX_OPS_PER_BUFFER'), 'mlx' in sys.modules)"
    script = f"import os, sys, vllm_metal\nvllm_metal.register()\n{told}"

    def alone(**variables: str) -> str:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("MLX_")}
        environment |= {"VLLM_METAL_DEVICE": "metal", "VLLM_METAL_CACHE": str(tmp_path)}
        command = [sys.executable, "-c", script]
        options = {"capture_output": True, "text": True, "check": True}
        return subprocess.run(command, env=environment | variables, **options).stdout.strip()

    assert alone() == "None False"
    tuned.save(replace(CHOSEN, dispatches=123), folder=folder)
    assert alone() == "123 False"
    assert alone(MLX_MAX_OPS_PER_BUFFER="77") == "77 False"
    assert alone(VLLM_METAL_DEVICE="cpu") == "None False"
    written(folder).write_text("broken")
    assert alone() == "None False"
