# SPDX-License-Identifier: Apache-2.0
"""A tower: mlx-vlm's modules that make embeddings of images, with the checkpoint's weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from vllm_metal.engine.models import loader
from vllm_metal.engine.weights import files
from vllm_metal.engine.weights.judge import plan_of
from vllm_metal.engine.weights.loading import packings_of_mlx
from vllm_metal.engine.weights.placing import Placed, install, place
from vllm_metal.identity.model_files import ModelLoadError

Config = Mapping[str, Any]


def with_projector(tower: str) -> Mapping[str, str]:
    """`Tower.parts` of a tower with a projector beside it, as transformers and mlx-vlm name them.

    Args:
        tower: the attribute that the tower's own weights belong to.
    """
    return {
        f"{before}{name}": attribute
        for before in ("model.", "")
        for name, attribute in {  # the longer ones first
            "vision_tower.vision_model": tower,
            "vision_tower": tower,
            "multi_modal_projector": "multi_modal_projector",
        }.items()
    }


class Tower(nn.Module, ABC):
    """Modules of a vision tower and its projector; one class for each family.

    A family's class makes them of the configuration, under the names of `parts`.
    """

    #: What checkpoints put before the names of the tower's weights, and the attribute that it is.
    parts: ClassVar[Mapping[str, str]]
    #: What the names here begin with of weights that checkpoints have and nobody reads.
    unread: ClassVar[tuple[str, ...]] = ()
    #: How many of the text model's layers add something to rows of images (see deepstack).
    levels: int = 0

    @abstractmethod
    def encode(self, modality: str, data: Mapping[str, mx.array]) -> mx.array:
        """[n, 1 + levels, H] of an image or a video; lazy.

        Args:
            modality: "image" or "video".
            data: what vLLM's processor of the family made of it, by name.

        Raises:
            Exception: it cannot be computed.
        """

    @abstractmethod
    def sample(self, rows: int) -> Mapping[str, mx.array]:
        """What `encode` takes of an image that makes about so many rows, to measure it."""

    def check_fixed(self, config: Config, **fixed: Any) -> None:
        """Refuses what mlx-vlm's modules have no choice of.

        Args:
            config: of the tower, or of the whole model.
            fixed: the values that they compute, by key.

        Raises:
            ModelLoadError: the configuration has another one.
        """
        for key, value in fixed.items():
            if config.get(key, value) != value:
                raise ModelLoadError(
                    f"config.json sets {key}={config[key]!r}, but the vision tower supports only "
                    f"{value!r}"
                )

    def own_name(self, name: str) -> str | None:
        """The name here of a checkpoint's array; None where it is of the text model."""
        for before, attribute in self.parts.items():
            if name.startswith(f"{before}."):
                return attribute + name[len(before) :]
        return None

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """The arrays as mlx-vlm's modules take them, of those of transformers or mlx-vlm."""
        weights = {n: a for n, a in weights.items() if not n.startswith(self.unread)}
        for part in self.children().values():
            if hasattr(part, "sanitize"):
                weights = part.sanitize(weights)
        return weights


def load_weights(tower: Tower, folder: Path, dtype: mx.Dtype, config: Config) -> None:
    """Fills a tower from a checkpoint's files.

    Args:
        tower: as it was made.
        folder: of the checkpoint.
        dtype: of floating-point numbers.
        config: of config.json.

    Raises:
        ModelLoadError: weights are missing, or the tower has no place for some.
    """
    headers = files.headers(folder)
    plan = plan_of(config, headers, folder)
    mine = {name: header for name, header in headers.items() if tower.own_name(name) is not None}
    if not mine:
        raise ModelLoadError(
            f"{folder} has no weights of a vision tower: serve its text with --language-model-only"
        )
    weights = plan.converted(files.arrays_of(mine), dtype)
    named = {str(tower.own_name(name)): weight for name, weight in weights.items()}
    stored = {str(tower.own_name(n)): s for n, s in plan.weights.items() if n in weights}
    try:
        placed = place(tower, named, stored, dtype, lambda tower, given: tower.sanitize(given))
        packings = placed.packings
        if config.get("quantization"):
            packings = packings_of_mlx(tower, config["quantization"], placed.arrays)
        arrays = loader.in_dtype(placed.arrays, dtype)
        install(tower, Placed(arrays, packings))
    except ValueError as error:
        raise ModelLoadError(f"the vision tower in {folder}: {str(error)[:400]}") from error
    tower.eval()
    mx.eval(tower.parameters())
