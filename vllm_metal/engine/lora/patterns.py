# SPDX-License-Identifier: Apache-2.0
"""Matches a PEFT configuration's patterns with the updates in a file, as PEFT does.

PEFT matches names of modules, and of parameters listed in `target_parameters`. A file names a
parameter's update by its module: `experts` for the outermost wrapper around experts,
`experts.base_layer` for the one inside it. PEFT wraps parameters in the order in which the module
defines them, the first one innermost.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: Experts' parameters in the order in which transformers' modules define them.
_ORDER = ("gate_up_proj", "gate_up_proj_bias", "gate_proj", "up_proj", "down_proj")
_INNER = re.compile(r"(\.base_layer)+$")
#: One expert's module in older checkpoints, which PEFT treats as part of the array.
_ONE_EXPERT = re.compile(r"(.+\.experts)\.\d+\.\w+")
#: The layer index: the first number after two names, as in "model.layers.3.".
_LAYER = re.compile(r".*?\.[^.]*\.(\d+)\.")


@dataclass(frozen=True)
class Update:
    """PEFT's settings for one update."""

    name: str  # name of the module, or of the parameter including its module
    is_parameter: bool
    rank: int
    scale: float


class Patterns:
    """Decides by a PEFT configuration which modules are updated, and with which settings."""

    def __init__(self, config: Mapping[str, Any], modules: Iterable[str]) -> None:
        # `modules`: all names in the adapter's file, without "base_model.model.".
        self._config = config
        self._wrappers = Counter(_INNER.sub("", module) for module in modules)

    def update_of(self, module: str) -> Update:
        """Returns PEFT's settings for a module name in the adapter's file.

        Raises ValueError: the file and the configuration disagree on the number of parameters.
        """
        config = self._config
        parameter = self._parameter(module)
        name = module if parameter is None else parameter
        rank = int(self._first(config.get("rank_pattern"), name, config["r"]))
        alpha = float(self._first(config.get("alpha_pattern"), name, config["lora_alpha"]))
        divisor = math.sqrt(rank) if config.get("use_rslora") else rank
        return Update(name, parameter is not None, rank, alpha / divisor)

    def is_targeted(self, update: Update) -> bool:
        """Whether PEFT would apply this update; otherwise it ignores the tensors."""
        if update.is_parameter or self._is_target(update.name):
            return True
        expert = _ONE_EXPERT.fullmatch(update.name)
        return bool(expert and self._parameters(expert[1]))

    def _is_target(self, module: str) -> bool:
        config, name = self._config, module
        if _matches(config.get("exclude_modules"), name):
            return False
        targets = config.get("target_modules")
        if isinstance(targets, str):
            return targets == "all-linear" or _matches(targets, name)
        # As in PEFT, layers_to_transform matters only for names that match by their end.
        whole = name in (targets or ())
        return whole or (_matches(targets, name) and self._is_of_a_layer(name))

    def _is_of_a_layer(self, name: str) -> bool:
        """Whether layers_to_transform includes the module's layer."""
        wanted = self._config.get("layers_to_transform")
        if wanted is None or wanted == []:
            return True
        patterns = self._config.get("layers_pattern") or ()
        patterns = [patterns] if isinstance(patterns, str) else patterns
        found = _LAYER.match(name)
        if patterns:
            matches = (re.match(rf"(?:^|.*?\.){each}\.(\d+)\.", name) for each in patterns)
            found = next(filter(None, matches), None)
        return found is not None and int(found[1]) in (
            [wanted] if isinstance(wanted, int) else wanted
        )

    def _parameter(self, module: str) -> str | None:
        """Returns the parameter that a name in the file stands for; None if it is a module."""
        outer = _INNER.sub("", module)
        names = self._parameters(outer)
        if not names or self._is_target(outer):
            return None
        count, depth = self._wrappers[outer], module.removeprefix(outer).count(".base_layer")
        if count != len(names) or depth >= count:
            raise ValueError(
                f"target_parameters lists {len(names)} parameters of {outer} ({', '.join(names)}), "
                f"but the file updates {count}"
            )
        return f"{outer}.{names[count - 1 - depth]}"

    def _parameters(self, module: str) -> Sequence[str]:
        """Returns names of a module's updated parameters, in the order of their definition."""
        targets = self._config.get("target_parameters") or ()
        if not module.endswith("experts"):  # no other module has parameters of these names
            targets = [target for target in targets if target not in _ORDER]
        names = {target.rpartition(".")[2] for target in targets}
        mine = [name for name in names if _matches(targets, f"{module}.{name}")]
        known = {name: index for index, name in enumerate(_ORDER)}
        return sorted(mine, key=lambda name: (known.get(name, len(_ORDER)), name))

    @staticmethod
    def _first(pattern: Mapping[str, Any] | None, name: str, default: Any) -> Any:
        """Returns the value of the first key that matches the name, or its end after a dot."""
        matching = (
            value for key, value in (pattern or {}).items() if re.match(rf"(.*\.)?({key})$", name)
        )
        return next(matching, default)


def _matches(targets: str | Iterable[str] | None, name: str) -> bool:
    """Whether a name equals a target, or ends with "." and a target; a string is a regex."""
    if isinstance(targets, str):
        return bool(re.fullmatch(targets, name))
    return any(name == target or name.endswith(f".{target}") for target in targets or ())
