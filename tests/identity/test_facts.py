# SPDX-License-Identifier: Apache-2.0
"""Facts are equal in every process, and change with every source file."""

import enum
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from vllm_metal.identity import facts

CODE = '''"""One."""


def code():  # why
    """One.

    More.
    """
    text = """ not one

  blank line"""
    if text:
        return 1
    "a string alone"
    return 3
'''


@dataclass
class Spec:
    size: int
    extra: object = None


class Kind(enum.Enum):
    ONE = 1


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Replaces the plugin's package."""
    folder = tmp_path / "someplugin"
    (folder / "inner").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "inner" / "kernel.metal").write_text("kernel void one() {}")
    (folder / "code.py").write_text(CODE)
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


def sources(*left_out):
    """Returns the digest of the current source files."""
    return facts.sources.__wrapped__(left_out)


@pytest.mark.parametrize(
    "change",
    [
        write("pass", "__init__.py"),
        write("kernel void two() {}", "inner", "kernel.metal"),
        write("", "another.py"),
        write("", "other", "__init__.py"),
        write(CODE.replace("return 1", "return 2"), "code.py"),
        write(CODE.replace("not one", "another"), "code.py"),
        write(CODE.replace("\n\n  b", "\n  b"), "code.py"),
        write(CODE.replace("        return", "    return"), "code.py"),
        lambda folder: (folder / "inner").rename(folder / "renamed"),
    ],
)
def test_each_statement_counts(package, change):
    before = sources()
    assert len(before) == 32
    change(package)
    assert sources() != before


@pytest.mark.parametrize(
    "change",
    [
        write("changed", "notes.txt"),
        write("code", "__pycache__", "one.pyc"),
        write("// one\nkernel /* two */void one() {}", "inner", "kernel.metal"),
        write(CODE.replace("# why", "# another reason"), "code.py"),
        write(CODE.replace("  # why", ""), "code.py"),
        write(CODE.replace("One.", "Another\n\n    word."), "code.py"),
        write("# first\n\n\n" + CODE, "code.py"),
    ],
)
def test_comments_docstrings_and_other_files_do_not(package, change):
    before = sources()
    change(package)
    if (kernel := package / "inner" / "kernel.metal").read_text().startswith("//"):
        kernel.write_text(kernel.read_text().replace("// one\n", "").replace("/* two */", "/**/"))
    assert sources() == before


ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("module", "engine", "answers"),
    [
        ("vllm_metal/engine/attention/layers.py", True, True),
        ("vllm_metal/engine/sample/sampler.py", True, True),
        ("vllm_metal/patches/vllm_patches/scheduler.py", True, True),
        ("vllm_metal/kv_transfer/disk/layout.py", True, True),
        ("metal_kernels/layout.py", True, True),
        ("vllm_metal/platform/metal_platform.py", False, True),
        ("vllm_metal/serving/parsers/thinking.py", False, True),
        ("vllm_metal/cli/chat/page.py", False, False),
    ],
)
def test_which_module_counts_for_what(tmp_path, monkeypatch, module, engine, answers):
    """Adds a statement or a comment."""
    for package in facts.PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=only_code(module))
    monkeypatch.setattr(facts, "roots", lambda: [tmp_path / name for name in facts.PACKAGES])
    kinds = (facts.NOT_IN_ENGINE, facts.NOT_IN_ANSWERS)
    before = [sources(*kind) for kind in kinds]
    file = tmp_path / module
    file.write_text(file.read_text() + "\n# a comment\n")
    assert [sources(*kind) for kind in kinds] == before
    file.write_text(file.read_text() + "\n_ONE = 1\n")
    found = [sources(*kind) != old for kind, old in zip(kinds, before, strict=True)]
    assert found == [engine, answers]


def only_code(module):
    """Removes all but one module, for a quick copy."""
    kept = {module, *(str(parent) for parent in Path(module).parents)}

    def ignored(folder, names):
        inside = Path(folder).relative_to(ROOT)
        return [name for name in names if str(inside / name) not in kept]

    return ignored


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
        "from vllm_metal.identity import facts;"
        "print(facts.sources(()), facts.digest({'a': {'x', 'y', 'z'}}))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert shown == [facts.sources(()), facts.digest({"a": {"z", "y", "x"}})]
