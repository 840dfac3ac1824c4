# SPDX-License-Identifier: Apache-2.0
"""What one file of ours uses of vLLM: follows types from one name to the next."""

from __future__ import annotations

import ast
import re
from collections import ChainMap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, get_args, get_origin

from upstream.touched import vllm_types
from upstream.touched.sources import Named, OwnClass, Source, vllm_classes
from upstream.touched.table import Table

from vllm_metal.vllm_patches import probe

_CONFIG = "vllm.config:VllmConfig"
_SCHEDULING = {
    "self": "vllm.v1.core.sched.scheduler:Scheduler",  # of a function in a method's place
    "scheduler": "vllm.v1.core.sched.scheduler:Scheduler",
    "request": "vllm.v1.request:Request",
    "session": "vllm.v1.request:Request",
    "output": "vllm.v1.engine:EngineCoreOutput",
}
#: Objects of vLLM's that our sources take as Any, by file and by the name that they have there.
UNTYPED = {
    "vllm_patches/scheduler.py": _SCHEDULING,
    "vllm_patches/step_budget.py": _SCHEDULING,
    "vllm_patches/streaming_sessions.py": _SCHEDULING,
}
_WHOLE = {"iter", "list", "reversed", "set", "sorted", "tuple"}  # their elements are the argument's
_ONE = {"max", "min", "next"}


@dataclass(frozen=True)
class Of:
    """An object of a type."""

    kind: Any


class Reader(ast.NodeVisitor):
    """Notes in a table what a file uses; types of our classes' attributes in the classes."""

    def __init__(self, source: Source, table: Table) -> None:
        self._source, self._table, self._by = source, table, source.by
        untyped = UNTYPED.get(source.by, {})
        self._untyped = {name: Named.find(full).value for name, full in untyped.items()}
        self._scope: ChainMap[str, Any] = ChainMap()
        self._own: type | None = None  # the class of ours that a method is read of
        self._owners: dict[str, type] = {}  # by our function that stands in a place

    def read(self) -> None:
        """Reads the file."""
        for node in ast.walk(self._source.tree):
            if isinstance(node, ast.Call) and _name(node.func) == "replace" and len(node.args) == 3:
                self._replace(node)
        self.visit(self._source.tree)

    # What is imported, extended and replaced.

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.split(".")[0] == "vllm":
                self._table.note(f"{alias.name}:", self._by)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if (node.module or "").split(".")[0] == "vllm":
            for alias in node.names:
                found = self._source.names[alias.asname or alias.name]
                self._table.note(found.name, self._by)

    def _replace(self, node: ast.Call) -> None:
        """`replace(owner, "name", ours)` of `vllm_patches.replacing`."""
        owner, name = self._find(node.args[0]), node.args[1]
        if not isinstance(owner, Named) or not isinstance(name, ast.Constant):
            return
        self._table.stand_in(_member(owner, name.value), self._by)
        if isinstance(owner.value, type):
            self._owners[_name(node.args[2])] = owner.value

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        before, self._own = self._own, self._source.classes[node.name]
        own: OwnClass = self._own.own  # type: ignore[attr-defined]
        for part in node.body:
            if not own.is_protocol:
                self._override(part, (*own.bases, *own.stands_for))
            if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                own.attributes[part.target.id] = self._source.type(part.annotation)
            elif isinstance(part, ast.FunctionDef) and _is_property(part):
                own.attributes[part.name] = self._source.type(part.returns)
        self.generic_visit(node)
        self._own = before

    def _override(self, part: ast.stmt, bases: Sequence[type]) -> None:
        """Notes what a class's statement takes the place of: in the first class that has it."""
        is_function = isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)
        targets = part.targets if isinstance(part, ast.Assign) else [getattr(part, "target", None)]
        names = [part.name] if is_function else [_name(target) for target in targets]
        for name in filter(None, names):
            for base in bases:
                if full := self._table.attribute(base, name, self._by):
                    if is_function:
                        self._table.stand_in(full, self._by)
                    break

    # Which object has which type.

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        before, self._scope = self._scope, self._scope.new_child()
        owner = self._owners.get(node.name)
        own, self._own = self._own, None
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        for place, argument in enumerate(arguments):
            kind = self._source.type(argument.annotation)
            if place == 0 and own is not None and argument.annotation is None:
                kind = own
            elif kind in (None, Any):
                in_place = owner if argument.arg == "self" else None
                kind = in_place or self._untyped.get(argument.arg)
            self._scope[argument.arg] = Of(kind)
        for part in [*node.decorator_list, *node.args.defaults, *node.body]:
            self.visit(part)
        self._scope, self._own = before, own

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        before, self._scope = self._scope, self._scope.new_child()
        for argument in node.args.args:
            self._scope[argument.arg] = Of(self._untyped.get(argument.arg))
        self.visit(node.body)
        self._scope = before

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self._bind(target, self._find(node.value), node.value)
            self.visit(target)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        kind, found = self._source.type(node.annotation), self._find(node.value)
        is_more = isinstance(found, Named) or (kind is Any and _tells(found))
        self._bind(node.target, found if is_more else Of(kind))
        self.generic_visit(node)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.visit(node.value)
        self._bind(node.target, self._find(node.value))

    def visit_For(self, node: ast.For | ast.AsyncFor | ast.comprehension) -> None:
        self.visit(node.iter)
        self._bind(node.target, Of(vllm_types.element(self._kind(node.iter))))
        for part in ast.iter_child_nodes(node):
            if part is not node.iter:
                self.visit(part)

    visit_AsyncFor = visit_comprehension = visit_For

    def _comprehension(self, node: Any) -> None:
        for part in node.generators:
            self.visit(part)
        self.generic_visit(node)

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _comprehension

    def _bind(self, target: ast.expr, found: Any, value: ast.expr | None = None) -> None:
        """Remembers what a name, or an attribute of an object of ours, stands for."""
        if isinstance(target, ast.Name):
            before = self._scope.get(target.id) or Of(self._untyped.get(target.id))
            self._scope[target.id] = found if _tells(found) else before
        elif isinstance(target, ast.Tuple):
            values = value.elts if isinstance(value, ast.Tuple) else [None] * len(target.elts)
            kinds = getattr(getattr(found, "kind", None), "__args__", ())
            for place, part in enumerate(target.elts):
                one = Of(kinds[place] if place < len(kinds) else None)
                each = values[place] if place < len(values) else None
                self._bind(part, self._find(each) if each is not None else one, each)
        elif isinstance(target, ast.Attribute):
            owner = self._find(target.value)
            own = getattr(getattr(owner, "kind", None), "own", None)
            if own is not None and isinstance(found, Of) and found.kind is not None:
                own.attributes.setdefault(target.attr, found.kind)
            if isinstance(owner, Named) and value is not None:
                self._table.stand_in(_member(owner, target.attr), self._by)

    # What is read and called.

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._find(node)
        self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        self._find(node)
        name = _name(node.func)
        if name in ("getattr", "setattr") and isinstance(node.args[1], ast.Constant):
            for cls in vllm_classes(self._kind(node.args[0])):
                full = self._table.attribute(cls, str(node.args[1].value), self._by)
                if full and name == "setattr":
                    self._table.stand_in(full, self._by)
        if name == "replace" and len(node.args) == 1:
            self._keywords(node, self._kind(node.args[0]))
        if name == "isinstance" and isinstance(of := self._find(node.args[1]), Named):
            self._bind(node.args[0], Of(of.value))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """Notes a path in vLLM's configuration that a string is."""
        if not re.fullmatch(r"\w+_config(\.\w+)*", str(node.value)):
            return
        kind: Any = Named.find(_CONFIG).value
        if node.value.split(".")[0] not in kind.__dataclass_fields__:
            return
        for part in node.value.split("."):
            for cls in vllm_classes(kind):
                self._table.attribute(cls, part, self._by)
            kind = next((vllm_types.of_attribute(c, part) for c in vllm_classes(kind)), None)

    def _kind(self, node: ast.expr) -> Any:
        found = self._find(node)
        if isinstance(found, Named):
            return type(found.value)
        return found.kind if isinstance(found, Of) else None

    def _find(self, node: ast.expr | None) -> Named | Of | None:
        """What an expression is, as far as it is vLLM's; notes the attributes on the way."""
        if isinstance(node, ast.Name):
            found = self._scope.get(node.id)
            return found if found is not None else self._source.names.get(node.id)
        if isinstance(node, ast.Attribute):
            return self._attribute(self._find(node.value), node.attr)
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.Subscript):
            return Of(vllm_types.item(self._kind(node.value)))
        if isinstance(node, ast.Await | ast.Starred | ast.NamedExpr):
            return self._find(node.value)
        if isinstance(node, ast.BoolOp | ast.IfExp):
            parts = node.values if isinstance(node, ast.BoolOp) else [node.body, node.orelse]
            return next((found for found in map(self._find, parts) if _tells(found)), None)
        if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp):
            for part in node.generators:
                self._bind(part.target, Of(vllm_types.element(self._kind(part.iter))))
            kind = self._kind(node.elt)
            return Of(list[kind]) if kind is not None else None
        return None

    def _attribute(self, owner: Named | Of | None, name: str) -> Named | Of | None:
        if isinstance(owner, Named) and not isinstance(owner.value, type):
            return self._of_named(owner, name)
        kind = owner.value if isinstance(owner, Named) else getattr(owner, "kind", None)
        found = None
        for cls in vllm_classes(kind):
            if self._table.attribute(cls, name, self._by):
                of = vllm_types.of_attribute(cls, name)
                is_value = isinstance(owner, Named) and isinstance(getattr(cls, name, None), cls)
                found = Of(cls if is_value else of)
        for part in vllm_types.alternatives(kind):
            if found is None and (own := getattr(part, "own", None)) is not None:
                found = Of(own.attributes.get(name))
        return found

    def _of_named(self, owner: Named, name: str) -> Named | Of | None:
        full = _member(owner, name)
        if isinstance(owner.value, ModuleType):
            if (value := probe.look_up(full)) is probe.MISSING:
                return None
            if isinstance(value, ModuleType):
                return Named(f"{value.__name__}:", value)
            self._table.note(full, self._by)
            return Named(full, value)
        if self._table.attribute(owner.name, name, self._by):
            return Of(vllm_types.of_attribute(type(owner.value), name))
        return None

    def _call(self, node: ast.Call) -> Of | None:
        name, first = _name(node.func), node.args[0] if node.args else None
        if name == "super" and self._scope.get("self"):
            return self._scope["self"]
        if name == "partial" and isinstance(made := self._find(first), Named):
            partial = ast.Call(first, [*node.args[1:], ast.Starred(first)], node.keywords)
            self._table.call(made.name, partial, self._by)
        if first is not None and name in _WHOLE:
            return Of(list[vllm_types.element(self._kind(first)) or Any])
        if first is not None and name in _ONE:
            return Of(vllm_types.element(self._kind(first)))
        if isinstance(node.func, ast.Attribute):
            return self._method(node, node.func)
        function = self._find(node.func)
        if isinstance(function, Named):
            self._table.call(function.name, node, self._by)
            made = function.value
            return Of(made if isinstance(made, type) else vllm_types.returned(made))
        for kind in vllm_types.alternatives(getattr(function, "kind", None)):
            if get_origin(kind) is Callable:
                return Of(get_args(kind)[-1])
            if get_origin(kind) is type:
                return self._constructed(kind, node)
        if name in self._source.classes:
            return self._constructed(self._source.classes[name], node)
        if name in self._source.functions:
            source, own = self._source.functions[name]
            return Of(source.type(own.returns))
        return None

    def _constructed(self, kind: Any, node: ast.Call) -> Of:
        """An object of a class of ours, whose arguments may be a base's; or of a `type[...]`."""
        own = getattr(kind, "own", None)
        made = kind if own is not None else get_args(kind)[0]
        if own is None or "__init__" not in own.methods():
            for base in vllm_classes(made):
                taken = (probe.parameters(base) or "").split()
                words = [word for word in node.keywords if word.arg in taken]
                self._table.call(
                    self._table.name(base), ast.Call(node.func, node.args, words), self._by
                )
        return Of(made)

    def _keywords(self, node: ast.Call, kind: Any) -> None:
        """Notes the fields of an object that a call replaces."""
        for cls in vllm_classes(kind):
            for word in filter(None, (word.arg for word in node.keywords)):
                self._table.attribute(cls, word, self._by)

    def _method(self, node: ast.Call, function: ast.Attribute) -> Of | None:
        owner = self._find(function.value)
        if isinstance(owner, Named) and not isinstance(owner.value, type):
            found = self._of_named(owner, function.attr)
            if isinstance(found, Named):
                self._table.call(found.name, node, self._by)
                made = found.value
                return Of(made if isinstance(made, type) else vllm_types.returned(made))
        kind = owner.value if isinstance(owner, Named) else getattr(owner, "kind", None)
        if function.attr == "_replace":
            self._keywords(node, kind)
        for cls in vllm_classes(kind):
            if full := self._table.attribute(cls, function.attr, self._by):
                self._table.call(full, node, self._by)
                return Of(vllm_types.returned(getattr(cls, function.attr, None)))
        by_name = {"items": vllm_types.items, "values": vllm_types.item}
        if function.attr in by_name:
            return Of(list[by_name[function.attr](kind) or Any])
        if function.attr in ("get", "pop"):
            return Of(vllm_types.item(kind))
        for part in vllm_types.alternatives(kind):
            own = getattr(part, "own", None)
            if own is not None and (method := own.methods().get(function.attr)):
                return Of(own.source.type(method.returns))
        return None


def _member(owner: Named, name: str) -> str:
    return f"{owner.name}{name}" if owner.name.endswith(":") else f"{owner.name}.{name}"


def _name(node: ast.AST | None) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def _tells(found: Named | Of | None) -> bool:
    return isinstance(found, Named) or (isinstance(found, Of) and found.kind not in (None, Any))


def _is_property(node: ast.FunctionDef) -> bool:
    return any(_name(decorator) == "property" for decorator in node.decorator_list)
