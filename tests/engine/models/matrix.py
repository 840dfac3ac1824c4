# SPDX-License-Identifier: Apache-2.0
"""Generates docs/model-matrix.md: a row per mlx-lm module, from a small model of it.

`python -m engine.models.matrix` from tests/ prints the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.models
import numpy as np
import pytest
from engine.config_json.test_published_config import NOT_READ
from engine.models import doubles, further, page, plain, published
from engine.models.names import HELPERS, NAMES, PUBLISHED_AS, REAL
from engine.models.recurrent import config_of
from mlx_lm.utils import MODEL_REMAPPING

from vllm_metal.engine.attention.layers import AttentionLayer, attention_layers
from vllm_metal.engine.config_json import published_config
from vllm_metal.engine.kv_cache.formats import OFFERED
from vllm_metal.engine.kv_cache.pages import BlockPages, page_rows
from vllm_metal.engine.kv_cache.scatter import SCATTER
from vllm_metal.engine.models.mtp_families import MTP_FAMILIES
from vllm_metal.engine.models.parts import ModelParts
from vllm_metal.patches.mlx_patches import registry

HEAD = (
    "Module",
    "Example",
    "Cache",
    "Prefix caching",
    "Drafts",
    "KV cache dtypes",
    "Disk, P/D",
    "Tested weights",
    "Reference",
    "Rejected because it",
)
_BLOCK = 16


@dataclass(frozen=True)
class Row:
    """The facts about a module."""

    module: str
    cells: tuple[str, ...]
    refused: str = ""

    def __str__(self) -> str:
        cells = (self.module, NAMES[self.module], *self.cells, self.refused)
        return "| " + " | ".join(cells) + " |"


def modules() -> list[str]:
    """Returns mlx-lm's language model modules."""
    files = Path(mlx_lm.models.__path__[0]).glob("*.py")
    return sorted((path.stem for path in files if path.stem not in HELPERS), key=str.lower)


def of_transformers() -> dict[str, published.Published]:
    """Maps modules to the small transformers models that they can read."""
    found: dict[str, published.Published] = {}
    refused = (family for family, _ in published.REFUSED.values())
    for family in (*published.FAMILIES.values(), *refused):
        name = MODEL_REMAPPING.get(family.model_type, family.model_type)
        found.setdefault(PUBLISHED_AS.get(name, name), family)
    return found


def small_model(module: str) -> Any:
    """Makes a model without computing its weights."""
    own = plain.with_those_of_states() | {name: f for name, (f, _) in further.REFUSED.items()}
    model_class, arguments = registry.classes({"model_type": module})
    if module in own:
        return model_class(arguments.from_dict(config_of(own[module])))
    family = of_transformers()[module]
    config = published.configuration(family).to_dict() | {"model_type": family.model_type}
    read = published_config.as_read(config, module, arguments)
    return model_class(arguments.from_dict(config | read))


def reference(module: str) -> str:
    """Returns the reference: transformers, or mlx-lm if it cannot read transformers' files."""
    read = module in of_transformers() and module not in NOT_READ
    return "transformers" if read else "mlx-lm"


def row(module: str) -> Row:
    """Makes a row from a module's small model."""
    judge = REAL.get(module, "small"), reference(module)
    model = small_model(module)
    try:
        layers = attention_layers(model, module)
    except NotImplementedError as refused:
        reason = str(refused.__cause__)
        return Row(module, (*("",) * 5, *judge), reason)
    states = any(layer.state_bytes for layer in layers)
    has_kv = any(isinstance(layer, AttentionLayer) for layer in layers)
    cells = (
        ", ".join(page.kinds(layers)),
        "in blocks as large as a state" if states else "yes",
        drafts(model, module),
        ", ".join(OFFERED) if has_kv else "auto",
        "yes" if moves(layers) else "no",
    )
    return Row(module, (*cells, *judge))


def drafts(model: Any, module: str) -> str:
    """Returns the kinds of speculation; external heads need hidden states and an embedding."""
    parts = ModelParts(model)
    try:
        parts.observe(lambda states: None)
        assert parts.input_embedding is not None
    except NotImplementedError:
        return "n-gram, suffix, draft model"
    with_layer = {name for family in MTP_FAMILIES.values() for name in family.model_types}
    return "all, MTP" if module in with_layer else "all"


def moves(layers: list[Any]) -> bool:
    """Returns whether a block can leave the pool as page rows and return, as for disk and peers."""
    states = {layer.name: layer.allocate(3, _BLOCK, mx.float32, SCATTER) for layer in layers}
    pages = BlockPages(states, [[name] for name in states])
    block = np.array([1], np.int32)
    for group in range(len(states)):
        rows = page_rows(pages.export(group, block))
        pages.import_pages(group, block, rows)
    return True


def table() -> Iterator[str]:
    """Yields lines of Markdown."""
    yield "| " + " | ".join(HEAD) + " |"
    yield "| " + " | ".join("---" for _ in HEAD) + " |"
    for module in modules():
        yield str(row(module))


def served(rows: list[Row]) -> float:
    """Returns the share of supported rows."""
    return sum(not row.refused for row in rows) / len(rows)


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        doubles.install(patch)
        print("\n".join(table()))
