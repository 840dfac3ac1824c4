# SPDX-License-Identifier: Apache-2.0
"""Matches the patterns of a PEFT configuration with the names of a file's updates, as PEFT does.

PEFT matches names of modules, and of parameters where `target_parameters` has them. A file names
the update of a parameter by its module: `experts` for the outermost of the wrappers around experts,
`experts.base_layer` for the one inside it. PEFT wraps a module's parameters in the order in which
the module defines them, the first innermost.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: Parameters of experts in the order in which transformers' modules define them.
_ORDER = ("gate_up_proj", "gate_up_proj_bias", "gate_proj", "up_proj", "down_proj")
_INNER = re.compile(r"(\.base_layer)+$")
#: The module of one expert, in older checkpoints. PEFT takes it for a part of the array.
_ONE_EXPERT = re.compile(r"(.+\.experts)\.\d+\.\w+")
#: The first number behind two names, as in "model.layers.3.": a layer's.
_LAYER = re.compile(r".*?\.[^.]*\.(\d+)\.")


@dataclass(frozen=True)
class Update:
    """What PEFT knows of one update."""

    name: str  # the module's, or the parameter's behind its module's
    is_parameter: bool
    rank: int
    scale: float


class Patterns:
    """A PEFT configuration as far as it says what is updated, and how."""

    def __init__(self, config: Mapping[str, Any], modules: Iterable[str]) -> None:
        """
        Args:
            config: adapter_config.json.
            modules: all names in the adapter's file, without "base_model.model.".

        Raises:
            ValueError: more or fewer parameters of a module are updated than the configuration
                names, or a pattern is no regular expression.
        """
        self._config = config
        self._wrappers = Counter(_INNER.sub("", module) for module in modules)

    def update_of(self, module: str) -> Update:
        """What PEFT makes of the update of a name in the file.

        Raises:
            ValueError: see the class.
        """
        config = self._config
        parameter = self._parameter(module)
        name = module if parameter is None else parameter
        rank = int(self._first(config.get("rank_pattern"), name, config["r"]))
        alpha = float(self._first(config.get("alpha_pattern"), name, config["lora_alpha"]))
        divisor = math.sqrt(rank) if config.get("use_rslora") else rank
        return Update(name, parameter is not None, rank, alpha / divisor)

    def is_targeted(self, update: Update) -> bool:
        """Whether PEFT would update this module or parameter; if not, it ignores the tensors."""
        if update.is_parameter or self._is_target(update.name):
            return True
        expert = _ONE_EXPERT.fullmatch(update.name)
        return bool(expert and self._parameters(expert[1]))

    def _is_target(self, module: str) -> bool:
        """Whether a module is among those that are updated."""
        config, name = self._config, module
        if _named(config.get("exclude_modules"), name):
            return False
        targets = config.get("target_modules")
        if isinstance(targets, str):
            return targets == "all-linear" or _named(targets, name)
        # Layers are looked at where the end of a name matches, not all of it.
        whole = name in (targets or ())
        return whole or (_named(targets, name) and self._is_of_a_layer(name))

    def _is_of_a_layer(self, name: str) -> bool:
        """Whether layers_to_transform names the layer."""
        wanted = self._config.get("layers_to_transform")
        if wanted is None or wanted == []:
            return True
        patterns = self._config.get("layers_pattern") or ()
        patterns = [patterns] if isinstance(patterns, str) else patterns
        found = _LAYER.match(name)
        if patterns:
            of_patterns = (re.match(rf"(?:^|.*?\.){each}\.(\d+)\.", name) for each in patterns)
            found = next(filter(None, of_patterns), None)
        return found is not None and int(found[1]) in (
            [wanted] if isinstance(wanted, int) else wanted
        )

    def _parameter(self, module: str) -> str | None:
        """The parameter that a name means; None: it means a module."""
        outer = _INNER.sub("", module)
        names = self._parameters(outer)
        if not names or self._is_target(outer):
            return None
        count, depth = self._wrappers[outer], module.removeprefix(outer).count(".base_layer")
        if count != len(names) or depth >= count:
            raise ValueError(
                f"target_parameters names {', '.join(names)} of {outer}, of which the file has "
                f"{count} updates"
            )
        return f"{outer}.{names[count - 1 - depth]}"

    def _parameters(self, module: str) -> Sequence[str]:
        """Names of a module's parameters that are updated, in the order of their definition."""
        targets = self._config.get("target_parameters") or ()
        if not module.endswith("experts"):  # no other module has parameters of these names
            targets = [target for target in targets if target not in _ORDER]
        names = {target.rpartition(".")[2] for target in targets}
        mine = [name for name in names if _named(targets, f"{module}.{name}")]
        known = {name: place for place, name in enumerate(_ORDER)}
        return sorted(mine, key=lambda name: (known.get(name, len(_ORDER)), name))

    @staticmethod
    def _first(pattern: Mapping[str, Any] | None, name: str, default: Any) -> Any:
        """The value of the first key that matches the end of a name, from a dot on."""
        matching = (
            value for key, value in (pattern or {}).items() if re.match(rf"(.*\.)?({key})$", name)
        )
        return next(matching, default)


def _named(targets: str | Iterable[str] | None, name: str) -> bool:
    """Whether a list has a name or its end, from a dot on; or an expression matches all of it."""
    if isinstance(targets, str):
        return bool(re.fullmatch(targets, name))
    return any(name == target or name.endswith(f".{target}") for target in targets or ())
