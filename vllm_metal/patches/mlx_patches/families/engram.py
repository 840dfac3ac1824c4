# SPDX-License-Identifier: Apache-2.0
"""Adds DeepSeek V4.1's n-gram memory (Engram, arXiv:2601.07372) to mlx-lm's layers.

Before some layers, hashes of the last tokens choose rows of a table, which give a key for each
stream and a value for all. mlx-lm's module lacks this, so mlx-vlm's module computes it. Here are
its settings, its weights' names, and the hashes of tokens whose history is a layer's state.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache

from vllm_metal.patches.mlx_patches.families.arrays import Arrays
from vllm_metal.patches.mlx_patches.families.ngrams import tokens_before
from vllm_metal.patches.mlx_patches.mlx_vlm_families import family
from vllm_metal.patches.mlx_patches.recurrences import KnownModule
from vllm_metal.patches.mlx_patches.replacing import after_init, check_release, wrap
from vllm_metal.settings.mlx_vlm_models import RELEASES

_FOLDER = "deepseek_v41"  # of mlx-vlm's family
_IDS = "engram_layer_ids"
_COMPRESSED = "engram_compressed_vocab_size"
#: Files of the model's folder that give the ids over which n-grams are hashed.
TOKEN_MAP, TOKENIZER = "engram_token_map.json", "tokenizer.json"
_BLOCK = 32  # values that the module rounds by one scale
_PUBLISHED = re.compile(r"layers\.\d+\.engram\.")
#: Name of a forward's [B, L] tokens among what its layers share.
TOKENS = "tokens"


def arguments(text: Any) -> Any:
    """Returns mlx-lm's arguments with those of the memory; defaults are the published ones."""

    @dataclass
    class ModelArgs(text):
        engram_num_embeddings: list[int] = field(default_factory=lambda: [384006168, 384016682])
        engram_max_ngram_size: int = 4
        engram_vocab_size: int = 16000000
        engram_n_heads: int = 8
        engram_head_dim: int = 256
        engram_pad_token_id: int = 2
        engram_compressed_vocab_size: int = 99092

        def __post_init__(self) -> None:
            # mlx-lm's class rejects layers with a memory.
            layers: Sequence[int] = self.engram_layer_ids or ()
            self.engram_layer_ids: Sequence[int] = ()
            super().__post_init__()
            self.engram_layer_ids = layers
            if layers:
                _check(self)

    ModelArgs.__module__ = text.__module__
    return ModelArgs


def _check(args: Any) -> None:
    def reject(key: str, reason: str) -> None:
        raise ValueError(
            f"{key}={getattr(args, key)} of config.json is not supported: {reason}. Use the "
            "config.json of the same checkpoint"
        )

    layers = args.engram_layer_ids
    if len(set(layers)) < len(layers) or min(layers) < 0:
        reject(_IDS, "they are not the numbers of different layers")
    for key, least in (
        ("engram_max_ngram_size", 2),
        ("engram_vocab_size", 2),
        ("engram_n_heads", 1),
        ("engram_head_dim", 1),
    ):
        if getattr(args, key) < least:
            reject(key, f"it must be at least {least}")
    if not 0 < args.engram_compressed_vocab_size <= args.vocab_size:
        reject(_COMPRESSED, f"it must be from 1 to vocab_size={args.vocab_size}")
    if not 0 <= args.engram_pad_token_id < args.vocab_size:
        reject("engram_pad_token_id", f"it must be a token below vocab_size={args.vocab_size}")
    width = (args.engram_max_ngram_size - 1) * args.engram_n_heads * args.engram_head_dim
    if width % _BLOCK:
        reject("engram_head_dim", f"a token's rows have {width} values, no multiple of {_BLOCK}")
    sizes = [sum(map(sum, primes)) for primes in _layout(args).primes]
    if list(args.engram_num_embeddings) != sizes:
        reject(
            "engram_num_embeddings",
            f"hashes of engram_vocab_size={args.engram_vocab_size}, engram_n_heads="
            f"{args.engram_n_heads} and engram_max_ngram_size={args.engram_max_ngram_size} choose "
            f"from {sizes} rows",
        )


def _module() -> ModuleType:
    """Imports mlx-vlm's module; raises ImportError with the install command if it is missing."""
    found: ModuleType = family(_FOLDER, f"{_IDS} of config.json").engram
    check_release("mlx-vlm", RELEASES, repr(_FOLDER))
    return found


def _layout(args: Any) -> Any:
    return _module().EngramLayout.from_config(args)


class NgramIds(KnownModule):
    """Chooses the rows of one layer's table; keeps the tokens before in the layer's state."""

    def __init__(self, args: Any, layer_id: int) -> None:
        super().__init__()
        self.number = list(args.engram_layer_ids).index(layer_id)
        self.context_len = args.engram_max_ngram_size - 1
        self._hashes: Any = None  # mlx-vlm's `NgramHashState`, from `load_token_map`

    def __call__(self, input_ids: mx.array, weight: mx.array, cache: Any) -> mx.array:
        """Returns [B, L, heads of all orders] int64 rows of the n-grams that end at each token.

        Args:
            input_ids: [B, L].
            weight: any weight of the layer.
            cache: the layer's state; None: texts begin here.
        """
        if (hashes := self._hashes) is None:
            raise RuntimeError(f"{TOKEN_MAP} has not been loaded: call load_token_map")
        # Before a text is the token that pads it, which is zero in the state.
        tokens = hashes._token_map[input_ids] - hashes.pad_id
        earlier = tokens_before(tokens, cache, self.context_len, weight)
        multipliers, primes = hashes._multipliers[self.number], hashes._primes[self.number]
        mixed, rows = (tokens + hashes.pad_id) * multipliers[0], []
        for distance, before in enumerate(earlier, start=1):
            mixed = mixed ^ ((before + hashes.pad_id) * multipliers[distance])
            rows.append(mixed[..., None] % primes[distance - 1])
        return mx.concatenate(rows, axis=-1) + hashes._offsets[self.number]


def add_memory(module: Any) -> None:
    """Adds the memory to layers of mlx-lm's module, which calls it before the layer."""
    after_init(module.DecoderLayer, _add_module)
    wrap(module.DecoderLayer, "__call__", _reading_memory)
    wrap(module.Model, "sanitize", _with_memory)


def _add_module(self: Any, args: Any, layer_id: int) -> None:
    if layer_id in args.engram_layer_ids:
        self.engram = _module().Engram(args, layer_id, _layout(args))
        self.ngrams = NgramIds(args, layer_id)


def states(layer: Any) -> tuple[ArraysCache, ...]:
    """Returns the caches of a decoder layer's memory: of the tokens before."""
    return (ArraysCache(1),) if "engram" in layer else ()


def hand_tokens(caches: Sequence[Any], tokens: mx.array) -> None:
    """Hands a forward's [B, L] tokens to layers over mlx-lm's own caches."""
    for each in caches:
        each.tokens = tokens


def _reading_memory(before: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, streams: mx.array, mix: mx.array, *, cache: Any, **options: Any) -> Any:
        if "engram" in self:
            if isinstance(cache, tuple):
                tokens, history = options["shared"][TOKENS], cache[-1]
                cache = cache[:-1]
            else:
                tokens, history = cache.tokens, cache.caches[-1]
            rows = self.ngrams(tokens, self.engram.q_weight, history)
            streams = self.engram(streams, rows)
        return before(self, streams, mix, cache=cache, **options)

    return call


def _with_memory(before: Callable[..., Arrays]) -> Callable[..., Arrays]:
    def sanitize(self: Any, weights: Arrays) -> Arrays:
        found: Arrays = dict(before(self, weights))
        for name, array in weights.items():
            if _PUBLISHED.match(name):
                found[f"model.{name}"] = array
        return found

    return sanitize


def load_token_map(model: nn.Module, folder: Path, outlines_only: bool = False) -> None:
    """Reads the ids over which a model's memory hashes n-grams; no-op for models without.

    Args:
        model: mlx-lm's.
        folder: the model's, with the published map, or the tokenizer that it is computed from.
        outlines_only: whether only shapes count, so that no file is needed.

    Raises:
        ValueError: the folder has neither file, or the map does not fit config.json.
    """
    if not any(isinstance(module, NgramIds) for module in model.modules()):
        return
    args: Any = model.args
    size = args.engram_compressed_vocab_size
    if outlines_only:
        found = [min(token, size - 1) for token in range(args.vocab_size)]
    else:
        found = _token_map(folder, args)
    use_token_map(model, args, found)


def use_token_map(model: nn.Module, args: Any, token_map: Sequence[int]) -> None:
    """Makes a model hash n-grams over the ids that a map gives for its tokens."""
    # Ids behind the tokenizer's belong to no token.
    padding = [token_map[args.engram_pad_token_id]] * (args.vocab_size - len(token_map))
    hashes = _module().NgramHashState(args, _layout(args), token_map=[*token_map, *padding])
    for module in model.modules():
        if isinstance(module, NgramIds):
            module._hashes = hashes


def _token_map(folder: Path, args: Any) -> list[int]:
    path = folder / TOKEN_MAP
    if path.is_file():
        found = json.loads(path.read_text())
        if not isinstance(found, list) or any(type(each) is not int or each < 0 for each in found):
            raise ValueError(f"{path} is no list of ids. Download it again")
    elif (folder / TOKENIZER).is_file():
        from transformers import PreTrainedTokenizerFast

        path = folder / TOKENIZER
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path))
        found, _ = _module().build_compressed_token_map(tokenizer)
    else:
        raise ValueError(
            f"{_IDS}={list(args.engram_layer_ids)} of config.json needs {TOKEN_MAP} or {TOKENIZER} "
            f"in {folder}: neither is there. Download them"
        )
    stated = args.engram_compressed_vocab_size
    if len(found) <= args.engram_pad_token_id or max(found) + 1 != stated:
        raise ValueError(
            f"{_COMPRESSED}={stated} of config.json is not supported with {path}, which has "
            f"{max(found, default=-1) + 1} ids for {len(found)} tokens. Download both again"
        )
    return list(found)
