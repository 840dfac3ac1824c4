# SPDX-License-Identifier: Apache-2.0
"""Loads the arrays of an MTP layer for the mlx-lm modules that compute it.

mlx-lm's families skip MTP layers when they read a checkpoint (`sanitize`). Here the layer's arrays
get the names of a regular layer, so that the family treats them like the target's: it stacks
experts, splits MLA projections, decodes fp8 and shifts norms.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn

from vllm_metal.engine.models import loader
from vllm_metal.engine.models.mtp_families import MTPFamily
from vllm_metal.engine.weights.placing import Placed, place
from vllm_metal.patches.mlx_patches.families.text_models import stacked

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_BLOCK = re.compile(r"^block\.(layer\.)?")  # before the names of the decoder layer's own arrays
#: Families recognize a converted checkpoint by its shape.
_CONVOLUTION = "conv1d.weight"
_PUBLISHED, _CONVERTED = (1, 1, 2), (1, 2, 1)  # shapes of one
_NORMS = ("embedding_norm.weight", "hidden_norm.weight", "norm.weight")


def mtp_weights(
    config: VllmConfig,
    family: MTPFamily,
    model: nn.Module,
    num_layers: int,
    head: nn.Module,
    index: int = 0,
) -> Placed:
    """Returns a layer's arrays by MTPHead's names, with prefix `block.` for its decoder layer.

    Args:
        config: vLLM's configuration; its speculative_config names the checkpoint.
        family: the target's MTP family.
        model: the target in mlx-lm.
        num_layers: number of the target's layers.
        head: the MTP head, without weights.
        index: index of the MTP layer.

    Raises:
        loader.ModelLoadError: the checkpoint has no such MTP layer, or is unreadable.
    """
    assert config.speculative_config is not None
    model_config = config.speculative_config.draft_model_config
    is_split = getattr(model_config.hf_config, "is_split", False)
    own_name = partial(family.own_name, num_layers=num_layers, is_split=is_split, index=index)

    def wanted(name: str) -> bool:
        marks = family.norms_from_zero and name.endswith(_CONVOLUTION)
        return marks or own_name(name) is not None

    found, plan = loader.load_checkpoint(model_config, config, wanted)
    convolutions = {name: found.pop(name) for name in [*found] if name.endswith(_CONVOLUTION)}
    if not found:
        raise loader.ModelLoadError(
            f"{model_config.model} contains no MTP layers "
            f"({family.prefix.format(num_layers + index)}*): "
            'most conversions to MLX drop them. Set "model" in --speculative-config to the '
            "original checkpoint, or choose another method"
        )
    weights = {str(own_name(name)): array for name, array in found.items()}
    stored = {str(own_name(name)): each for name, each in plan.weights.items() if name in found}
    if family.norms_from_zero:
        # A checkpoint without one has only MTP layers: as published, unless mlx-vlm has split it,
        # which adds one to the norms as mlx-lm does.
        shape = _CONVERTED if is_split else _PUBLISHED
        weights[_CONVOLUTION] = next(iter(convolutions.values()), mx.zeros(shape))

    prefix = _layer_prefix(model)
    if family.is_stack:  # it numbers its layers as the model does
        prefix = prefix.removesuffix("layers.0.")

    def sanitize(_: nn.Module, arrays: dict[str, mx.array]) -> dict[str, mx.array]:
        read = _read_as_a_layer(model, family, prefix, arrays)
        read.pop(_CONVOLUTION, None)
        return read

    dtype = loader.mlx_dtype(config)
    placed = place(head, weights, stored, dtype, sanitize)
    return replace(placed, arrays=loader.in_dtype(placed.arrays, dtype, model, prefix))


def _read_as_a_layer(
    model: nn.Module, family: MTPFamily, prefix: str, arrays: dict[str, mx.array]
) -> dict[str, mx.array]:
    # Runs the family's `sanitize` under a regular layer's names, and returns the former names.
    sanitize = getattr(model, "sanitize", None)
    if sanitize is None:
        return stacked(model, arrays)
    published = family.published or prefix
    given = {f"{published}{_BLOCK.sub('', name)}": array for name, array in arrays.items()}
    ends = [name for name in arrays if not _BLOCK.match(name)]
    block = next((match[0] for name in arrays if (match := _BLOCK.match(name))), "")
    found = {
        name.removeprefix(prefix): array
        for name, array in sanitize(dict(given)).items()
        if name.startswith(prefix)
    }
    layer_norm = "input_layernorm.weight"
    moved = found.get(layer_norm) is not given.get(f"{prefix}{layer_norm}")
    # The family shifts norms of regular layers only, so the head's own norms follow suit here.
    if family.norms_from_zero and moved:
        found |= {name: found[name] + 1.0 for name in _NORMS if name in found}
    return stacked(
        model, {name if name in ends else f"{block}{name}": array for name, array in found.items()}
    )


def _layer_prefix(model: nn.Module) -> str:
    """Returns the prefix of the first layer's arrays, such as "model.layers.0."."""
    first = model.layers[0]
    return next(f"{name}." for name, module in model.named_modules() if module is first)
