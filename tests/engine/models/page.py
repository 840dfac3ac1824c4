# SPDX-License-Identifier: Apache-2.0
"""Small models of families with recurrent state, latents or other caches."""

from collections.abc import Iterator
from pathlib import Path

import mlx_lm.models
from engine.models import further

from vllm_metal.engine.attention.compressed_layer import RowLayer
from vllm_metal.engine.attention.index_layer import IndexLayer
from vllm_metal.engine.attention.layers import (
    AttentionLayer,
    RunLayer,
    SequenceLayer,
)

#: What layers keep of compressed attention, by their roles.
_ROLES = {"keys": "sliding-window keys", "index": "index keys"}
#: Small models of one module: the table's, and variants.
_VARIANTS = ("qwen3_next, large states",)


def families():
    """Returns the families by mlx-lm module, in alphabetical order."""
    return {name: further.ALL[name] for name in sorted(further.ALL) if name not in _VARIANTS}


def modules_with_states_or_latents() -> Iterator[str]:
    """Yields mlx-lm's modules that make such caches themselves or compute with latents."""
    for path in sorted(Path(mlx_lm.models.__path__[0]).glob("*.py")):
        text = path.read_text()
        makes_states = "def make_cache" in text and "ArraysCache(" in text
        if makes_states or ("class ModelArgs" in text and "kv_lora_rank" in text):
            yield path.stem


def kinds(layers) -> list[str]:
    """Returns the distinct kinds of layers in the model's order."""
    return list(dict.fromkeys(kind(layer) for layer in layers))


def kind(layer) -> str:
    if isinstance(layer, RunLayer):
        return "recurrent state, per sequence"
    if isinstance(layer, SequenceLayer):
        return "recurrent state"
    if isinstance(layer, IndexLayer):
        return "index keys"
    if isinstance(layer, RowLayer):
        return _ROLES.get(layer.role, "compressed entries")
    assert isinstance(layer, AttentionLayer)
    if layer.latent:
        return "MLA latents"
    found = "K/V" if layer.window is None or layer.window > 1000 else "sliding-window K/V"
    if layer.value_size not in (None, layer.head_size):
        found += " of two sizes"
    return f"shared {found}" if layer.readers else found
