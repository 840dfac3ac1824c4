# SPDX-License-Identifier: Apache-2.0
"""Gives settings in nested blocks of a text configuration dotted keys, as in "block.size".

Tables of keys then hold for them as for any other key. Null counts as an omitted key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vllm_metal.engine.config_json.rope_parameters import Config

#: By module, the key with nested blocks.
_BLOCKS = {"jina_vlm": "block_config"}
#: Defaults of the family's own class that differ from those of the module, or that rows read.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "jina_vlm": {
        "additional_vocab_size": 0,
        "block_config.attn_config.k_lnorm": False,
        "block_config.attn_config.lnorm_config.eps": 1e-5,
        "block_config.attn_config.lnorm_config.type": "default",
        "block_config.attn_config.q_lnorm": False,
        "block_config.attn_config.qkv_lnorm_on_heads": False,
        "block_config.ffn_config.ratio": 4,
        "block_config.lnorm_config.eps": 1e-5,
        "block_config.lnorm_config.type": "default",
        "rope": False,
    },
}


def flat(config: Config, module: str) -> Config:
    """Returns a text configuration with dotted keys, and with defaults for omitted ones."""
    block = _BLOCKS.get(module)
    if block is None:
        return config
    keys = {key: value for key, value in config.items() if key != block and value is not None}
    return {**_DEFAULTS[module], **keys, **dict(_dotted(block, config.get(block) or {}))}


def path(key: str, module: str) -> tuple[str, ...]:
    """Returns the path of a key of `flat`'s result in config.json."""
    is_nested = key.startswith(f"{_BLOCKS.get(module)}.")
    return tuple(key.split(".")) if is_nested else (key,)


def _dotted(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _dotted(f"{name}.{key}", each)
    elif value is not None:
        yield name, value
