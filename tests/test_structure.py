# SPDX-License-Identifier: Apache-2.0
"""docs/structure.md lists every module, and imports follow its order."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: Packages, and the folders that hold them.
PACKAGES = {
    "vllm_metal": ROOT,
    "metal_kernels": ROOT,
    "metal_interpreter": ROOT / "interpreter",
}


def groups():
    """Module files by group, lowest group first, as the page lists them."""
    found, current = [], None
    for line in (ROOT / "docs" / "structure.md").read_text().splitlines():
        if line.startswith("**"):
            current = []
            found.append(current)
        elif line.startswith("## "):
            current = None
        elif current is not None and (listed := re.match(r"- `([^`]+\.py)` — ", line)):
            current.append(listed.group(1))
    return found


def module_files():
    return sorted(
        str(path.relative_to(ROOT))
        for package, folder in PACKAGES.items()
        for path in (folder / package).rglob("*.py")
        if path.name != "__init__.py"
    )


def imports(file):
    """Our own modules that a file imports when it is imported, as files."""
    tree = ast.parse((ROOT / file).read_text())
    nodes = list(tree.body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                folders = Path(file).parent.parts[file.startswith("interpreter/") :]
                parts = folders[: len(folders) - node.level + 1]
                base = ".".join([*parts, *filter(None, [node.module])])
            yield from resolve(base, [alias.name for alias in node.names])
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield from resolve(alias.name, [])


def resolve(module, names):
    if (package := module.split(".")[0]) not in PACKAGES:
        return
    path = PACKAGES[package] / Path(*module.split("."))
    if path.with_suffix(".py").exists():
        yield str(path.with_suffix(".py").relative_to(ROOT))
        return
    for name in names:
        if (path / f"{name}.py").exists():
            yield str((path / f"{name}.py").relative_to(ROOT))


def test_every_module_is_listed_once_and_exists():
    listed = sorted(file for group in groups() for file in group)
    assert listed == module_files()


def test_imports_go_to_the_same_group_or_a_lower_one():
    rank = {file: index for index, group in enumerate(groups()) for file in group}
    for file in module_files():
        for imported in imports(file):
            assert rank[imported] <= rank[file], f"{file} imports {imported}"


def test_the_kernels_know_nothing_of_the_plugin_or_of_vllm():
    for path in (ROOT / "metal_kernels").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not any(name.split(".")[0] in ("vllm", "vllm_metal") for name in names), path


def test_other_files_named_on_the_page_exist():
    page = (ROOT / "docs" / "structure.md").read_text()
    for name in re.findall(r"`([\w./-]+/[\w.-]+\.(?:py|sh|txt|md))`", page):
        assert (ROOT / name).exists(), name
