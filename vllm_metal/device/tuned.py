# SPDX-License-Identifier: Apache-2.0
"""Provides tuned settings, from the tuner's file or else by chip family. Does not import MLX."""

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

#: Incremented when a choice changes its meaning.
_FORMAT = 1
_FILE = "choices.json"
#: Maps choices to variables that MLX reads once, when it first uses the GPU.
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
    found = _by_layer(_number_or_none)(value)
    if not found or any(not context.isdecimal() or not int(context) for context in found):
        raise ValueError(f"{value!r} has no contexts")
    return found


def _by_layer(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def read_all(value: Any) -> Any:
        if not isinstance(value, dict):
            raise ValueError(f"{value!r} is not an object")
        return {kind: read(chosen) for kind, chosen in value.items()}

    return read_all


def _choice(read: Callable[[Any], Any]) -> Any:
    return field(default=None, metadata={"read": read})


def _choices(read: Callable[[Any], Any]) -> Any:
    return field(default_factory=dict, metadata={"read": _by_layer(read)})


@dataclass(frozen=True)
class Choices:
    """Tuned kernel settings. Kinds of layer are `metal_kernels.selfcheck.Case`s as strings."""

    #: Dispatches per command buffer; None: MLX's default.
    dispatches: int | None = _choice(_number_or_none)
    #: Fields of `metal_kernels.paged_attention.Splits`; None: its defaults.
    part_cost: int | None = _choice(_number_or_none)
    slots: int | None = _choice(_number_or_none)
    #: Packed rows of the decode kernel's largest tile, by kind of layer; all sizes if missing.
    decode_rows: Mapping[str, int] = _choices(_number)
    #: Minimum keys that sharing a prefix must save, by kind of layer; None: no sharing. The
    #: kernels' default if missing.
    shared: Mapping[str, int | None] = _choices(_number_or_none)
    #: Minimum rows of prompts that use MLX's chunked delta rule, by kind of layer; None: never. If
    #: missing, the self-check's times decide.
    long_prompt: Mapping[str, int | None] = _choices(_number_or_none)

    #: Minimum rows of prompts that use MLX's attention, by kind of layer and timed context length
    #: (in decimal digits); None: never. If a kind is missing, the self-check decides.
    prompt_rows: Mapping[str, Mapping[str, int | None]] = _choices(_by_context)
    #: Whether MLX's attention is then made to use a fused kernel where it would not by default, by
    #: kind of layer; true if missing.
    force_fused: Mapping[str, bool] = _choices(_bool)

    def to_json(self) -> dict[str, Any]:
        return {one.name: _plain(getattr(self, one.name)) for one in fields(self)}

    @staticmethod
    def from_json(found: Mapping[str, Any]) -> Choices:
        """Parses `to_json`'s result; raises ValueError for unknown fields and wrong values."""
        readers = {one.name: one.metadata["read"] for one in fields(Choices)}
        if unknown := sorted(set(found) - set(readers)):
            raise ValueError(f"unknown settings: {', '.join(unknown)}")
        return Choices(**{name: readers[name](value) for name, value in found.items()})


#: Settings of untuned machines by chip family, from `doctor --tune` reports. Each end of a command
#: buffer costs some 20 µs (mlx#4521). With 1000 dispatches per buffer instead of 50, an M3 Ultra
#: was 7.7 % faster, an M1 Ultra 11 to 13 %, an M5 not at all (mlxcel#360). With 84, even the
#: slowest GPU runs decode steps of 256 requests, vLLM's default, without a command-buffer limit
#: (metal_kernels.pace), and only steps without such a limit are built by a graph.
FAMILIES: Mapping[str, Choices] = MappingProxyType(
    {family: Choices(dispatches=84) for family in ("M1", "M2", "M3", "M4")}
)


def defaults(chip: str | None) -> Choices:
    """Returns the built-in settings of a chip's family; empty if it was never measured."""
    family = re.match(r"Apple (M\d+)\b", chip or "")
    return FAMILIES.get(family[1], Choices()) if family else Choices()


@dataclass(frozen=True)
class Loaded:
    """The settings to use, and a log line if the tuner's file could not be used."""

    choices: Choices
    complaint: str | None = None  # a line for the log


UNTUNED = Loaded(Choices())


def load(folder: Path | None = None) -> Loaded:
    """Loads this machine's settings from `folder` (`default_folder` if None)."""
    path = (folder or default_folder()) / _FILE
    # Without a file only the chip's name is queried; `_key` also runs ioreg.
    by_family = defaults(identity.chip())
    try:
        text = path.read_text()
    except FileNotFoundError:
        return Loaded(by_family)
    except (OSError, ValueError) as error:
        return _rejected(by_family, path, f"cannot be read ({error})")
    try:
        found = json.loads(text)
        here, there = _key(), found["key"]
        changed = sorted(name for name in here | there if here.get(name) != there.get(name))
        if changed:
            return _rejected(by_family, path, f"was made with another {', '.join(changed)}")
        return Loaded(Choices.from_json(found["choices"]))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        return _rejected(by_family, path, f"is broken ({type(error).__name__}: {error})")


@functools.cache
def current() -> Loaded:
    """Returns the result of `load`, which it calls once per process."""
    return load()


def save(choices: Choices, more: Mapping[str, Any] = _NOTHING, folder: Path | None = None) -> Path:
    """Replaces the settings file; `more`: JSON that records what the choices are based on.

    Takes effect at the next start. If processes write at the same time, the last one wins. Raises
    OSError if the file cannot be written.
    """
    path = (folder or default_folder()) / _FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = {"key": _key(), "choices": choices.to_json(), **more}
    write_private(path, json.dumps(whole, indent=1) + "\n")
    return path


def default_folder() -> Path:
    """Returns the default folder of tuned settings, in the user's cache."""
    return cache_dir() / "tuned"


def apply() -> None:
    """Sets the environment variables in VARIABLES that are unset; child processes inherit them.

    Call it before this process creates its first array.
    """
    for name, variable in VARIABLES.items():
        value = getattr(current().choices, name)
        if value is not None:
            os.environ.setdefault(variable, str(value))


def _key() -> dict[str, Any]:
    facts = {"format": _FORMAT, "chip": identity.chip(), "GPU cores": gpu_cores.count()}
    return facts | identity.software()


def _rejected(choices: Choices, path: Path, why: str) -> Loaded:
    advice = "run `vllm-metal doctor --tune` again, or delete it"
    return Loaded(choices, f"Tuned kernel settings are not used: {path} {why}; {advice}")


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value
