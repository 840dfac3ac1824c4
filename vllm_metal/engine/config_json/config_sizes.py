# SPDX-License-Identifier: Apache-2.0
"""Rejects a config.json whose numbers no model has, before anything is built of them.

transformers and mlx-lm make lists as long as the layers are many, and divide by counts of heads, so
a small file from a stranger would take all memory, or end in a traceback.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vllm_metal.identity.model_files import ModelLoadError

#: Bytes of a config.json; those with names of thousands of classes have some hundred KB.
_MAX_BYTES = 2**26
_MAX_DEPTH = 64
#: Largest values by the end of a key. The largest published model has 126 layers, 512 experts and
#: 262,144 tokens in its vocabulary.
_LARGEST = {
    **dict.fromkeys(("layers", "n_layer", "depth", "num_blocks"), 10_000),
    **dict.fromkeys(("heads", "n_head", "experts"), 100_000),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "intermediate_size"), 10_000_000),
    **dict.fromkeys(("vocab_size", "head_dim", "state_size"), 100_000_000),
}
#: Of these, zero is divided by, or makes no model.
_POSITIVE = (
    *("num_attention_heads", "hidden_size", "n_head", "n_embd", "d_model"),
    *("num_hidden_layers", "n_layer"),
)
_MAX_FACTOR = 10**6  # of a rope: contexts are extended 64-fold at most


def read(folder: Path) -> dict[str, Any]:
    """Reads config.json of a folder.

    Raises:
        ModelLoadError: it is missing, is no JSON object, or has a number that no model has.
    """
    path = folder / "config.json"
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ModelLoadError(
                f"{path} has more than {_MAX_BYTES} bytes, too many for a configuration"
            )
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ModelLoadError(f"{path} is not a JSON object")
    check(found)
    return found


def check(config: Mapping[str, Any]) -> None:
    """Checks the numbers of a config.json, of all its parts.

    Raises:
        ModelLoadError: one is none that a model has; the message names the key.
    """
    for key, value in _numbers(config):
        most = next((most for end, most in _LARGEST.items() if key.endswith(end)), None)
        if key == "factor":
            most = _MAX_FACTOR
        if most is not None and isinstance(value, str):
            raise ModelLoadError(f"config.json sets {key}={value!r}, which is not a number")
        if most is not None and not value <= most:  # NaN, too
            raise ModelLoadError(
                f"config.json sets {key}={value}, and models have {most:g} at most"
            )
        if key in _POSITIVE and not isinstance(value, str) and value < 1:
            raise ModelLoadError(f"config.json sets {key}={value}, and models have at least 1")


def _numbers(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the numbers with a key of their own, and text that may stand in place of one.

    Raises:
        ModelLoadError: objects are nested deeper than any model's.
    """
    level: list[Any] = [config]
    for _ in range(_MAX_DEPTH):
        below: list[Any] = []
        for found in level:
            if isinstance(found, Mapping):
                for key, value in found.items():
                    if isinstance(key, str) and type(value) in (int, float, str):
                        yield key, value
                below += found.values()
            else:
                below += found
        level = [each for each in below if isinstance(each, Mapping | list)]
        if not level:
            return
    raise ModelLoadError(f"config.json has objects nested deeper than {_MAX_DEPTH}")
