# SPDX-License-Identifier: Apache-2.0
"""Base class of vision towers: mlx-vlm's modules filled with the checkpoint's weights."""

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
    """Makes `Tower.parts`, checkpoint prefix to attribute, of a tower with a projector.

    `tower` is the attribute that holds the tower's own weights.
    """
    return {
        f"{before}{name}": attribute
        for before in ("model.", "")
        for name, attribute in {  # longer prefixes first: the first match wins
            "vision_tower.vision_model": tower,
            "vision_tower": tower,
            "multi_modal_projector": "multi_modal_projector",
        }.items()
    }


class Tower(nn.Module, ABC):
    """A vision tower and its projector; one subclass per family.

    A subclass takes the whole model's configuration, builds the modules under the attributes
    named in `parts`, and raises ModelLoadError for what mlx-vlm's modules do not compute.
    """

    #: Maps prefixes of the tower's weights in checkpoints to attributes of the tower.
    parts: ClassVar[Mapping[str, str]]
    #: Prefixes, in the tower's own names, of checkpoint weights that are not used.
    unread: ClassVar[tuple[str, ...]] = ()
    #: Number of text layers that add something to image tokens (see deepstack).
    levels: int = 0

    @abstractmethod
    def encode(self, modality: str, data: Mapping[str, mx.array]) -> mx.array:
        """Computes an image or a video, lazily: [n, 1 + levels, H].

        `data` maps names to outputs of vLLM's processor. Raises what mlx-vlm's modules raise.
        """

    @abstractmethod
    def sample(self, rows: int) -> Mapping[str, mx.array]:
        """Inputs of `encode` for an image of about `rows` tokens, used to measure memory."""

    def check_fixed(self, config: Config, **fixed: Any) -> None:
        """Raises ModelLoadError if a key of `fixed` has another value in `config`."""
        for key, value in fixed.items():
            if config.get(key, value) != value:
                raise ModelLoadError(
                    f"config.json sets {key}={config[key]!r}, but the vision tower supports only "
                    f"{value!r}"
                )

    def own_name(self, name: str) -> str | None:
        """A checkpoint array's name in the tower; None if it belongs to the text model."""
        for before, attribute in self.parts.items():
            if name.startswith(f"{before}."):
                return attribute + name[len(before) :]
        return None

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Converts arrays named by transformers or mlx-vlm to what mlx-vlm's modules take."""
        weights = {n: a for n, a in weights.items() if not n.startswith(self.unread)}
        for part in self.children().values():
            if hasattr(part, "sanitize"):
                weights = part.sanitize(weights)
        return weights


def load_weights(tower: Tower, folder: Path, dtype: mx.Dtype, config: Config) -> None:
    """Fills a tower with a checkpoint's weights. Raises ModelLoadError if any do not fit."""
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
