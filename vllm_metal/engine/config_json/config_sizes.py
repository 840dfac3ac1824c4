# SPDX-License-Identifier: Apache-2.0
"""Rejects a config.json with absurd numbers before anything is built from it.

transformers and mlx-lm allocate lists by the number of layers and divide by numbers of heads, so a
small file from a stranger could exhaust memory or end in a traceback.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vllm_metal.identity.model_files import ModelLoadError

#: Bytes of a config.json; files with thousands of class names have some hundred KB.
_MAX_BYTES = 2**26
_MAX_DEPTH = 64
#: Upper bounds by a key's ending. The largest published models have 126 layers, 512 experts and a
#: vocabulary of 262,144 tokens.
_LARGEST = {
    **dict.fromkeys(("layers", "n_layer", "depth", "num_blocks"), 10_000),
    **dict.fromkeys(("heads", "n_head", "experts"), 100_000),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "intermediate_size"), 10_000_000),
    **dict.fromkeys(("vocab_size", "head_dim", "state_size"), 100_000_000),
}
#: Keys that must be at least 1: others are divided by them, or the model would have no layer.
_POSITIVE = (
    *("num_attention_heads", "hidden_size", "n_head", "n_embd", "d_model"),
    *("num_hidden_layers", "n_layer"),
)
_MAX_FACTOR = 10**6  # RoPE factor; published models extend their context 64-fold at most


def read(folder: Path) -> dict[str, Any]:
    """Reads a folder's config.json.

    Raises ModelLoadError: the file is missing, not a JSON object, or has an absurd number.
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
    """Raises ModelLoadError, naming the key, if a number in any part exceeds every real model."""
    for key, value in _numbers(config):
        most = next((most for end, most in _LARGEST.items() if key.endswith(end)), None)
        if key == "factor":
            most = _MAX_FACTOR
        if most is not None and isinstance(value, str):
            raise ModelLoadError(f"config.json sets {key}={value!r}, which is not a number")
        if most is not None and not value <= most:  # also catches NaN
            raise ModelLoadError(f"config.json sets {key}={value}, which must be at most {most:g}")
        if key in _POSITIVE and not isinstance(value, str) and value < 1:
            raise ModelLoadError(f"config.json sets {key}={value}, which must be at least 1")


def _numbers(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields keys and values that are, or should be, numbers; raises for deep nesting."""
    # Level by level instead of recursively: the depth is the file's choice.
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
