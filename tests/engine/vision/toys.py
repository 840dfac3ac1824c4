# SPDX-License-Identifier: Apache-2.0
"""Toy models that read images, beside transformers' class of the same files; features by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import torch
import transformers
from engine.vision import checkpoints
from engine.vision.by_hand import ByHand, feature

from vllm_metal.engine.models import loader
from vllm_metal.engine.vision.encoder import Encoder
from vllm_metal.engine.vision.families import FAMILIES
from vllm_metal.engine.vision.loading import fitted
from vllm_metal.engine.vision.tower import load_weights


@dataclass(frozen=True)
class Picture:
    """What a processor makes of an image: rows in the prompt, and the tower's inputs."""

    ids: list[int]  # in the prompt
    is_embed: list[bool]  # which of them the tower makes embeddings for
    data: dict[str, np.ndarray]


@dataclass
class Prompt:
    """A prompt with pictures at their places."""

    ids: list[int] = field(default_factory=list)
    placed: list[tuple[int, Picture, str]] = field(default_factory=list)
    modality: str = "image"

    def say(self, *ids: int) -> Prompt:
        self.ids += ids
        return self

    def show(self, picture: Picture, identifier: str) -> Prompt:
        self.placed.append((len(self.ids), picture, identifier))
        self.ids += picture.ids
        return self

    @property
    def features(self):
        return [
            feature(
                picture.data,
                offset,
                len(picture.ids),
                identifier,
                picture.is_embed,
                self.modality,
            )
            for offset, picture, identifier in self.placed
        ]


class Toy:
    """A family's toy on the disk, with both of its models."""

    def __init__(self, name: str, folder: Path, **changes: Any):
        self.name, self.folder = name, folder
        changes = CHANGES.get(name, {}) | changes
        checkpoints.FAMILIES[name].write(folder, **changes)
        self.config = transformers.AutoConfig.from_pretrained(folder)
        self.rng = np.random.default_rng(5)

    @cached_property
    def reference(self):
        cls = getattr(transformers, checkpoints.FAMILIES[self.name].architecture)
        return cls.from_pretrained(self.folder, dtype=torch.float32).eval()

    def served(self, **options: Any) -> ByHand:
        text = loader.lazy_model(self.folder, mx.float32)
        family = FAMILIES[self.name]
        tower = family.tower(self.config.to_dict())
        load_weights(tower, self.folder, mx.float32, {})
        self.encoder = Encoder(tower, mx.float32)
        column_of: Callable[..., Any] = partial(
            fitted, self.encoder, config=self.config.to_dict(), family=family
        )
        return ByHand(text, self.name, column_of, **options)

    def words(self, count: int) -> list[int]:
        return self.rng.integers(120, 220, count).tolist()

    def picture(self, rows: int, columns: int) -> Picture:
        return _PICTURES[self.name](self, rows, columns)

    def video(self, frames: int, rows: int, columns: int) -> Picture:
        """Frames of Qwen's, each behind words that say its time and between two marks."""
        one = self.picture(rows, columns)
        config, count = self.config, rows * columns
        ids: list[int] = []
        for _ in range(frames):
            ids += [*self.words(2), config.vision_start_token_id]
            ids += [config.video_token_id] * count + [config.vision_end_token_id]
        grid = one.data["image_grid_thw"] * [frames, 1, 1]
        width = one.data["pixel_values"].shape[1]
        pixels = self.rng.normal(size=(grid.prod(), width)).astype(np.float32)
        of_frames = [token == config.video_token_id for token in ids]
        return Picture(ids, of_frames, {"pixel_values_videos": pixels, "video_grid_thw": grid})

    def end(self, prompt: Prompt, wished: int) -> int:
        """Where a chunk may end, near `wished`: not inside an image that is read whole."""
        for offset, picture, _ in prompt.placed if FAMILIES[self.name].whole else ():
            if offset < wished < offset + len(picture.ids):
                return offset or len(picture.ids)
        return wished

    def logits(self, prompt: Prompt, ids: list[int] | None = None) -> np.ndarray:
        """[n, V] of transformers' model, of the prompt or of `ids`, which begin with it."""
        tokens = torch.tensor([ids or prompt.ids])
        data: dict[str, Any] = {}
        if self.name in ("llava", "mistral3") and prompt.placed:
            return self._logits_of_shapes(prompt, tokens)
        if self.name == "gemma4" and prompt.placed:
            data = self._filled_up(prompt)
        for name in prompt.placed[0][1].data if prompt.placed and not data else ():
            parts = [torch.as_tensor(picture.data[name]) for _, picture, _ in prompt.placed]
            data[name] = torch.stack(parts) if "grid" in name else torch.cat(parts)
        if "spatial_shapes" in data:
            patches = torch.arange(data["pixel_values"].shape[1])
            data["pixel_attention_mask"] = (
                patches < data["spatial_shapes"].prod(dim=1, keepdim=True)
            ).int()
        if self.name.startswith(("qwen", "gemma")):
            of_images = tokens == self.image_token
            key = "token_type_ids" if self.name == "gemma3" else "mm_token_type_ids"
            data[key] = of_images.int()
            if prompt.modality == "video":
                data[key] = 2 * (tokens == self.config.video_token_id).int()
        with torch.inference_mode():
            out = self.reference(input_ids=tokens, **data)
        return out.logits[0].numpy()

    def rounding(self, prompt: Prompt) -> float:
        """How far transformers' logits move if each weight moves by up to a unit of float32's last
        place: what a computation in float32 cannot be expected to do better than.
        """
        plain = {name: each.clone() for name, each in self.reference.named_parameters()}
        logits, random, moves = self.logits(prompt), torch.Generator().manual_seed(0), []
        for _ in range(3):
            with torch.no_grad():
                for name, each in self.reference.named_parameters():
                    shifts = 2 * torch.rand(each.shape, generator=random) - 1
                    each.copy_(plain[name] * (1 + shifts * torch.finfo(torch.float32).eps))
            moves.append(np.abs(self.logits(prompt) - logits).max())
        self.reference.load_state_dict(plain, strict=False)
        return float(max(moves))

    def _logits_of_shapes(self, prompt: Prompt, tokens: torch.Tensor) -> np.ndarray:
        """Images of several shapes are padded, and their sizes told."""
        pixels = [picture.data["pixel_values"] for _, picture, _ in prompt.placed]
        height, width = (max(each.shape[axis] for each in pixels) for axis in (1, 2))
        padded = np.zeros((len(pixels), 3, height, width), np.float32)
        for target, each in zip(padded, pixels, strict=True):
            target[:, : each.shape[1], : each.shape[2]] = each
        sizes = torch.tensor([each.shape[1:] for each in pixels])
        with torch.inference_mode():
            out = self.reference(
                input_ids=tokens, pixel_values=torch.as_tensor(padded), image_sizes=sizes
            )
        return out.logits[0].numpy()

    def _filled_up(self, prompt: Prompt) -> dict[str, torch.Tensor]:
        """Patches of all images, each filled up to the number of the largest."""
        pictures = [picture.data for _, picture, _ in prompt.placed]
        most = max(len(each["pixel_values"]) for each in pictures)
        filled: dict[str, list[np.ndarray]] = {"pixel_values": [], "pixel_position_ids": []}
        for each in pictures:
            missing = ((0, most - len(each["pixel_values"])), (0, 0))
            for name, fill in (("pixel_values", 0), ("pixel_position_ids", -1)):
                filled[name].append(np.pad(each[name], missing, constant_values=fill))
        return {
            "pixel_values": torch.as_tensor(np.stack(filled["pixel_values"])),
            "image_position_ids": torch.as_tensor(np.stack(filled["pixel_position_ids"])),
        }

    @property
    def image_token(self) -> int:
        config = self.config
        return getattr(config, "image_token_id", None) or config.image_token_index


def _qwen(toy: Toy, rows: int, columns: int) -> Picture:
    vision = toy.config.vision_config
    merge = vision.spatial_merge_size
    grid = np.array([1, rows * merge, columns * merge])
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    pixels = toy.rng.normal(size=(grid.prod(), width)).astype(np.float32)
    count = rows * columns
    data = {"pixel_values": pixels, "image_grid_thw": grid}
    return Picture([toy.image_token] * count, [True] * count, data)


def _lfm2(toy: Toy, rows: int, columns: int) -> Picture:
    """A tile of 2 x 2 tokens and a thumbnail, each behind a mark; patches are padded."""
    vision, factor = toy.config.vision_config, toy.config.downsample_factor
    shapes = np.array([[2, 2], [rows, columns]]) * factor
    most, width = 100, vision.num_channels * vision.patch_size**2
    pixels = toy.rng.normal(size=(len(shapes), most, width)).astype(np.float32)
    mark = toy.image_token - 1  # any other token
    ids = [mark, *[toy.image_token] * 4, mark, *[toy.image_token] * rows * columns, mark]
    of_image = [token == toy.image_token for token in ids]
    return Picture(ids, of_image, {"pixel_values": pixels, "spatial_shapes": shapes})


def _inkling(toy: Toy, rows: int, columns: int) -> Picture:
    """A mark, then a token for each patch."""
    count, vision = rows * columns, toy.config.vision_config
    side = vision.patch_size
    shape = count, vision.temporal_patch_size, side, side, 3
    pixels = toy.rng.normal(size=shape).astype(np.float32)
    ids = [toy.config.image_bos_token_id, *[toy.image_token] * count]
    return Picture(ids, [False, *[True] * count], {"pixel_values": pixels})


def _mistral(toy: Toy, rows: int, columns: int) -> Picture:
    """Rows of tokens, each with a break behind it."""
    merged = getattr(toy.config, "spatial_merge_size", 1)  # Pixtral's alone merges nothing
    side = toy.config.vision_config.patch_size * merged
    pixels = toy.rng.normal(size=(3, rows * side, columns * side)).astype(np.float32)
    line = [toy.image_token] * columns + [toy.image_token - 1]  # any other token
    ids = line * rows
    return Picture(ids, [token == toy.image_token for token in ids], {"pixel_values": pixels})


def _gemma(toy: Toy, rows: int, columns: int) -> Picture:
    """All images have one size."""
    side = toy.config.vision_config.image_size
    pixels = toy.rng.normal(size=(1, 3, side, side)).astype(np.float32)
    count = toy.config.mm_tokens_per_image
    return Picture([toy.image_token] * count, [True] * count, {"pixel_values": pixels})


def _gemma4(toy: Toy, rows: int, columns: int) -> Picture:
    """Patches with their places, filled up by those of none."""
    vision = toy.config.vision_config
    kernel, most = vision.pooling_kernel_size, 24
    y, x = np.indices((rows * kernel, columns * kernel)).reshape(2, -1)
    fill = most * kernel**2 - len(x)
    places = np.pad(np.stack([x, y], axis=1), ((0, fill), (0, 0)), constant_values=-1)
    pixels = toy.rng.uniform(size=(len(x), 3 * vision.patch_size**2)).astype(np.float32)
    pixels = np.pad(pixels, ((0, fill), (0, 0)))
    count = rows * columns
    data = {"pixel_values": pixels, "pixel_position_ids": places}
    return Picture([toy.image_token] * count, [True] * count, data)


#: Changes to the text's configuration.
CHANGES: dict[str, dict[str, Any]] = {"qwen3_5": {"partial_rotary_factor": 0.5}}
_PICTURES: dict[str, Callable[[Toy, int, int], Picture]] = {
    "gemma3": _gemma,
    "gemma4": _gemma4,
    "inkling_mm_model": _inkling,
    "lfm2_vl": _lfm2,
    "llava": _mistral,
    "mistral3": _mistral,
    "qwen3_5": _qwen,
    "qwen3_vl": _qwen,
}
