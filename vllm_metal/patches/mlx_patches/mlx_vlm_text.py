# SPDX-License-Identifier: Apache-2.0
"""Makes text models of mlx-vlm look like mlx-lm's, and routes what they share to mlx-lm's code.

mlx-vlm has copies of mlx-lm's building blocks. Models get mlx-lm's instead, so that the patches of
these hold for both libraries.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import mla, rope_utils, switch_layers

from vllm_metal.patches.mlx_patches.mlx_vlm_families import family
from vllm_metal.patches.mlx_patches.replacing import MLX_VLM, check_release, spread
from vllm_metal.patches.mlx_patches.seam import AttendingCache
from vllm_metal.settings.mlx_vlm_models import RELEASES, TextModel

#: Files of a family's folder that build no part of its text model.
_NOT_OF_TEXT = ("audio", "image", "processing", "video", "vision")
#: Attributes in which a `LanguageModel` keeps positions from one call to the next.
_POSITION_STATE = ("_position_ids", "_rope_deltas")
_COORDINATES = 3  # of positions in images and videos: time, height, width
#: Classes that mlx-vlm has copied, by mlx-lm's module; mlx-vlm's module has the same name.
_BLOCKS = {
    mla: ("MultiLinear", "QuantizedMultiLinear"),
    switch_layers: ("SwitchLinear", "QuantizedSwitchLinear"),
}


def classes(row: TextModel) -> tuple[type, type]:
    """Returns a family's text model and its configuration class; imports its modules.

    Raises:
        ImportError: mlx-vlm is not installed; the message has the install command.
        ValueError: the rows were written for another release of mlx-vlm.
    """
    module = imported(row)
    return _text_model(row, module.Model), module.ModelConfig


def imported(row: TextModel) -> ModuleType:
    """Imports the package of a row's family; errors as in `classes`."""
    module = family(row.folder, f"a model of mlx-vlm's family {row.folder}")
    check_release("mlx-vlm", RELEASES, repr(row.folder))
    return module


def text_arguments(folder: str) -> type | None:
    """Returns the class that reads `text_config` in a family's config.json, if it has one."""
    module = sys.modules.get(f"{MLX_VLM}{folder}")
    return None if module is None else getattr(module, "TextConfig", None)


@functools.cache
def sources(arguments: type) -> list[Path]:
    """Returns the files that may read a field of a configuration class of mlx-vlm's."""
    folder = arguments.__module__.rpartition(".")[0]
    language = getattr(sys.modules.get(f"{folder}.language"), "LanguageModel", None)
    bases = {cls.__module__ for cls in getattr(language, "__mro__", ())}
    folders = {folder, *(base.rpartition(".")[0] for base in bases if base.startswith(MLX_VLM))}
    paths = [
        path
        for name in sorted(folders)
        for path in sorted(Path(cast(str, sys.modules[name].__file__)).parent.glob("*.py"))
    ]
    return [path for path in paths if not path.stem.startswith(_NOT_OF_TEXT)]


def install() -> None:
    """Replaces building blocks in the modules of mlx-vlm imported so far; idempotent."""
    ropes = sys.modules.get(f"{MLX_VLM}rope_utils")
    if ropes is not None:
        own = inspect.unwrap(ropes.initialize_rope)
        spread("initialize_rope", own, _rope_of_mlx_lm(own))
    base = sys.modules.get(f"{MLX_VLM}base")
    if base is not None:
        own = inspect.unwrap(base.cache_position_offset)
        spread("cache_position_offset", own, _offset_of_dense_caches(own))
    for part, names in _BLOCKS.items():
        copies = sys.modules.get(f"{MLX_VLM}{part.__name__.rpartition('.')[2]}")
        for name in names if copies is not None else ():
            of_mlx_vlm, of_mlx_lm = getattr(copies, name), getattr(part, name)
            if of_mlx_vlm is not of_mlx_lm:
                spread(name, of_mlx_vlm, of_mlx_lm)


@functools.cache
def _offset_of_dense_caches(own: Callable[[Any], int]) -> Callable[[Any], int]:
    @functools.wraps(own)
    def cache_position_offset(cache: Any) -> int:
        if isinstance(cache, AttendingCache):
            raise NotImplementedError("the model reads one position for all texts of a step")
        return own(cache)

    return cache_position_offset


@functools.cache
def _rope_of_mlx_lm(own: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    # mlx-vlm's LongRoPE chooses its factors by the longest text of a batch: a text's K would
    # depend on the others in its step.
    @functools.wraps(own)
    def initialize_rope(
        dims: int,
        base: float,
        traditional: bool,
        scaling_config: dict[str, Any] | None = None,
        max_position_embeddings: int | None = None,
        implementation: str = "fast",
        original_max_position_embeddings: int | None = None,
    ) -> nn.Module:
        if implementation != "fast":
            return own(dims, base, traditional, scaling_config, implementation=implementation)
        if scaling_config is not None and original_max_position_embeddings is not None:
            trained = {"original_max_position_embeddings": original_max_position_embeddings}
            scaling_config = {**scaling_config, **trained}
        rope: nn.Module = rope_utils.initialize_rope(
            dims, base, traditional, scaling_config, max_position_embeddings
        )
        return rope

    return initialize_rope


def _check_positions(language_model: nn.Module, row: TextModel) -> None:
    """Raises NotImplementedError if a model remembers positions of the newest call's text."""
    for name in _POSITION_STATE:
        if hasattr(language_model, name):
            raise NotImplementedError(
                f"mlx-vlm's family {row.folder} keeps {name} of one text in its module, which is "
                "not supported with texts that share a step"
            )


def _positions(inputs: mx.array, cache: Any, axes: str) -> mx.array:
    """Returns positions of [B, L] tokens after `cache`, the same in each of three coordinates."""
    # Text positions; those of images differ. A cache of a step has [B] offsets, any other has one.
    offset = 0 if cache is None else cache[0].offset
    positions = mx.arange(inputs.shape[1]) + mx.array(offset).reshape(-1, 1)
    positions = mx.broadcast_to(positions, inputs.shape)
    if "c" not in axes:
        return positions
    positions = mx.broadcast_to(positions[None], (_COORDINATES, *inputs.shape))
    return positions.transpose(*map("cbt".index, axes))


def _logits(
    language_model: nn.Module, inputs: mx.array, cache: Any, positions: mx.array
) -> mx.array:
    # Without the code of `LanguageModel.__call__`, which keeps positions of one text between calls.
    hidden = language_model.model(inputs, cache=cache, position_ids=positions)
    tied = "lm_head" not in language_model
    head = language_model.model.embed_tokens.as_linear if tied else language_model.lm_head
    scale = getattr(language_model.args, "logit_scale", None)
    return cast(mx.array, head(hidden) if scale is None else head(hidden) * scale)


class _NoTower:
    """Stands for a tower of a family's model; leaves the tower's tensors as they are."""

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        return weights


@functools.cache
def _text_model(row: TextModel, family_model: Any) -> type:
    code = sys.modules[family_model.__module__]

    # A subclass, for the methods with which the family renames a checkpoint's tensors.
    class Model(family_model):
        """A family's text model, without towers, with the interface of mlx-lm's models."""

        #: See TextModel; tensors with these prefixes are left out.
        tower_tensors = row.tower_tensors

        def __init__(self, config: Any) -> None:
            nn.Module.__init__(self)
            text = _text_config(config, code)
            self.config, self.args = config, text
            self.model_type = config.model_type
            self.language_model = _language_model(code.LanguageModel, text, config)
            if not row.position_axes:
                _check_positions(self.language_model, row)
            for name in row.towers:
                object.__setattr__(self, name, _NoTower())

        def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
            if row.position_axes:
                positions = _positions(inputs, cache, row.position_axes)
                return _logits(self.language_model, inputs, cache, positions)
            return cast(mx.array, self.language_model(inputs, cache=cache).logits)

        @property
        def layers(self) -> Any:
            return self.language_model.layers

        def make_cache(self) -> list[Any]:
            from mlx_vlm.models.cache import make_prompt_cache

            return make_prompt_cache(self.language_model)

    Model.__module__, Model.__qualname__ = family_model.__module__, "Model"
    return Model


def _text_config(config: Any, code: ModuleType) -> Any:
    """Returns the text model's configuration; sets it in `config` if it is a mapping there."""
    if not hasattr(config, "text_config"):
        return config
    if isinstance(config.text_config, Mapping):
        arguments: Any = text_arguments(code.__name__.split(".")[2])
        config.text_config = arguments.from_dict(dict(config.text_config))
    return config.text_config


def _language_model(cls: Any, text: Any, config: Any) -> nn.Module:
    takes_both = "config" in list(inspect.signature(cls).parameters)[1:]
    model: nn.Module = cls(text, config) if takes_both else cls(text)
    if not hasattr(model, "args"):
        model.args = text
    return model
