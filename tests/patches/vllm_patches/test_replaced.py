# SPDX-License-Identifier: Apache-2.0
"""vLLM has every function that we replace, with the parameters that ours take.

mypy checks what our sources import, call and read; it does not see what `replace` names in a
string. Both run with a newer vLLM in .github/workflows/newest-vllm.yml.
"""

import ast
import importlib
import inspect
import re
from pathlib import Path
from typing import get_args

import pytest
from vllm.config import speculative

import vllm_metal
from vllm_metal.engine.spec_decode.registry import SPECULATIVE_METHODS
from vllm_metal.patches.vllm_patches.releases import TESTED_VLLM
from vllm_metal.settings.architectures import DROPPED_HEADS

ROOT = Path(vllm_metal.__file__).parent
REPLACING = "vllm_metal.patches.vllm_patches.replacing"
#: Replaced where a family's own class is known: it has the methods of its base.
LATER = {("model_info", "get_supported_mm_limits"), ("model_info", "get_mm_max_tokens_per_item")}


class Replacements(ast.NodeVisitor):
    """Finds calls of `replace` in a module, with their resolved arguments."""

    def __init__(self, path: Path) -> None:
        self.module = importlib.import_module(f"vllm_metal.patches.vllm_patches.{path.stem}")
        self.names = dict(vars(self.module))
        self.found, self.functions = [], {}
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
                self._import(node)
            elif isinstance(node, ast.Import):
                for each in node.names:
                    module = importlib.import_module(each.name)
                    self.names[each.asname or each.name] = module
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self.functions[node.name] = node.args
        self.loops = []
        self.visit(tree)

    def _import(self, node: ast.ImportFrom) -> None:
        module = importlib.import_module(node.module)
        for each in node.names:
            if not hasattr(module, each.name):
                importlib.import_module(f"{node.module}.{each.name}")
            self.names[each.asname or each.name] = getattr(module, each.name)

    def visit_For(self, node: ast.For) -> None:
        self.loops.append((node.target, node.iter))
        self.generic_visit(node)
        self.loops.pop()

    def values(self, node: ast.expr) -> list:
        """Returns an expression's possible values, one per value of a loop variable."""
        if isinstance(node, ast.Constant):
            return [node.value]
        if isinstance(node, ast.Attribute):
            return [getattr(of, node.attr) for of in self.values(node.value)]
        for target, over in self.loops:
            if isinstance(target, ast.Name) and target.id == node.id:
                if isinstance(over, ast.Tuple):
                    return [value for each in over.elts for value in self.values(each)]
                return list(self.names[over.id])
        return [self.names[node.id]]

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        if not (isinstance(node.func, ast.Name) and node.func.id == "replace"):
            return
        if getattr(self.names["replace"], "__module__", "") != REPLACING:
            return
        owner, name, ours = node.args
        if (self.module.__name__.rpartition(".")[2], getattr(name, "value", None)) in LATER:
            return
        takes = self.functions.get(ours.id) if isinstance(ours, ast.Name) else None
        self.found += [(of, each, takes) for of in self.values(owner) for each in self.values(name)]


def problem(owner, name: str, ours: ast.arguments | None) -> str | None:
    """Returns the mismatch between vLLM's function and ours, which takes it first."""
    try:
        theirs = inspect.getattr_static(owner, name)
    except AttributeError:
        return f"{owner} has no {name}"
    if ours is None:
        return None
    theirs = getattr(theirs, "__func__", theirs)
    parameters = list(inspect.signature(theirs).parameters.values())
    names = {p.name for p in parameters}
    num_theirs = sum(p.kind is not p.KEYWORD_ONLY for p in parameters)
    num_ours = len(ours.posonlyargs) + len(ours.args) - 1
    by_name = {
        each.arg
        for each, default in zip(ours.kwonlyargs, ours.kw_defaults, strict=True)
        if default is None
    }
    variable = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    fits = by_name <= names and (num_ours <= num_theirs or variable)
    others = len(names) - num_ours - len(by_name)
    if fits and (others <= 0 or ours.vararg or ours.kwarg):
        return None
    return f"{owner}.{name} takes {sorted(names)}, ours {num_ours} and {sorted(by_name)}"


@pytest.mark.parametrize(
    "path", sorted((ROOT / "patches" / "vllm_patches").glob("*.py")), ids=lambda p: p.stem
)
def test_vllm_has_what_is_replaced(path):
    source = path.read_text()
    if "import replace\n" not in source:
        return
    found = Replacements(path).found
    assert len(found) >= source.count("    replace(") - len(LATER)
    assert not [told for each in found if (told := problem(*each))]


def test_each_change_says_when_to_remove_it():
    """It also names the release that was read, and docs/compatibility.md lists its module."""
    changing, noted = set(), {}
    for path in (ROOT / "patches" / "vllm_patches").glob("*.py"):
        lines = path.read_text().splitlines()
        comments = " ".join(line.removeprefix("# ") for line in lines if line.startswith("# "))
        if note := re.search(r"Remove when [^.]+\. Read against vLLM (\d+\.\d+)\.", comments):
            noted[path.stem] = note[1]
        if any(line.endswith("import replace") for line in lines):
            changing.add(path.stem)
    assert changing <= noted.keys()
    page = (ROOT.parent / "docs" / "compatibility.md").read_text()
    table = page.partition("| Module | What")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == noted.keys()
    assert {*noted.values()} <= {TESTED_VLLM}  # else read it anew, and say so


def test_vllm_knows_the_methods_of_speculation():
    known = {*get_args(speculative.SpeculativeMethod), *DROPPED_HEADS}
    known |= {each for kind in get_args(speculative.SpeculativeMethod) for each in get_args(kind)}
    assert set(SPECULATIVE_METHODS) <= known
