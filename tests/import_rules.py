# SPDX-License-Identifier: Apache-2.0
"""Finds imports that violate the order of the folders."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

#: Packages and their folders.
PACKAGES = {"vllm_metal": "", "metal_kernels": "", "metal_interpreter": "interpreter"}
#: Folders from the lowest up: a module imports only from its own and lower ones.
FLOORS = (
    "metal_kernels",
    "metal_kernels/selfcheck",
    "metal_kernels/tuner",
    "interpreter/metal_interpreter",
    *(
        f"vllm_metal/{room}"
        for room in (
            *("settings", "identity", "device"),
            *("patches/vllm_patches", "patches/mlx_patches", "metrics"),
            *(
                f"engine/{room}"
                for room in (
                    *("kv_cache", "recurrent", "attention", "sample", "batch", "weights"),
                    *("config_json", "models", "memory", "lora", "pooling", "vision"),
                    *("spec_decode", "distributed", "worker"),
                )
            ),
            *("kv_transfer", "serving", "platform", "cli"),
        )
    ),
)

#: Lower folders that a folder must not import, and exempted modules.
NEVER = {
    "vllm_metal/patches": (("vllm_metal/identity",), ()),
    "vllm_metal/serving": (("vllm_metal/engine", "vllm_metal/kv_transfer"), ()),
    "vllm_metal/cli": (
        ("vllm_metal/engine",),
        # They plan a model and test kernels; convert it; or find its folder.
        (
            *("vllm_metal/cli/fit/", "vllm_metal/cli/doctor/", "vllm_metal/cli/main.py"),
            *("vllm_metal/cli/early_checks.py", "vllm_metal/cli/launch/planning.py"),
            "vllm_metal/cli/chat/surroundings.py",
        ),
    ),
}


@dataclass(frozen=True)
class Import:
    """An import of one of our modules by another."""

    file: str
    imported: str  # a file
    name: str | None  # the imported name; None: the module
    when: str  # "import", "call" of a function, or only for "types"

    def __str__(self) -> str:
        return f"{self.file} imports {self.imported} ({self.when})"


@dataclass(frozen=True)
class Tree:
    """A checkout; files are named by their paths below it."""

    root: Path
    floors: tuple[str, ...] = FLOORS

    @cached_property
    def files(self) -> list[str]:
        """Returns all files of the packages."""
        return sorted(
            str(path.relative_to(self.root))
            for package, folder in PACKAGES.items()
            for path in (self.root / folder / package).rglob("*.py")
        )

    @cached_property
    def tests(self) -> list[str]:
        """Returns all files of the tests."""
        return sorted(str(path.relative_to(self.root)) for path in self.root.glob("tests/**/*.py"))

    def floor_of(self, file: str) -> str:
        """Returns the floor of a file's folder; without one (vllm_metal/__init__.py) the top."""
        within = [floor for floor in self.floors if file.startswith(f"{floor}/")]
        return max(within, key=len, default=self.floors[-1])

    @cached_property
    def imports(self) -> list[Import]:
        """Returns all imports between our modules."""
        return [found for file in self.files for found in self._imports_of(file)]

    @cached_property
    def _parsed(self) -> dict[str, ast.Module]:
        return {file: ast.parse((self.root / file).read_text()) for file in self.files}

    def parsed(self, file: str) -> ast.Module:
        return self._parsed.get(file) or ast.parse((self.root / file).read_text())

    def _imports_of(self, file: str) -> Iterator[Import]:
        for node, when in _placed(self.parsed(file), "import"):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if target := self._file(alias.name):
                        yield Import(file, target, None, when)
            elif isinstance(node, ast.ImportFrom):
                base = self._base(file, node)
                for alias in node.names:
                    if target := self._file(f"{base}.{alias.name}"):
                        yield Import(file, target, None, when)
                    elif target := self._file(base):
                        yield Import(file, target, alias.name, when)

    def _base(self, file: str, node: ast.ImportFrom) -> str:
        """Returns the module of a `from` import, with relative ones resolved."""
        if not node.level:
            return node.module or ""
        path = Path(file).relative_to("interpreter" if file.startswith("interpreter/") else "")
        parts = path.parent.parts[: len(path.parent.parts) - node.level + 1]
        return ".".join([*parts, *filter(None, [node.module])])

    def _file(self, module: str) -> str | None:
        """Returns the file of one of our modules; None for other modules."""
        if (package := module.split(".")[0]) not in PACKAGES:
            return None
        path = self.root / PACKAGES[package] / Path(*module.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.exists():
                return str(file.relative_to(self.root))
        return None


def _placed(node: ast.AST, when: str) -> Iterator[tuple[ast.AST, str]]:
    """Yields every statement below a node, and when it runs: import, call, or types only."""
    for child in ast.iter_child_nodes(node):
        inner = when
        if isinstance(child, ast.expr):
            continue
        if isinstance(child, ast.If) and _dotted(child.test).endswith("TYPE_CHECKING"):
            inner = "types"
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and when == "import":
            inner = "call"
        yield child, inner
        yield from _placed(child, inner)


def _dotted(node: ast.expr) -> str:
    """Returns a dotted name; anything but a name before a dot is empty."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def misplaced(tree: Tree) -> list[str]:
    """Returns modules outside every floor, and floors without a module."""
    homes = {file: [f for f in tree.floors if file.startswith(f"{f}/")] for file in tree.files}
    found = [
        f"{file} is in no folder of FLOORS"
        for file, within in homes.items()
        if not within and Path(file).name != "__init__.py"
    ]
    used = {floor for within in homes.values() for floor in within}
    return found + [f"{floor} has no module" for floor in tree.floors if floor not in used]


def upward(tree: Tree) -> list[Import]:
    """Returns imports of a module by one on a lower floor."""
    rank = {floor: place for place, floor in enumerate(tree.floors)}
    return [
        found
        for found in tree.imports
        if rank[tree.floor_of(found.imported)] > rank[tree.floor_of(found.file)]
    ]


def cycles(tree: Tree) -> list[str]:
    """Returns floors and modules that import each other at import or for types, also indirectly."""
    arrows = [found for found in tree.imports if found.when != "call"]
    floors = _circling((tree.floor_of(each.file), tree.floor_of(each.imported)) for each in arrows)
    modules = _circling((each.file, each.imported) for each in arrows)
    return [floor for floor in tree.floors if floor in floors] + sorted(modules)


def _circling(arrows: Iterable[tuple[str, str]]) -> set[str]:
    """Returns the nodes on cycles."""
    below = defaultdict(set)
    for above, lower in arrows:
        if above != lower:
            below[above].add(lower)

    def reached(start: str) -> set[str]:
        found, left = set(), [start]
        while left:
            new = below.get(left.pop(), set()) - found
            found |= new
            left += new
        return found

    return {each for each in below if each in reached(each)}


def private_reaches(tree: Tree) -> list[str]:
    """Returns private names, modules and attributes that are used on another floor."""
    owned = {file: _private_names(tree.parsed(file)) for file in tree.files}
    of_floor = defaultdict(set)
    for file, names in owned.items():
        of_floor[tree.floor_of(file)] |= names
    every = set().union(*owned.values())
    found = []
    for file in tree.files:
        floor = tree.floor_of(file)
        others = every - of_floor[floor]
        found += [
            f"{file} uses {ast.unparse(node)}"
            for node in ast.walk(tree.parsed(file))
            if isinstance(node, ast.Attribute) and node.attr in others
        ]
    for item in tree.imports:
        names = (item.name or "", Path(item.imported).stem)
        private = any(re.match(r"_[^_]", name) for name in names)
        if private and tree.floor_of(item.file) != tree.floor_of(item.imported):
            found.append(f"{item} {item.name}")
    return found


def _private_names(parsed: ast.Module) -> set[str]:
    """Returns names with one leading underscore that a module or its classes define."""
    found = set()
    for node in ast.walk(parsed):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            # Patches may set attributes of others' objects.
            found |= {node.attr} if _is_own(node.value) else set()
    return {name for name in found if re.match(r"_[^_]", name)}


def _is_own(owner: ast.expr) -> bool:
    return isinstance(owner, ast.Name) and owner.id in ("self", "cls")


def private_in_tests(tree: Tree) -> list[str]:
    """Returns private names of our packages that a test reads, sets or patches.

    A test's own class may have private names.
    """
    owned = set().union(*(_private_names(tree.parsed(file)) for file in tree.files))
    found = []
    for file in tree.tests:
        parsed = tree.parsed(file)
        theirs = owned - _private_names(parsed)
        for node in ast.walk(parsed):
            found += [f"{file}:{node.lineno} {name}" for name in _private_uses(node, owned, theirs)]
    return found


def _private_uses(node: ast.AST, owned: set[str], theirs: set[str]) -> list[str]:
    """Returns names of our packages that a test's node uses.

    Args:
        node: any node.
        owned: private names of our packages.
        theirs: the subset that the test's file does not define.
    """
    if isinstance(node, ast.Attribute):
        of_super = isinstance(node.value, ast.Call) and _dotted(node.value.func) == "super"
        others = owned if of_super else theirs
        return [ast.unparse(node)] if node.attr in others else []
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES:
        names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        return [name for name in names if re.match(r"_[^_]", name)]
    if isinstance(node, ast.Call) and re.search(
        r"(set|del|get|has)attr$|patch", _dotted(node.func)
    ):
        given = [each.value for each in node.args if isinstance(each, ast.Constant)]
        names = [name for name in given if isinstance(name, str) and re.fullmatch(r"[\w.]+", name)]
        return [name for name in names if set(name.split(".")) & owned]
    return []


def untyped_plans(tree: Tree) -> list[str]:
    """Returns parameters, fields and results named plan or trial with the type Any."""
    found = []
    for file in tree.files:
        for node in ast.walk(tree.parsed(file)):
            name, annotation = "", None
            if isinstance(node, ast.arg):
                name, annotation = node.arg, node.annotation
            elif isinstance(node, ast.AnnAssign):
                name, annotation = ast.unparse(node.target), node.annotation
            elif isinstance(node, ast.FunctionDef):
                name, annotation = node.name, node.returns
            named = re.search(r"(^|[._])(plan|trial)s?$", name)
            if named and annotation is not None and re.search(r"\bAny\b", ast.unparse(annotation)):
                found.append(f"{file}: {name}: {ast.unparse(annotation)}")
    return found


def knowing(tree: Tree, package: str, unknown: tuple[str, ...]) -> list[str]:
    """Returns a package's imports of packages that it must not depend on."""
    found = []
    for file in tree.files:
        if not file.startswith(f"{PACKAGES[package]}/{package}/".lstrip("/")):
            continue
        for node in ast.walk(tree.parsed(file)):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            found += [f"{file} imports {name}" for name in names if name.split(".")[0] in unknown]
    return found


def never(tree: Tree) -> list[str]:
    """Returns uses of a folder by one that must not import it."""
    return [
        use
        for folder, (others, excepted) in NEVER.items()
        for use in uses(tree, others, by=f"{folder}/")
        if not use.startswith(excepted)
    ]


def uses(tree: Tree, folders: tuple[str, ...], by: str = "") -> list[str]:
    """Returns uses of folders by modules outside of them, by import or module name.

    Skips the package's own module, vLLM's entry point, which names the platform.

    Args:
        tree: the checkout.
        folders: used folders.
        by: path prefixes of the files to search.
    """
    inside = tuple(f"{folder}/" for folder in folders)
    names = tuple(folder.replace("/", ".") for folder in folders)
    outside = {file for file in tree.files if file.startswith(by) and not file.startswith(inside)}
    outside -= {"vllm_metal/__init__.py"}
    found = [
        str(item)
        for item in tree.imports
        if item.file in outside and item.imported.startswith(inside)
    ]
    for file in sorted(outside):
        for node in ast.walk(tree.parsed(file)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found += [f"{file} names {node.value}"] if node.value.startswith(names) else []
    return found
