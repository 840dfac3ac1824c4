# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel sharding: splits a model among ranks, or raises with the reason it cannot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from vllm_metal.engine.weights.layers import is_scaled, make_plain, make_scaled
from vllm_metal.patches.mlx_patches import registry

if TYPE_CHECKING:
    import mlx.nn as nn


class ShardingError(ValueError):
    """A model that ranks cannot share."""


def refusal(config: Mapping[str, Any]) -> str | None:
    """Why a family's heads cannot be split, from a config.json alone; None: mlx-lm can do it.

    Args:
        config: of config.json.
    """
    try:
        model, _ = registry.classes(dict(config))
    except ValueError as error:
        return str(error)
    if not hasattr(model, "shard"):
        return f"mlx-lm's module of model_type {config['model_type']!r} cannot split its heads"
    return None


def shard(model: nn.Module, group: mx.distributed.Group, model_type: str) -> None:
    """Leaves a rank its share of a model: heads, columns of experts and of MLPs.

    The embedding is whole on every rank. It is called before weights are read, so that each rank
    reads the share alone into memory.

    Args:
        model: mlx-lm's, lazy.
        group: the ring.
        model_type: for messages.

    Raises:
        ShardingError: the family has no way to, or its sizes do not divide by the ranks.
    """
    size = group.size()
    method = getattr(model, "shard", None)
    if method is None:
        raise ShardingError(
            f"--tensor-parallel-size {size}: mlx-lm's module of model_type {model_type!r} cannot "
            "split its heads"
        )
    before = _counts(model)
    try:
        _without_scales(model, partial(method, group))
    except ShardingError:
        raise
    except (ValueError, AssertionError) as error:
        raise ShardingError(
            f"--tensor-parallel-size {size} does not divide {model_type!r}: {error}"
        ) from error
    _check_counts(before, _counts(model), size, model_type)


def _without_scales(model: nn.Module, method: Callable[[], object]) -> None:
    """Splits layers with an output scale, which mlx-lm's methods do not know.

    For as long as it takes, the scale stands beside the layer's bias: both are of rows.

    Raises:
        ShardingError: a layer's inputs are to be split, and come in an order of their own.
    """
    held = {}
    for path, module in model.named_modules():
        if is_scaled(module):
            bias, scale = module.get("bias"), module.pop("output_scale", None)
            held[path] = (bias, scale, module.pop("input_order", None), module["scales"].shape[-1])
            if scale is not None:
                beside = mx.zeros_like(scale) if bias is None else bias.astype(mx.float32)
                module.bias = mx.stack([beside, scale])
            make_plain(module)
    method()
    modules = dict(model.named_modules())
    for path, (bias, scale, order, groups) in held.items():
        module = modules[path]
        make_scaled(module)
        if scale is not None:
            both = module.pop("bias")
            if bias is not None:
                module.bias = both[0].astype(bias.dtype)
            split = both.shape[-1] != scale.shape[-1]
            module["output_scale"] = mx.contiguous(both[1]) if split else scale
        if order is not None:
            if module["scales"].shape[-1] != groups:
                raise ShardingError(
                    f"--tensor-parallel-size is not supported with {path}: its inputs have an "
                    "order of their own (g_idx), and ranks would have parts of them. Choose a "
                    "checkpoint without activation order (desc_act=false)."
                )
            module["input_order"] = order
        module.freeze()


def _counts(model: nn.Module) -> dict[tuple[str, str], int]:
    """Whole numbers that modules compute with, such as their heads, by place and name."""
    return {
        (place, name): value
        for place, module in model.named_modules()
        for name, value in vars(module).items()
        if type(value) is int
    }


def _check_counts(
    before: Mapping[tuple[str, str], int],
    after: Mapping[tuple[str, str], int],
    size: int,
    model_type: str,
) -> None:
    """Refuses heads that were rounded: mlx-lm divides their number without a look at the rest.

    A family may give each rank a copy of a key head where there are fewer than ranks.
    """
    for (place, name), count in after.items():
        whole = before.get((place, name), count)
        copied = count == 1 and 0 < whole < size and size % whole == 0
        if count != whole and count * size != whole and not copied:
            raise ShardingError(
                f"--tensor-parallel-size {size} does not divide {name} {whole} of {model_type!r} "
                f"({place})"
            )
