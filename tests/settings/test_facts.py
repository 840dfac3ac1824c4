# SPDX-License-Identifier: Apache-2.0
"""Facts are alike in every process, and change with every source of the plugin."""

import enum
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from vllm_metal.settings import facts


@dataclass
class Spec:
    size: int
    extra: object = None


class Kind(enum.Enum):
    ONE = 1


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package in the place of the plugin's."""
    folder = tmp_path / "someplugin"
    (folder / "inner").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "inner" / "kernel.metal").write_text("kernel void one() {}")
    (folder / "notes.txt").write_text("of no account")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(facts, "PACKAGES", ("someplugin",))
    return folder


def write(text, *parts):
    def change(folder):
        path = folder.joinpath(*parts)
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)

    return change


@pytest.mark.parametrize(
    "change",
    [
        write("pass", "__init__.py"),
        write("kernel void two() {}", "inner", "kernel.metal"),
        write("", "another.py"),
        write("", "other", "__init__.py"),
        lambda folder: (folder / "inner").rename(folder / "renamed"),
    ],
)
def test_each_source_counts(package, change):
    before = facts.sources.__wrapped__()
    assert len(before) == 32
    change(package)
    assert facts.sources.__wrapped__() != before


def test_nothing_but_sources_counts(package):
    before = facts.sources.__wrapped__()
    (package / "notes.txt").write_text("changed")
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "one.pyc").write_bytes(b"code")
    assert facts.sources.__wrapped__() == before


def test_the_plugins_own_sources_are_found():
    files = [path for root in facts.roots() for path in root.rglob("*.py")]
    assert {"vllm_metal", "metal_kernels"} == {root.name for root in facts.roots()}
    assert Path(facts.__file__) in files


def test_of_files_says_nothing_of_where_they_lie(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "one.json").write_text("{}")
    first, second = (tmp_path / folder for folder in ("a", "b"))
    assert facts.of_files([(first / "one.json", first)]) == facts.of_files(
        [(second / "one.json", second)]
    )
    (second / "one.json").write_text("[]")
    assert facts.of_files([(first / "one.json", first)]) != facts.of_files(
        [(second / "one.json", second)]
    )


def test_a_package_that_is_not_there_has_no_version():
    found = facts.versions("mlx", "no-such-package")
    assert found["mlx"] and found["no-such-package"] is None


def test_plain_has_no_addresses_and_no_order_of_sets():
    class Opaque:
        pass

    value = {
        "spec": Spec(3, (1, {2.5})),
        "kind": Kind.ONE,
        "dtype": torch.bfloat16,
        "object": Opaque(),
        "class": Spec,
        "function": write,
        1: frozenset("ba"),
    }
    expected = {
        "spec": {"type": "Spec", "size": 3, "extra": [1, [2.5]]},
        "kind": "ONE",
        "dtype": "bfloat16",
        "object": f"{__name__}.{Opaque.__qualname__}",
        "class": f"{__name__}.Spec",
        "function": f"{__name__}.write",
        "1": ["a", "b"],
    }
    assert facts.plain(value) == expected
    assert facts.plain(Spec(3), no_fact=("extra",)) == {"type": "Spec", "size": 3}


@pytest.mark.more
def test_another_process_finds_the_same():
    code = (
        "from vllm_metal.settings import facts;"
        "print(facts.sources(), facts.digest({'a': {'x', 'y', 'z'}}))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert shown == [facts.sources(), facts.digest({"a": {"z", "y", "x"}})]
