# SPDX-License-Identifier: Apache-2.0
"""Says how this machine is used: by its tuner's file, else by its family of chips; without MLX."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from metal_kernels.cache import cache_dir
from vllm_metal.device import gpu_cores, identity
from vllm_metal.settings.secret_file import write_private

#: Changes when a choice changes its meaning.
_FORMAT = 1
_FILE = "choices.json"
#: Variables that MLX reads once, when it first uses the GPU, by the choice that they carry.
VARIABLES: Mapping[str, str] = MappingProxyType({"dispatches": "MLX_MAX_OPS_PER_BUFFER"})
_NOTHING: Mapping[str, Any] = MappingProxyType({})


def _number(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    raise ValueError(f"{value!r} is not a positive number")


def _number_or_none(value: Any) -> Any:
    return None if value is None else _number(value)


def _bool(value: Any) -> Any:
    if isinstance(value, bool):
        return value
    raise ValueError(f"{value!r} is neither true nor false")


def _by_context(value: Any) -> Any:
    found = _of_layers(_number_or_none)(value)
    if not found or any(not context.isdecimal() or not int(context) for context in found):
        raise ValueError(f"{value!r} has no contexts")
    return found


def _of_layers(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def read_all(value: Any) -> Any:
        if not isinstance(value, dict):
            raise ValueError(f"{value!r} is not an object")
        return {kind: read(chosen) for kind, chosen in value.items()}

    return read_all


def _choice(read: Callable[[Any], Any]) -> Any:
    return field(default=None, metadata={"read": read})


def _choices(read: Callable[[Any], Any]) -> Any:
    return field(default_factory=dict, metadata={"read": _of_layers(read)})


@dataclass(frozen=True)
class Choices:
    """What was chosen for a machine. A kind of layer is `metal_kernels.selfcheck.Case` in words."""

    #: Dispatches that MLX puts into a command buffer; None: as many as it does by itself.
    dispatches: int | None = _choice(_number_or_none)
    #: Fields of `metal_kernels.paged_attention.Splits`; None: its own.
    part_cost: int | None = _choice(_number_or_none)
    slots: int | None = _choice(_number_or_none)
    #: Packed rows of the decode kernel's largest tile, by kind of layer; all sizes where one is
    #: missing.
    decode_rows: Mapping[str, int] = _choices(_number)
    #: Keys that sharing a beginning must save, by kind of layer; None: none is shared. The kernels'
    #: own number where one is missing.
    shared: Mapping[str, int | None] = _choices(_number_or_none)
    #: Rows from which on MLX's chunked delta rule takes a prompt, by kind of layer; None: never.
    #: Where one is missing, the self-check's times decide.
    long_prompt: Mapping[str, int | None] = _choices(_number_or_none)

    #: Rows from which on MLX's attention takes a prompt, by kind of layer and by contexts that were
    #: timed, in decimal digits; None: never. Where a kind is missing, the self-check decides.
    prompt_rows: Mapping[str, Mapping[str, int | None]] = _choices(_by_context)
    #: Whether MLX's attention then takes a fused kernel where it would not by itself, by kind of
    #: layer; it does where one is missing.
    force_fused: Mapping[str, bool] = _choices(_bool)

    def to_json(self) -> dict[str, Any]:
        return {one.name: _plain(getattr(self, one.name)) for one in fields(self)}

    @staticmethod
    def from_json(found: Mapping[str, Any]) -> Choices:
        """
        Raises:
            ValueError: a field is unknown, or has a wrong value.
        """
        readers = {one.name: one.metadata["read"] for one in fields(Choices)}
        if unknown := sorted(set(found) - set(readers)):
            raise ValueError(f"unknown: {', '.join(unknown)}")
        return Choices(**{name: readers[name](value) for name, value in found.items()})


#: What a family of chips is given, before its owner tunes it; `doctor --tune` reports fill it.
#: Each end of a command buffer costs some 20 µs (mlx#4521). With 1000 dispatches in one instead of
#: 50, an M3 Ultra was 7.7 % faster, an M1 Ultra 11 to 13 %, an M5 not at all (mlxcel#360). With 84
#: the slowest GPU still takes decode steps of 256 requests, vLLM's default, without a pace
#: (metal_kernels.pace), and only what has no pace is built by a graph.
FAMILIES: Mapping[str, Choices] = MappingProxyType(
    {family: Choices(dispatches=84) for family in ("M1", "M2", "M3", "M4")}
)


def defaults(chip: str | None) -> Choices:
    """What a chip's family is given; nothing, where nobody has reported of it."""
    family = re.match(r"Apple (M\d+)\b", chip or "")
    return FAMILIES.get(family[1], Choices()) if family else Choices()


@dataclass(frozen=True)
class Loaded:
    """What is to be used, and why it is not what the file says."""

    choices: Choices
    complaint: str | None = None  # a line for the log


UNTUNED = Loaded(Choices())


def load(folder: Path | None = None) -> Loaded:
    """The choices of this machine. Without a file nothing but the chip's name is asked for.

    Args:
        folder: that has the file; None: `default_folder`.
    """
    path = (folder or default_folder()) / _FILE
    by_family = defaults(identity.chip())
    try:
        text = path.read_text()
    except FileNotFoundError:
        return Loaded(by_family)
    except (OSError, ValueError) as error:
        return _refused(by_family, path, f"cannot be read ({error})")
    try:
        found = json.loads(text)
        here, there = _key(), found["key"]
        other = sorted(name for name in here | there if here.get(name) != there.get(name))
        if other:
            return _refused(by_family, path, f"was made with another {', '.join(other)}")
        return Loaded(Choices.from_json(found["choices"]))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        return _refused(by_family, path, f"is broken ({type(error).__name__}: {error})")


@functools.cache
def current() -> Loaded:
    """`load`, once a process."""
    return load()


def save(choices: Choices, more: Mapping[str, Any] = _NOTHING, folder: Path | None = None) -> Path:
    """Replaces the file as a whole: of processes that write at once, the last one counts.

    Args:
        choices: to be used from the next start on.
        more: what they were made from, JSON.
        folder: to write to; None: `default_folder`.

    Raises:
        OSError: it cannot be written.
    """
    path = (folder or default_folder()) / _FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = {"key": _key(), "choices": choices.to_json(), **more}
    write_private(path, json.dumps(whole, indent=1) + "\n")
    return path


def default_folder() -> Path:
    """In the user's cache folder."""
    return cache_dir() / "tuned"


def apply() -> None:
    """Sets the variables of VARIABLES, unless they are set. Child processes inherit them.

    Comes before anything of this process makes an array.
    """
    for name, variable in VARIABLES.items():
        value = getattr(current().choices, name)
        if value is not None:
            os.environ.setdefault(variable, str(value))


def _key() -> dict[str, Any]:
    """All that could change a choice."""
    facts = {"format": _FORMAT, "chip": identity.chip(), "GPU cores": gpu_cores.count()}
    return facts | identity.software()


def _refused(choices: Choices, path: Path, why: str) -> Loaded:
    advice = "run `vllm-metal doctor --tune` again, or delete it"
    return Loaded(choices, f"Tuned kernel settings are not used: {path} {why}; {advice}")


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value
