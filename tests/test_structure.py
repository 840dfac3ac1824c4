# SPDX-License-Identifier: Apache-2.0
"""Imports follow the order of the folders; files and numbers on pages exist."""

import re
from pathlib import Path

import import_rules
import pytest
from import_rules import Tree

from vllm_metal.identity import facts

ROOT = Path(__file__).parents[1]
TREE = Tree(ROOT)
#: Private names of others' that a name of ours equals, and whose they are.
NOT_OURS = {
    "_jobs": "vLLM's scheduler of offloading",
    "_format_exception": "vLLM's client of an engine",
    "_validate_spec_decode": "vLLM's SamplingParams",
    "_value": "a counter of prometheus_client",
}


def test_every_module_is_in_a_listed_folder():
    assert import_rules.misplaced(TREE) == []


def test_the_page_has_the_folders_in_their_order():
    page = (ROOT / "docs" / "structure.md").read_text().partition("\n## Folders, lowest first\n")[2]
    listed = re.findall(r"^\| `([\w/]+)` \|", page.partition("\n## ")[0], re.MULTILINE)
    assert listed == [floor.removeprefix("vllm_metal/") for floor in import_rules.FLOORS]


def test_no_import_goes_up():
    """Covers imports in modules, in functions and for types alone."""
    assert [str(item) for item in import_rules.upward(TREE)] == []


def test_no_two_floors_and_no_two_modules_import_each_other():
    assert import_rules.cycles(TREE) == []


def test_folders_that_leave_others_alone_do():
    """The server's part does not import the engine, and patches change the hosts alone."""
    assert import_rules.never(TREE) == []


def test_nothing_private_is_used_on_another_floor():
    assert import_rules.private_reaches(TREE) == []


def test_no_test_uses_a_private_name():
    found = import_rules.private_in_tests(TREE)
    found = [use for use in found if use.split(".")[-1].split()[-1] not in NOT_OURS]
    assert found == []


def test_a_plan_has_a_type():
    assert import_rules.untyped_plans(TREE) == []


@pytest.mark.parametrize("left_out", [facts.NOT_IN_ENGINE, facts.NOT_IN_ANSWERS])
def test_what_a_digest_of_the_code_leaves_out_is_not_used_by_what_it_has(left_out):
    """Neither by import nor by name: only `vllm_metal/__init__.py` names the platform."""
    assert import_rules.uses(TREE, left_out) == []


@pytest.mark.parametrize(
    ("package", "unknown"),
    [
        ("metal_kernels", ("vllm", "vllm_metal")),
        ("metal_interpreter", ("vllm", "vllm_metal")),
    ],
)
def test_a_package_that_stands_alone_knows_nothing_of_the_others(package, unknown):
    assert import_rules.knowing(TREE, package, unknown) == []


@pytest.mark.parametrize("name", ["structure.md", "design.md", "testing.md"])
def test_other_files_named_on_the_page_exist(name):
    page = (ROOT / "docs" / name).read_text()
    for name in re.findall(r"`([\w./-]+/[\w.-]+\.(?:py|sh|txt|md))`", page):
        assert (ROOT / name).exists(), name


def test_constants_are_defined_where_the_page_says():
    page = (ROOT / "docs" / "design.md").read_text()
    section = page.partition("\n## Where constants are defined\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| .+? \| (`.+?) \| (`.+?) \|$", section, re.MULTILINE)
    assert len(rows) > 10
    for files, names in rows:
        texts = [(ROOT / file).read_text() for file in re.findall(r"`([^`]+)`", files)]
        for name in re.findall(r"`([^`]+)`", names):
            there = rf"^(class )?{name}\b"
            assert any(re.search(there, text, re.MULTILINE) for text in texts), (name, files)


#: A small checkout that keeps the rules: two floors of the plugin above the kernels.
SOUND = {
    "metal_kernels/op.py": "from . import op",
    "vllm_metal/__init__.py": "def register():\n    from vllm_metal.upper import top",
    "vllm_metal/lower/__init__.py": "from vllm_metal.lower.base import _own",
    "vllm_metal/lower/base.py": "import metal_kernels.op\n_own = 1\nclass Base:\n    _inner = 2",
    "vllm_metal/lower/other.py": "from vllm_metal.lower import base",
    "vllm_metal/upper/__init__.py": "",
    "vllm_metal/upper/top.py": "from vllm_metal.lower.base import Base\nclass Top:\n    _mine = 3\n"
    "    def plan(self, plan: int) -> Base:\n        return self._mine",
    "tests/test_top.py": "import json\nclass Double:\n    def f(self):\n        self._mine = 1\n"
    "def test_it(other):\n    assert Double()._mine == other._theirs\n"
    "    setattr(json, '_other', getattr(other, 'mine'))",
}
FLOORS = ("metal_kernels", "vllm_metal/lower", "vllm_metal/upper")


def checkout(root, changes):
    for name, text in (SOUND | changes).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return Tree(root, FLOORS)


RULES = (
    import_rules.misplaced,
    import_rules.upward,
    import_rules.cycles,
    import_rules.private_reaches,
    import_rules.private_in_tests,
    import_rules.untyped_plans,
)
BASE, TOP = "vllm_metal/lower/base.py", "vllm_metal/upper/top.py"
TEST = "tests/test_top.py"
#: A fault, the file that has it, and the rules that it breaks.
FAULTS = {
    "import above": (BASE, "import vllm_metal.upper.top", "upward cycles"),
    "a package above": (BASE, "from vllm_metal import upper", "upward cycles"),
    "in a function": (BASE, "def f():\n    from vllm_metal.upper import top", "upward"),
    "in a method": (
        BASE,
        "class C:\n    def f(self):\n        import vllm_metal.upper.top",
        "upward",
    ),
    "for types": (
        BASE,
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import vllm_metal.upper.top",
        "upward cycles",
    ),
    "relative": (BASE, "from ..upper.top import Top", "upward cycles"),
    "a private name": (TOP, "from vllm_metal.lower.base import _own", "private_reaches"),
    "of a module": (TOP, "from vllm_metal.lower import base\nbase._own", "private_reaches"),
    "of an object": (TOP, "def f(base):\n    return base._inner", "private_reaches"),
    "a circle on a floor": (BASE, "from vllm_metal.lower import other", "cycles"),
    "a test's reach": (TEST, "def f(base):\n    return base._inner", "private_in_tests"),
    "a test's change": (TEST, "def f(base):\n    base._inner = 3", "private_in_tests"),
    "a test's import": (
        TEST,
        "from vllm_metal.lower.base import _own",
        "private_in_tests",
    ),
    "a test's patch": (TEST, "def f(base, m):\n    m.setattr(base, '_own', 2)", "private_in_tests"),
    "a patch by path": (
        TEST,
        "def f(m):\n    m.setattr('vllm_metal.lower.base._own', 2)",
        "private_in_tests",
    ),
    "an override": (
        TEST,
        "class C(Top):\n    def _mine(self):\n        super()._mine()",
        "private_in_tests",
    ),
    "a parameter": (TOP, "def f(plan: Any): ...", "untyped_plans"),
    "a field": (TOP, "class C:\n    trial: Any | None = None", "untyped_plans"),
    "a result": (TOP, "def plan() -> tuple[Any, int]: ...", "untyped_plans"),
    "a loose module": ("vllm_metal/loose.py", "", "misplaced"),
    "an unlisted folder": ("vllm_metal/new/room.py", "", "misplaced"),
}


def broken(tree):
    return [rule.__name__ for rule in RULES if rule(tree)]


def test_a_sound_checkout_breaks_no_rule(tmp_path):
    assert broken(checkout(tmp_path, {})) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_breaks_its_rules(tmp_path, fault):
    file, text, rules = FAULTS[fault]
    before = SOUND.get(file, "")
    assert broken(checkout(tmp_path, {file: f"{before}\n{text}"})) == rules.split()


def test_a_floor_without_a_module_breaks_a_rule(tmp_path):
    tree = Tree(checkout(tmp_path, {}).root, (*FLOORS, "vllm_metal/empty"))
    assert broken(tree) == ["misplaced"]
