# SPDX-License-Identifier: Apache-2.0
"""Checks that the installed vLLM has every name in the table `touched`, as the table states it.

`python -m vllm_metal.vllm_patches.probe` prints the names that are missing or changed, and exits
with 1 if there are any.
"""

from __future__ import annotations

import argparse
import dis
import functools
import importlib
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any, get_args

from vllm_metal.vllm_patches import releases
from vllm_metal.vllm_patches.touched import GPU_WORKER, TOUCHED, Touched

_MISSING: Any = object()


@dataclass(frozen=True)
class Finding:
    """A name of vLLM's that is missing or has changed."""

    name: str  # "module:name.attribute"
    problem: str
    by: str  # our files that use it

    def __str__(self) -> str:
        return f"{self.name} {self.problem} (used by {self.by})"


def probe(touched: Iterable[Touched] = TOUCHED, quick: bool = False) -> list[Finding]:
    """Imports every name of the table and checks its signature and fields; empty if all agree.

    Args:
        touched: the table. Only entries of the installed release are checked; for a release that
            is not in KNOWN_VLLM, those of the newest one there.
        quick: whether to leave out vLLM's own worker, which takes seconds to import.
    """
    release = _release()
    return [
        finding
        for entry in touched
        if release in entry.releases and not (quick and entry.name.startswith(f"{GPU_WORKER}:"))
        for finding in _check(entry)
    ]


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


def _release() -> str:
    found = releases.installed_vllm() or ""
    known = (name for name in releases.KNOWN_VLLM if f"{found}.".startswith(f"{name}."))
    return next(known, releases.KNOWN_VLLM[-1])


def _check(entry: Touched) -> Iterator[Finding]:
    module, _, name = entry.name.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:  # whatever a module raises, its names cannot be used
        yield Finding(entry.name, f"cannot be imported: {error}", entry.by)
        return
    if name:
        found = getattr(found, name, _MISSING)
    if found is _MISSING:
        yield Finding(entry.name, "is not there", entry.by)
        return
    if entry.called is not None and (problem := _not_called_so(found, entry.called)):
        yield Finding(entry.name, problem, entry.by)
    if entry.replaced is not None and (problem := _takes_else(found, entry.replaced)):
        yield Finding(entry.name, problem, entry.by)
    for field in entry.fields.split():
        if not _has(found, field):
            yield Finding(f"{entry.name}.{field}", "is not there", entry.by)
    for expected, check in ((entry.calls, _not_called_so), (entry.methods, _takes_else)):
        for method, needs in expected.items():
            problem = _of_method(found, method, needs, check)
            if problem:
                yield Finding(f"{entry.name}.{method}", problem, entry.by)


def _has(owner: Any, name: str) -> bool:
    """Whether a class's objects, a module, a mapping or a Literal's values include `name`."""
    if isinstance(owner, Mapping):
        return name in owner
    if isinstance(owner, ModuleType):
        return hasattr(owner, name)
    if name in get_args(owner) or inspect.getattr_static(owner, name, _MISSING) is not _MISSING:
        return True
    bases = owner.__mro__ if isinstance(owner, type) else ()
    return any(
        name in vars(base).get("__annotations__", ()) or name in _set_by(base) for base in bases
    )


def _set_by(owner: type) -> set[str]:
    """Attributes that the methods of a class set."""
    return {
        instruction.argval
        for function in vars(owner).values()
        if isinstance(function, FunctionType)
        for instruction in dis.get_instructions(function)
        if instruction.opname == "STORE_ATTR"
    }


def _of_method(owner: Any, name: str, needs: str, check: Any) -> str | None:
    """What the check finds wrong with a method, called on an object; None: nothing."""
    found = inspect.getattr_static(owner, name, _MISSING)
    if found is _MISSING:
        return "is not there"
    if isinstance(found, staticmethod):
        return check(found.__func__, needs)
    if isinstance(found, classmethod) or not isinstance(owner, type):
        return check(getattr(owner, name), needs)
    return check(_without_self(found), needs)


def _without_self(function: Any) -> inspect.Signature:
    signature = inspect.signature(function)
    return signature.replace(parameters=[*signature.parameters.values()][1:])


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
        return "cannot be called any more"
    given = arguments.split()
    by_place = [name for name in given if not name.endswith("=")]
    by_name = {name[:-1]: None for name in given if name.endswith("=")}
    try:
        signature.bind(*by_place, **by_name)
    except TypeError as error:
        return f"is not called so any more, with ({', '.join(given)}): {error}"
    taken = [*signature.parameters][: len(by_place)]
    if taken != by_place and "args" not in taken:
        return f"takes {taken} in the place of {by_place}"
    return None


def _takes_else(found: Any, parameters: str) -> str | None:
    """How a callable's parameters differ from those of our replacement; None: they do not."""
    signature = _signature(found)
    if signature is None:
        return "cannot be called any more"
    taken, kind = [], inspect.Parameter
    for parameter in signature.parameters.values():
        if parameter.kind is kind.KEYWORD_ONLY and "*" not in taken:
            taken.append("*")
        stars = "*" * (parameter.kind is kind.VAR_POSITIONAL)
        stars = stars or "**" * (parameter.kind is kind.VAR_KEYWORD)
        taken.append(stars + parameter.name)
    if taken == parameters.split():
        return None
    return f"takes ({', '.join(taken)}) and not ({', '.join(parameters.split())}) any more"


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
