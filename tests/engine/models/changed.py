# SPDX-License-Identifier: Apache-2.0
"""transformers' small models with changed configurations, and the same weights where possible."""

import json
import os
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine.models.mutations import INNER, LENGTH, Change, changes, inner, omissions
from engine.models.published import (
    FAMILIES,
    VOCAB,
    Published,
    auto_class,
    draw,
    log_probabilities,
    make,
)

LARGEST = 5_000_000  # elements of a changed model
SEED = 1  # for arrays with changed shapes
TOKENS = np.random.default_rng(0).integers(3, VOCAB, LENGTH).tolist()


@dataclass(frozen=True)
class Toy:
    """A small transformers model, saved in a folder."""

    name: str
    model: torch.nn.Module
    folder: Path

    @cached_property
    def expected(self) -> np.ndarray:
        """[length, V] log-probabilities of `TOKENS`."""
        return of_text(self.model)

    @property
    def is_nested(self) -> bool:
        """Whether the text model is part of a larger one."""
        return self.model.config.get_text_config() is not self.model.config

    def changes(self) -> list[Change]:
        return list(changes(self.words))

    def omissions(self) -> list[Change]:
        return list(omissions(self.words, type(self.model.config.get_text_config())().to_dict()))

    @cached_property
    def words(self) -> dict[str, Any]:
        """The text model's configuration, without keys that all inner configurations share."""
        return {
            key: inner(value) if key in INNER else value
            for key, value in self.model.config.get_text_config().to_dict().items()
        }

    def changed(self, change: Change) -> torch.nn.Module:
        """Returns transformers' model with the changed configuration.

        Raises:
            Exception: any exception of transformers.
        """
        words = {**deepcopy(self.words), **deepcopy(change.keys)}
        if change.absent:
            del words[change.key]
        if self.is_nested:
            words = {**self.model.config.to_dict(), "text_config": words}
        config = type(self.model.config).from_dict(words, attn_implementation="eager")
        auto = auto_class(config)
        with torch.device("meta"):
            parameters = auto.from_config(config, attn_implementation="eager").parameters()
        if (size := sum(array.numel() for array in parameters)) > LARGEST:
            raise ValueError(f"a model of {size} numbers")
        torch.manual_seed(0)
        model = auto.from_config(config, attn_implementation="eager").float().eval()
        if shapes(model) != shapes(self.model):
            draw(model, torch.Generator().manual_seed(SEED))
        ours, weights = shapes(self.model), self.model.state_dict()
        fitting = {n: weights[n] for n, shape in shapes(model).items() if ours.get(n) == shape}
        model.load_state_dict(fitting, strict=False)
        if tied(self.model) and not tied(model):
            head = model.get_output_embeddings().weight
            head.data = head.data + 0.2 * torch.randn(head.shape)
        return model

    def write(self, model: torch.nn.Module, folder: Path, change: Change | None = None) -> Path:
        """Writes a changed model as transformers does; returns the folder.

        Of `change`, config.json only has the omitted key or its value.
        """
        folder.mkdir(exist_ok=True, parents=True)
        if shapes(model) != shapes(self.model) or tied(model) != tied(self.model):
            model.save_pretrained(folder)
        else:  # the same arrays
            model.config.save_pretrained(folder)
            for path in self.folder.glob("*.safetensors*"):
                os.symlink(path, folder / path.name)
        if change is not None:
            path = folder / "config.json"
            content = json.loads(path.read_text())
            text = content["text_config"] if self.is_nested else content
            text[change.key] = change.value
            if change.absent:
                del text[change.key]
            path.write_text(json.dumps(content))
        return folder


def toy(name: str, folder: Path, family: Published | None = None) -> Toy:
    """Makes and writes a toy.

    Args:
        name: name of the family.
        folder: target folder.
        family: a family outside of `FAMILIES`.
    """
    model = make(family or FAMILIES[name])
    model.save_pretrained(folder)
    return Toy(name, model, folder)


def shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(array.shape) for name, array in model.state_dict().items()}


def tied(model: Any) -> bool:
    """Returns whether the embedding is also the head."""
    parts = model.config.get_text_config(), model.config  # a part may leave it to the whole
    return bool(next(p.tie_word_embeddings for p in parts if hasattr(p, "tie_word_embeddings")))


def of_text(model: Any) -> np.ndarray:
    (found,) = log_probabilities(model, [TOKENS])
    return found
