# SPDX-License-Identifier: Apache-2.0
"""Reads configuration classes as text: their fields, defaults and aliases of keys."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

#: A parameter with a default in a configuration class's `__init__`.
_PARAMETER = re.compile(r"^ {4,}(\w+)(?:\s*:[^=\n]+)?\s*=\s*([^=\n]+?),?\s*$", re.MULTILINE)
#: The class of a text model within a multimodal one: until transformers 5.19, and since 5.20.
_TEXT_CLASS = re.compile(
    r"""self\.text_config = (\w+)\(\*\*self\.text_config\)|"""
    r"""["']text_config["']: SubConfigSpec\(\s*config_class=(\w+)"""
)
#: Attributes of a multimodal class that map keys to configurations: until 5.19, and since.
_PARTS = ("sub_configs", "sub_configs_defaults")
#: A condition in classes that have their own default for absent RoPE parameters.
ROPE_IS_ABSENT = "self.rope_parameters is None"
#: Stands for a value that is not a literal.
MISSING = object()


def parameters(text: str) -> dict[str, Any]:
    """Returns the defaults of parameters in the text of an older configuration file or class."""
    found: dict[str, Any] = {}
    for key, default in _PARAMETER.findall(text):
        if (value := literal(default)) is not MISSING:
            found.setdefault(key, value)
    return found


def classes_of(path: Path, model_type: str) -> Iterator[ast.ClassDef]:
    """Yields the configuration class of a model_type and its base classes in the same file.

    An empty model_type stands for the text model within a multimodal one.
    """
    classes = _classes_in(path)
    if model_type:
        named = {n for n, node in classes.items() if assigned(node).get("model_type") == model_type}
    else:
        found = _TEXT_CLASS.findall(path.read_text(encoding="utf-8"))
        named = {name for names in found for name in names}
    for name, node in classes.items():
        if name in named:
            yield from _ancestry(node, classes)


@functools.cache
def _classes_in(path: Path) -> dict[str, ast.ClassDef]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def assigned(node: ast.ClassDef) -> dict[str, Any]:
    """Returns a class's attributes with literal values."""
    return {
        target.id: value
        for each in node.body
        if isinstance(each, ast.Assign) and (value := _constant(each.value)) is not MISSING
        for target in each.targets
        if isinstance(target, ast.Name)
    }


def aliases(node: ast.ClassDef) -> dict[str, str]:
    """Maps aliases of keys to the names that the class declares."""
    return dict(assigned(node).get("attribute_map") or {})


def beside_text(node: ast.ClassDef) -> frozenset[str]:
    """Returns keys of a multimodal class's non-text configurations; empty for other classes."""
    keys: set[str] = set()
    for each in node.body:
        if isinstance(each, ast.Assign | ast.AnnAssign) and isinstance(each.value, ast.Dict):
            targets = each.targets if isinstance(each, ast.Assign) else [each.target]
            if any(isinstance(t, ast.Name) and t.id in _PARTS for t in targets):
                keys |= {str(k.value) for k in each.value.keys if isinstance(k, ast.Constant)}
    return frozenset(keys - {"text_config"} if "text_config" in keys else ())


def _ancestry(node: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> Iterator[ast.ClassDef]:
    yield node
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in classes:
            yield from _ancestry(classes[base.id], classes)


def fields(node: ast.ClassDef) -> Iterator[tuple[str, Any]]:
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and each.value:
            value = _constant(each.value)
            if value is not MISSING:
                yield each.target.id, value


def overwritten(node: ast.ClassDef) -> frozenset[str]:
    """Returns keys that the class always computes from other keys, ignoring config.json."""
    found = set()
    for each in _post_init(node):
        target = each.targets[0] if isinstance(each, ast.Assign) else None
        if not isinstance(target, ast.Attribute) or not isinstance(each, ast.Assign):
            continue
        parts = list(ast.walk(each.value))
        names = {part.id for part in parts if isinstance(part, ast.Name)}
        read = {part.attr for part in parts if isinstance(part, ast.Attribute)}
        if names <= {"self", "int", "float"} and target.attr not in read:
            found.add(target.attr)
    return frozenset(found)


def absent_rope(node: ast.ClassDef) -> dict[str, Any] | None:
    """Returns the class's default for absent `rope_parameters`; None if it is not a literal."""
    literals: dict[str, ast.expr] = {}
    for each in _post_init(node):
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and each.value:
            literals[each.target.id] = each.value
        elif isinstance(each, ast.If) and ast.unparse(each.test) == ROPE_IS_ABSENT:
            first = each.body[0]
            value: Any = first.value if isinstance(first, ast.Assign) else None
            if isinstance(value, ast.Name):
                value = literals.get(value.id)
            return _entries(value) if isinstance(value, ast.Dict) else None
    return None


def _entries(node: ast.Dict) -> dict[str, Any] | None:
    """Returns a mapping's literal entries, skipping copies of keys; None if others remain."""
    found: dict[str, Any] = {}
    for key, value in zip(node.keys, node.values, strict=True):
        name = key.value if isinstance(key, ast.Constant) else None
        if isinstance(value, ast.Attribute) and value.attr == name:
            continue
        if (constant := _constant(value)) is MISSING or name is None:
            return None
        found[str(name)] = constant
    return found


def _post_init(node: ast.ClassDef) -> list[ast.stmt]:
    methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
    return [line for each in methods if each.name == "__post_init__" for line in each.body]


def _constant(node: ast.expr) -> Any:
    """Returns the value of a literal, or the `default` argument of a call such as a validator."""
    if isinstance(node, ast.Call):
        for keyword in node.keywords:
            if keyword.arg == "default":
                return _constant(keyword.value)
        return MISSING
    try:
        return ast.literal_eval(node)
    except ValueError:
        return MISSING


def literal(text: str) -> Any:
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError):
        return MISSING


def same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)
