# SPDX-License-Identifier: Apache-2.0
"""The table of vLLM's names that is being made, with what the installed vLLM says of each."""

from __future__ import annotations

import ast
import functools
import json
from collections import defaultdict
from typing import Any

from vllm_metal.vllm_patches import probe


class Table:
    """The names found so far."""

    def __init__(self, names: dict[type, str]) -> None:
        """Begins an empty table.

        Args:
            names: classes, by the name that our sources import.
        """
        self._names = names
        self._entries: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))

    def name(self, cls: type) -> str:
        """Returns the name of a class: the one that our sources import, or vLLM's own."""
        return self._names.get(cls) or f"{cls.__module__}:{cls.__qualname__}"

    def note(self, name: str, by: str, **more: str) -> None:
        """Adds a file that uses a name, and what it does with it."""
        for key, value in {"by": by, **more}.items():
            self._entries[name][key].add(value)

    def attribute(self, owner: type | str, name: str, by: str) -> str | None:
        """Notes an attribute, and its owner; None: vLLM has none of that name, so it is ours.

        Args:
            owner: a class, or the name of something else.
        """
        if isinstance(owner, type):
            if (name.startswith("__") and name != "__init__") or _inherited(owner, name):
                return None
            owner = self.name(owner)
        full = f"{owner}.{name}"
        if not _is_there(full):
            return None
        self.note(owner, by)
        self.note(full, by)
        return full

    def call(self, name: str, node: ast.Call, by: str) -> None:
        """Notes the arguments of a call, if the function has parameters for them."""
        taken = probe.parameters(probe.look_up(name))
        if taken is None:
            return
        shown = [arg for arg in node.args if not isinstance(arg, ast.Starred)]
        places = taken.split("*")[0].split()[: len(shown)]
        given = [*places, *(f"{word.arg}=" for word in node.keywords if word.arg)]
        if len(shown) < len(node.args) or not all(word.arg for word in node.keywords):
            given.append("...")
        if len(places) == len(shown) and given != ["..."]:
            self.note(name, by, called=" ".join(given))

    def stand_in(self, name: str, by: str) -> None:
        """Notes the parameters of what a function of ours takes the place of."""
        taken = probe.parameters(probe.look_up(name))
        self.note(name, by, **({} if taken is None else {"takes": taken}))

    def text(self) -> str:
        """Returns the content of touched.json: a line each name."""
        lines = []
        for name, entry in sorted(self._entries.items()):
            told: dict[str, Any] = {key: sorted(values) for key, values in sorted(entry.items())}
            if "takes" in told:
                (told["takes"],) = told["takes"]
            lines.append(f"{json.dumps(name)}: {json.dumps(told)}")
        return "{\n" + ",\n".join(lines) + "\n}\n"


@functools.cache  # it reads the code of methods
def _is_there(name: str) -> bool:
    return probe.look_up(name) is not probe.MISSING


def _inherited(cls: type, name: str) -> bool:
    """Whether a class of vLLM's has an attribute from one that is not vLLM's."""
    owner = next((base for base in cls.__mro__ if name in vars(base)), cls)
    return owner.__module__.partition(".")[0] != "vllm"
