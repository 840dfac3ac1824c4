# SPDX-License-Identifier: Apache-2.0
"""Checks that the installed vLLM has every name in touched.json, as the file states it.

tests/upstream/touched writes the file, from our sources and the tested vLLM. `python -m
vllm_metal.vllm_patches.probe` prints the names that are missing or changed, and exits with 1 if
there are any.
"""

from __future__ import annotations

import argparse
import dis
import functools
import importlib
import inspect
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any, get_args

from vllm_metal.vllm_patches import releases

FILE = Path(__file__).with_name("touched.json")
#: vLLM's worker for GPUs, which has the methods that vLLM calls beyond those of the base class.
#: vLLM does not load it for this platform, and importing it takes seconds.
GPU_WORKER = "vllm.v1.worker.gpu_worker"
MISSING: Any = object()


@dataclass(frozen=True)
class Touched:
    """One name of vLLM's that our sources import, extend, replace, call or read.

    Parameters are names in order, without `self`; a lone `*` stands before keyword-only ones.
    """

    name: str  # "module:", "module:name" or "module:name.attribute"
    by: Sequence[str]  # our files that use it, below vllm_metal/
    #: Arguments of our calls: names of parameters by position, `name=` by keyword; `...` for more
    #: that the sources do not show.
    called: Sequence[str] = ()
    takes: str | None = None  # parameters, if a function of ours stands in its place


@dataclass(frozen=True)
class Finding:
    """A name of vLLM's that is missing or has changed."""

    name: str  # "module:name.attribute"
    problem: str
    by: str  # our files that use it

    def __str__(self) -> str:
        return f"{self.name} {self.problem} (used by {self.by})"


def table() -> Iterator[Touched]:
    """Reads touched.json: a class comes before its attributes."""
    return (Touched(name, **entry) for name, entry in json.loads(FILE.read_text()).items())


def probe(touched: Iterable[Touched] | None = None, quick: bool = False) -> list[Finding]:
    """Imports every name of the table and checks its signature; empty if all agree.

    Args:
        touched: names with their classes before them; None: the table.
        quick: whether to leave out vLLM's own worker, which takes seconds to import.
    """
    findings: dict[str, Finding] = {}
    for entry in table() if touched is None else touched:
        owner = entry.name.rpartition(".")[0] if "." in entry.name.partition(":")[2] else ""
        slow = quick and entry.name.startswith(f"{GPU_WORKER}:")
        if slow or owner in findings:
            continue
        if (problem := _problem(entry)) is not None:
            findings[entry.name] = Finding(entry.name, problem, " ".join(entry.by))
    return list(findings.values())


@functools.cache
def warn_if_untested() -> None:
    """Warns, once in a process, if the installed vLLM is not the tested one.

    The warning names what the quick probe finds. Call it in the process that reads the options,
    before this plugin changes vLLM.
    """
    from vllm.logger import init_logger

    found = releases.installed_vllm()
    if releases.is_tested(found):
        return
    findings = probe(quick=True)
    init_logger(__name__).warning(
        "vllm-metal is tested with vLLM %s.x; vLLM %s is used, as "
        "VLLM_METAL_ALLOW_UNTESTED=1 asks. %s",
        releases.TESTED_VLLM,
        found,
        "It lacks what vllm-metal uses: "
        + "; ".join(f"{finding.name} {finding.problem}" for finding in findings)
        if findings
        else "It has what vllm-metal uses",
    )


def look_up(name: str) -> Any:
    """What "module:name.attribute" names: a module, an object, or a method's `inspect.Signature`.

    Returns:
        None for an attribute that is only declared, or set by methods; MISSING if there is none.

    Raises:
        Exception: whatever the module raises as it is imported.
    """
    module, _, path = name.partition(":")
    owner = importlib.import_module(module)
    first, _, attribute = path.partition(".")
    found = getattr(owner, first, MISSING) if first else owner
    if not attribute or found is MISSING:
        return found
    return _member(found, attribute)


def parameters(found: Any) -> str | None:
    """A callable's parameters as a Touched has them; None: it cannot be called."""
    signature = _signature(found)
    if signature is None:
        return None
    empty = inspect.Parameter.empty
    bare = [p.replace(annotation=empty, default=empty) for p in signature.parameters.values()]
    shown = str(signature.replace(parameters=bare, return_annotation=empty))
    return shown[1:-1].replace(",", "")


def _problem(entry: Touched) -> str | None:
    """What is wrong with a name; None: nothing."""
    try:
        found = look_up(entry.name)
    except Exception as error:  # whatever a module raises, its names cannot be used
        return f"cannot be imported: {error}"
    if found is MISSING:
        return "is not there"
    for arguments in entry.called:
        if problem := _not_called_so(found, arguments):
            return problem
    if entry.takes is not None and (taken := parameters(found)) != entry.takes:
        if taken is None:
            return "can no longer be called"
        expected = ", ".join(entry.takes.split())
        return f"takes ({', '.join(taken.split())}) and not ({expected}) any more"
    return None


def _member(owner: Any, name: str) -> Any:
    """An attribute of an object's or of a class's objects, a mapping's key or a Literal's value."""
    if isinstance(owner, Mapping):
        return None if name in owner else MISSING
    if name in get_args(owner):
        return None
    found = inspect.getattr_static(owner, name, MISSING)
    if isinstance(found, FunctionType) and isinstance(owner, type):
        signature = inspect.signature(found)
        return signature.replace(parameters=[*signature.parameters.values()][1:])
    if found is not MISSING:
        return getattr(owner, name, None)
    bases = owner.__mro__ if isinstance(owner, type) else ()
    declared = (vars(base).get("__annotations__", ()) for base in bases)
    there = any(name in names for names in declared) or any(name in _set_by(b) for b in bases)
    return None if there else MISSING


def _set_by(owner: type) -> set[str]:
    """Attributes that the methods of a class set."""
    return {
        instruction.argval
        for function in vars(owner).values()
        if isinstance(function, FunctionType)
        for instruction in dis.get_instructions(inspect.unwrap(function))  # not ours
        if instruction.opname == "STORE_ATTR"
    }


def _signature(found: Any) -> inspect.Signature | None:
    if isinstance(found, inspect.Signature):
        return found
    try:
        return inspect.signature(found)
    except (TypeError, ValueError):
        return None


def _not_called_so(found: Any, arguments: str) -> str | None:
    """Why a callable does not take the arguments; None: it does."""
    signature = _signature(found)
    if signature is None:
        return "can no longer be called"
    given = [name for name in arguments.split() if name != "..."]
    by_place = [name for name in given if not name.endswith("=")]
    by_name = {name[:-1]: None for name in given if name.endswith("=")}
    try:
        bind = signature.bind_partial if "..." in arguments else signature.bind
        bind(*by_place, **by_name)
    except TypeError as error:
        return f"is not called so any more, with ({', '.join(given)}): {error}"
    taken = [*signature.parameters][: len(by_place)]
    if taken != by_place:
        return f"takes {taken} in the place of {by_place}"
    return None


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    findings, found = probe(), releases.installed_vllm()
    if not findings:
        print(f"vLLM {found} has all that vllm-metal uses")
        return 0
    print(f"vLLM {found} lacks what vllm-metal uses:")
    print("\n".join(f"  {finding}" for finding in findings))
    return 1


if __name__ == "__main__":
    sys.exit(main())
