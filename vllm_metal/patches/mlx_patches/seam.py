# SPDX-License-Identifier: Apache-2.0
"""Routes attention calls of mlx-lm's and mlx-vlm's models to the cache they pass along."""

from __future__ import annotations

import functools
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models import base

from vllm_metal.patches.mlx_patches.replacing import MLX_VLM, spread

RELEASES = ("mlx-lm 0.32", "mlx-vlm 0.7")
_NAME = "scaled_dot_product_attention"
_Attention = Callable[..., mx.array]
_dense: _Attention = getattr(base, _NAME)


class Scoring(NamedTuple):
    """Parameters of softmax(scale * q @ k + bias), with the parts that only some models have."""

    scale: float
    sinks: mx.array | None = None  # [H] extra logits in the softmax, without values
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    #: [T, H, extent], a query's bias for the key `d` positions before it, zero from `extent` on.
    bias: mx.array | None = None


class BlockChoice(NamedTuple):
    """How each head of an indexer chooses blocks of positions (MiniMax M3).

    A text's positions are cut into blocks of `size`. A block's score for a token is the largest
    queries . key of its positions. The newest `num_local` blocks are always chosen.
    """

    size: int  # positions of a block
    topk: int  # blocks to choose, the newest included
    num_local: int

    @property
    def num_positions(self) -> int:
        """Most positions that a head attends to."""
        return self.size * self.topk


@dataclass(frozen=True)
class GroupChoice:
    """How an indexer chooses whole groups of positions, each by one pooled key.

    A text's positions are cut into groups of `size`. A token chooses among the groups whose last
    position is not after its own, and always attends to the positions after these groups.
    """

    size: int  # positions of a group
    topk: int  # groups to choose
    #: Maps [n, G, size, row] float32 rows of whole groups, as written, to their [n, G, D] keys.
    pooled: Callable[[mx.array], mx.array] = field(compare=False)

    @property
    def num_positions(self) -> int:
        """Most positions that a token attends to."""
        return self.size * (self.topk + 1) - 1


#: An indexer's choice: so many positions, blocks of them, or groups.
Choice = int | BlockChoice | GroupChoice


def num_positions(choice: Choice) -> int:
    """Returns how many positions a row attends to at most."""
    return choice if isinstance(choice, int) else choice.num_positions


class EntryBlocks(NamedTuple):
    """How an indexer limits the choice of later ones to blocks of entries (DeepSeek V4.1).

    A context's entries are cut into blocks of `size`. A token's later choices are among the entries
    of its `topk` blocks with the highest scores; a block has that of its best entry. The block with
    the newest entry is always one of them.
    """

    size: int  # entries of a block
    topk: int  # blocks


class Compression(NamedTuple):
    """How a layer attends to its newest positions, and to compressed entries (DeepSeek V4).

    A text's positions are cut into groups of `size`. An entry is computed from the rows that the
    layer keeps of a group's positions; a token attends to entries whose group ends at its own
    position or before.
    """

    window: int  # positions that a token sees itself, its own included
    kept: int  # newest positions of which keys, and rows of open groups, are kept
    unit: int  # elements that are stored together; a row has a multiple of them
    size: int = 0  # positions of a group; 0: there are no entries
    overlap: bool = False  # an entry is also computed from the rows of the group before
    topk: int | None = None  # entries that a token attends to, chosen by an indexer; None: all
    blocks: EntryBlocks | None = None  # which its indexer chooses for later ones, or among
    smallest: int = 4  # positions of the model's smallest groups

    def units_of(self, width: int) -> int:
        """Returns how many units a row of `width` elements takes."""
        return -(-width // self.unit)

    def slots_of(self, width: int) -> int:
        """Returns how many slots an entry takes, a unit each: a power of two.

        They are the last ones of its group, and so in one block, which no other text shares.
        """
        return 1 << (self.units_of(width) - 1).bit_length()


class AttendingCache(ABC):
    """A layer's cache for mlx-lm that computes attention itself.

    mlx-lm's models call `offset`, `make_mask` and `update_and_fetch`; `_dispatch` calls `attend`.
    """

    @property
    @abstractmethod
    def offset(self) -> mx.array:
        """[T] int32, position of each row."""

    def make_mask(self, *args: object, **kwargs: object) -> None:
        # No dense mask: the cache knows which keys a row may see.
        return None

    @abstractmethod
    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Takes K and V, each [T, Hkv, 1, D]; mlx-lm passes the result to `attend`."""

    @abstractmethod
    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scoring: Scoring,
    ) -> mx.array:
        """Attends [T, H, 1, D] queries to each row's context; returns [T, H, 1, DV]."""

    def attend_latent(
        self, queries: mx.array, values: mx.array, position_queries: mx.array, scale: float
    ) -> mx.array | None:
        """Attends over latents (MLA); returns [T, H, 1, rank], or None without latents.

        queries: [T, H, 1, rank], to multiply with latents. values: latents from `update_and_fetch`,
        or longer rows made of them. position_queries: [T, H, 1, n], added to the scores; with
        latents in the cache the rotated part of the queries times `scale`: see `LatentCache`.
        """
        return None

    def choose(
        self, keys: mx.array, queries: mx.array, weights: mx.array | None, choice: Choice
    ) -> Any:
        """Writes an indexer's keys, and chooses the positions that each row attends to.

        A row's score for a position, or for a group by its pooled key, is
        sum_h weights_h * relu(queries_h . key). With blocks, each head chooses for itself.

        Args:
            keys: [T, 1, 1, row]; with groups, what `GroupChoice.pooled` makes keys of.
            queries: [T, H, 1, D].
            weights: [T, 1, H], scales included; None: all 1, or a choice of blocks.
            choice: number of positions to choose (`topk`), blocks or groups.

        Returns:
            What `attend_chosen` or `attend_to_blocks` of the same step takes.
        """
        raise NotImplementedError(f"{type(self).__name__} does not choose positions")

    def attend_chosen(
        self,
        queries: mx.array,
        position_queries: mx.array,
        embed: Any,
        unembed: Any,
        scale: float,
        chosen: Any,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Attends over latents at chosen positions (MLA); returns [T, H, 1, value].

        Args:
            queries: [T, H, 1, key], which `embed` projects to the latents' space.
            position_queries: [T, H, 1, n], rotated.
            embed, unembed: mlx-lm's MultiLinear; `unembed` projects latents to values.
            chosen: from `choose`.
            sinks: see Scoring.
        """
        raise NotImplementedError(f"{type(self).__name__} does not attend to chosen positions")

    def attend_to_blocks(self, queries: mx.array, scale: float, chosen: Any) -> mx.array:
        """Attends to chosen positions of the K and V that were last written.

        Args:
            queries: [T, H, 1, D]. Each choice of blocks is for as many, one after another.
            chosen: from `choose`.

        Returns:
            [T, H, 1, DV].
        """
        raise NotImplementedError(f"{type(self).__name__} does not attend to chosen positions")

    def write_groups(self, rows: mx.array, by: Compression) -> tuple[mx.array, mx.array]:
        """Writes rows of which entries are computed.

        Args:
            rows: [T, 1, 1, D].

        Returns:
            For each of E groups that may end in this step, [E, size, D] rows of its positions,
            zeros where there are none yet; with `overlap` [E, 2 * size, D], those of the group
            before first; and [E] int32, its first position.
        """
        raise NotImplementedError(f"{type(self).__name__} does not keep rows of groups")

    def write_entries(self, entries: mx.array, by: Compression) -> None:
        """Writes [E, D] entries of the groups of `write_groups`, those that end in this step."""
        raise NotImplementedError(f"{type(self).__name__} does not keep entries")

    def choose_entries(
        self,
        entries: mx.array | None,
        queries: mx.array,
        weights: mx.array,
        by: Compression,
        among: Any = None,
    ) -> Any:
        """Writes an indexer's entries, and chooses those that each row attends to; see `choose`.

        Args:
            entries: [E, D], see `write_entries`; None: an earlier layer has written them.
            queries: [T, H, 1, D].
            weights: [T, 1, H], scales included.
            among: choice of an earlier indexer, whose blocks limit this one; see `EntryBlocks`.

        Returns:
            What `attend_to_entries` and, with `by.blocks`, `among` of the same step take.
        """
        raise NotImplementedError(f"{type(self).__name__} does not choose entries")

    def attend_to_entries(
        self,
        queries: mx.array,
        keys: mx.array,
        by: Compression,
        scoring: Scoring,
        entries: AttendingCache | None = None,
        chosen: Any = None,
    ) -> mx.array:
        """Writes keys, and attends to the newest positions and to entries, in one softmax.

        Keys and entries are values, too.

        Args:
            queries: [T, H, 1, D].
            keys: [T, 1, 1, D].
            entries: the cache of `write_entries`; None: attend to positions only.
            chosen: from `choose_entries`; None: attend to all entries.

        Returns:
            [T, H, 1, D].
        """
        raise NotImplementedError(f"{type(self).__name__} does not attend to entries")


def _dispatching(dense: _Attention) -> _Attention:
    @functools.wraps(dense)
    def dispatch(
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: Any = None,
        scale: float = 1.0,
        mask: mx.array | str | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        if cache is None and isinstance(keys, AttendingCache):
            cache = keys  # a layer that shares another layer's K/V gets that layer's cache instead
        if isinstance(cache, AttendingCache):
            if isinstance(mask, mx.array):
                out = cache.attend_latent(queries, values, mask, scale)
                if out is None:
                    raise NotImplementedError(_refusal(mask))
                return out
            return cache.attend(queries, keys, values, Scoring(scale, sinks))
        return dense(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)

    return dispatch


_dispatch = _dispatching(_dense)


def _refusal(mask: mx.array) -> str:
    """Returns the error for a mask of the model's own; names the function that passed it."""
    call = sys._getframe(2)
    return (
        f"{call.f_globals.get('__name__')}.{call.f_code.co_qualname} gives attention a mask of its "
        f"own, {mask.shape} {mask.dtype}, which attention over the paged KV cache cannot apply"
    )


def install() -> None:
    """Installs the dispatching attention in all models imported so far; idempotent."""
    spread(_NAME, _dense, _dispatch)
    of_mlx_vlm = sys.modules.get(f"{MLX_VLM}base")
    if of_mlx_vlm is not None:
        dense = inspect.unwrap(getattr(of_mlx_vlm, _NAME))
        spread(_NAME, dense, _dispatching_of_mlx_vlm(dense))


@functools.cache
def _dispatching_of_mlx_vlm(dense: _Attention) -> _Attention:
    return _dispatching(dense)
