# SPDX-License-Identifier: Apache-2.0
"""The table of docs/models.md, of what is read off a small model of each family.

`python -m models.page` from tests/ prints it.
"""

from collections.abc import Iterator
from pathlib import Path

import mlx_lm.models
from models import further
from models.recurrent import make_model

from vllm_metal.attention.layers import (
    AttentionLayer,
    RunLayer,
    SequenceLayer,
    attention_layers,
)

#: Small models of one module: the one that stands in the table, and variants that do not.
_VARIANTS = ("qwen3_next, large states",)


def families():
    """By module of mlx-lm, in alphabetical order."""
    return {name: further.ALL[name] for name in sorted(further.ALL) if name not in _VARIANTS}


def modules_with_states_or_latents() -> Iterator[str]:
    """mlx-lm's modules that make such caches themselves, or compute with latents."""
    for path in sorted(Path(mlx_lm.models.__path__[0]).glob("*.py")):
        text = path.read_text()
        makes_states = "def make_cache" in text and "ArraysCache(" in text
        if makes_states or ("class ModelArgs" in text and "kv_lora_rank" in text):
            yield path.stem


def table() -> Iterator[str]:
    """Lines of Markdown."""
    yield "| Module of mlx-lm | What its layers keep |"
    yield "| --- | --- |"
    for name, family in families().items():
        kept = kinds(attention_layers(make_model(family), name))
        yield f"| {name} | {', '.join(kept)} |"
    for name, (family, _) in sorted(further.REFUSED.items()):
        try:
            attention_layers(make_model(family), name)
        except NotImplementedError as refused:
            yield f"| {name} | refused: {str(refused).partition(repr(name))[2].strip()} |"


def kinds(layers) -> list[str]:
    """Each kind of layer once, in the order of the model."""
    return list(dict.fromkeys(kind(layer) for layer in layers))


def kind(layer) -> str:
    if isinstance(layer, RunLayer):
        return "a state, by runs"
    if isinstance(layer, SequenceLayer):
        return "a state"
    assert isinstance(layer, AttentionLayer)
    if layer.latent:
        return "latents"
    found = "K/V" if layer.window is None or layer.window > 1000 else "K/V of a window"
    if layer.value_size not in (None, layer.head_size):
        found += " of two sizes"
    return f"{found} that other layers read" if layer.readers else found


if __name__ == "__main__":
    print("\n".join(table()))
