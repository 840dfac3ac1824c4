# SPDX-License-Identifier: Apache-2.0
"""Splits a model among tensor-parallel ranks, or raises with the reason it cannot."""

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
    """A model that cannot be split among ranks."""


def refusal(config: Mapping[str, Any]) -> str | None:
    """Returns why a config.json's family cannot be split by heads; None: mlx-lm can split it."""
    try:
        model, _ = registry.classes(dict(config))
    except ValueError as error:
        return str(error)
    if not hasattr(model, "shard"):
        return f"mlx-lm's module of model_type {config['model_type']!r} cannot split its heads"
    return None


def shard(model: nn.Module, group: mx.distributed.Group, model_type: str) -> None:
    """Reduces a lazy model to a rank's share of heads, and of columns of experts and MLPs.

    Call it before weights are read, so that each rank reads only its share into memory. Every rank
    keeps the whole embedding.

    Raises ShardingError: the family cannot be split, or its sizes do not divide by the ranks.
    """
    size = group.size()
    method = getattr(model, "shard", None)
    if method is None:
        raise ShardingError(
            f"--tensor-parallel-size {size} is not supported with model_type {model_type!r}: "
            "mlx-lm's module cannot split its heads. Try --pipeline-parallel-size"
        )
    before = _counts(model)
    try:
        _split_with_scales(model, partial(method, group))
    except ShardingError:
        raise
    except (ValueError, AssertionError) as error:
        raise ShardingError(
            f"--tensor-parallel-size {size} does not divide model_type {model_type!r}: {error}. "
            "Choose another size"
        ) from error
    _check_counts(before, _counts(model), size, model_type)


def _split_with_scales(model: nn.Module, method: Callable[[], object]) -> None:
    """Runs mlx-lm's sharding `method`, and splits output scales, which it does not support.

    Raises ShardingError: a layer with an input order would be split by inputs.
    """
    held = {}
    for path, module in model.named_modules():
        if is_scaled(module):
            bias, scale = module.get("bias"), module.pop("output_scale", None)
            held[path] = (bias, scale, module.pop("input_order", None), module["scales"].shape[-1])
            if scale is not None:
                # While `method` runs, the scale is stacked with the layer's bias: both are split by
                # rows.
                bias_row = mx.zeros_like(scale) if bias is None else bias.astype(mx.float32)
                module.bias = mx.stack([bias_row, scale])
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
            # Layers split by input keep all rows, and so their whole scale.
            split = both.shape[-1] != scale.shape[-1]
            module["output_scale"] = mx.contiguous(both[1]) if split else scale
        if order is not None:
            if module["scales"].shape[-1] != groups:
                raise ShardingError(
                    f"--tensor-parallel-size is not supported with {path}: its activation order "
                    "(g_idx) cannot be split between ranks. Choose a checkpoint with "
                    "desc_act=false."
                )
            module["input_order"] = order
        module.freeze()


def _counts(model: nn.Module) -> dict[tuple[str, str], int]:
    """Returns integers of modules, such as their number of heads, by path and name."""
    return {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if type(value) is int
    }


def _check_counts(
    before: Mapping[tuple[str, str], int],
    after: Mapping[tuple[str, str], int],
    size: int,
    model_type: str,
) -> None:
    """Rejects numbers of heads that do not divide by the ranks: mlx-lm ignores the remainder."""
    for (path, name), count in after.items():
        whole = before.get((path, name), count)
        # A family may copy a key head to several ranks if it has fewer heads than ranks.
        copied = count == 1 and 0 < whole < size and size % whole == 0
        if count != whole and count * size != whole and not copied:
            raise ShardingError(
                f"--tensor-parallel-size {size} does not divide {name}={whole} of {model_type!r} "
                f"({path}). Choose another size"
            )
