# SPDX-License-Identifier: Apache-2.0
"""Determines from a model's files whether its head is its embedding.

transformers and vLLM load `lm_head.weight` if the files have it, even if config.json ties them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from enum import Enum

import mlx.core as mx

_HEAD = re.compile(r"(?:(?:model|language_model|text_model)\.)*lm_head\.(\w+)")
_EMBEDDING = re.compile(
    r"(?:.*\.)?(?:embed_tokens|wte|word_embeddings|tok_embeddings|embeddings|embedding|embed_in)"
    r"\.weight"
)


class Head(Enum):
    """The ways in which a model's files may store the head."""

    NONE = "none"
    COPY = "a copy of the embedding"  # bit for bit
    OWN = "one of its own"


def head_of(arrays: Mapping[str, mx.array], may_be_copy: bool = True) -> Head:
    """Determines how lazy arrays store the head; evaluates both weights if they must be compared.

    `may_be_copy` is False if config.json says that head and embedding differ.
    """
    head = {match[1]: name for name in arrays if (match := _HEAD.fullmatch(name))}
    if "weight" not in head:
        return Head.NONE
    if may_be_copy and any(
        _are_equal(arrays, head, embedding) for embedding in _embeddings(arrays, head["weight"])
    ):
        return Head.COPY
    return Head.OWN


def is_head(name: str) -> bool:
    """Whether an array is the head's weight or a part of its packed weight."""
    return _HEAD.fullmatch(name) is not None


def _embeddings(arrays: Mapping[str, mx.array], head: str) -> Iterator[str]:
    """Yields the outermost embeddings of the head's shape; deeper ones belong to draft layers."""
    found = [
        name
        for name, array in arrays.items()
        if array.shape == arrays[head].shape and _EMBEDDING.fullmatch(name)
    ]
    least = min((name.count(".") for name in found), default=0)
    return (name.removesuffix(".weight") for name in found if name.count(".") == least)


def _are_equal(arrays: Mapping[str, mx.array], head: Mapping[str, str], embedding: str) -> bool:
    return all(
        (other := arrays.get(f"{embedding}.{part}")) is not None
        and other.dtype == arrays[name].dtype
        and bool(mx.array_equal(other, arrays[name]).item())
        for part, name in head.items()
    )
