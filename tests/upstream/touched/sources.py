# SPDX-License-Identifier: Apache-2.0
"""Our sources, read: what they import of vLLM, their classes, and their annotations as types."""

from __future__ import annotations

import ast
import builtins
import collections
import collections.abc
import importlib.util
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from upstream.touched import vllm_types

from vllm_metal.vllm_patches import probe

#: Classes of vLLM's whose place ours take though they do not extend them, or whose objects a
#: protocol of ours describes.
STANDS_FOR = {
    "worker/worker.py:MetalWorker": f"{probe.GPU_WORKER}:Worker",
    "serving/deadline.py:Engine": "vllm.v1.engine.async_llm:AsyncLLM",
    "serving/deadline.py:_OutputProcessor": "vllm.v1.engine.output_processor:OutputProcessor",
}
PACKAGE = Path(__file__).parents[3] / "vllm_metal"


@dataclass(frozen=True)
class Named:
    """Something of vLLM's itself, by the name that the table has for it."""

    name: str  # "module:" or "module:name"
    value: Any

    @classmethod
    def find(cls, name: str) -> Named:
        return cls(name, probe.look_up(name))


@dataclass
class OwnClass:
    """A class of ours: vLLM's classes that it extends, and types of its attributes."""

    node: ast.ClassDef
    source: Source
    bases: tuple[type, ...] = ()
    attributes: dict[str, Any] = field(default_factory=dict)

    @property
    def stands_for(self) -> tuple[type, ...]:
        """The class of vLLM's whose place it takes, if any."""
        name = STANDS_FOR.get(f"{self.source.by}:{self.node.name}")
        return (probe.look_up(name),) if name else ()

    @property
    def is_protocol(self) -> bool:
        return any(ast.unparse(base) == "Protocol" for base in self.node.bases)

    def methods(self) -> dict[str, ast.FunctionDef]:
        """Returns the functions in the class by name."""
        return {node.name: node for node in self.node.body if isinstance(node, ast.FunctionDef)}


class Unknown:
    """A type that is neither vLLM's nor ours, with whatever an annotation looks for in it."""

    def __class_getitem__(cls, _: Any) -> type[Unknown]:
        return cls


class Source:
    """One file of ours."""

    def __init__(self, path: Path) -> None:
        self.by = str(path.relative_to(PACKAGE))
        self.module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        self.module = self.module.removesuffix(".__init__")
        self.tree = ast.parse(path.read_text())
        nodes = list(ast.walk(self.tree))
        #: What the file imports of vLLM, by local name.
        self.names = {local: Named.find(name) for node in nodes for local, name in _imported(node)}
        self.classes = {
            node.name: type(node.name, (), {"own": OwnClass(node, self)})
            for node in nodes
            if isinstance(node, ast.ClassDef)
        }
        self.functions = {
            node.name: (self, node) for node in nodes if isinstance(node, ast.FunctionDef)
        }

    def link(self, sources: dict[str, Source]) -> None:
        """Adds what the file imports of our other files, and finds the classes that ours extend."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and node.module in sources:
                other = sources[node.module]
                for alias in node.names:
                    local = alias.asname or alias.name
                    if alias.name in other.classes:
                        self.classes.setdefault(local, other.classes[alias.name])
                    elif alias.name in other.names:
                        self.names.setdefault(local, other.names[alias.name])
                    elif alias.name in other.functions:
                        self.functions.setdefault(local, other.functions[alias.name])

    def find_bases(self) -> None:
        """Finds vLLM's classes that ours extend; those of imported ones must be found before."""
        for kind in self.classes.values():
            own: OwnClass = kind.own
            if own.source is self:
                bases = [self.type(base) for base in own.node.bases]
                bases += own.stands_for if own.is_protocol else ()
                own.bases = tuple(cls for base in bases for cls in vllm_classes(base))

    def type(self, annotation: ast.expr | None) -> Any:
        """An annotation as a type, or None."""
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            annotation = ast.parse(annotation.value, mode="eval").body
        if annotation is None:
            return None
        known = {**vars(builtins), **vars(collections), **vars(collections.abc)}
        known |= {name: getattr(typing, name) for name in typing.__all__}
        known |= {name: found.value for name, found in self.names.items()} | self.classes
        names = {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)}
        try:
            return eval(
                ast.unparse(annotation), known | dict.fromkeys(names - known.keys(), Unknown)
            )
        except (AttributeError, TypeError):
            return None


def read_all() -> list[Source]:
    """Reads every file of the package."""
    sources = {source.module: source for source in map(Source, sorted(PACKAGE.rglob("*.py")))}
    for _ in range(2):  # a base may be another file's that extends a third's
        for source in sources.values():
            source.link(sources)
            source.find_bases()
    return list(sources.values())


def vllm_classes(kind: Any) -> Iterator[type]:
    """Classes of vLLM's that objects of a type may have; a class of ours has those it extends."""
    for part in vllm_types.alternatives(kind):
        if isinstance(part, type) and part.__module__.partition(".")[0] == "vllm":
            yield part
        elif own := getattr(part, "own", None):
            yield from own.bases


def _imported(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Names of vLLM's that a statement imports: local name, name in the table."""
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
        for alias in node.names:
            name = f"{node.module}:{alias.name}"
            module = f"{node.module}.{alias.name}:"
            yield alias.asname or alias.name, module if _is_there(module) else name
    elif isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name.split(".")[0] == "vllm":
                yield (alias.asname, f"{alias.name}:") if alias.asname else ("vllm", "vllm:")


def _is_there(name: str) -> bool:
    module = name.partition(":")[0]
    try:
        return bool(importlib.util.find_spec(module)) and probe.look_up(name) is not probe.MISSING
    except ModuleNotFoundError:
        return False
