# SPDX-License-Identifier: Apache-2.0
"""Cuts a model into the shares of a tensor group's ranks, or says why it cannot be cut."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm_metal.mlx_patches import registry

if TYPE_CHECKING:
    import mlx.core as mx
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
        method(group)
    except (ValueError, AssertionError) as error:
        raise ShardingError(
            f"--tensor-parallel-size {size} does not divide {model_type!r}: {error}"
        ) from error
    _check_counts(before, _counts(model), size, model_type)


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
