# SPDX-License-Identifier: Apache-2.0
"""Several MTP layers that draft one token each, all in one pass over a step's new tokens.

Layer i at position p reads token p + 1 + i, so the K/V of a request's last positions follow from
drafts. They are written again in the next step, once their tokens are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from metal_kernels.layout import PositionLag
from vllm_metal.engine.spec_decode.head import Head
from vllm_metal.engine.spec_decode.paged_head import HeadPasses, HeadProposer, rows_of
from vllm_metal.engine.spec_decode.passes import Passes, PassInputs
from vllm_metal.engine.spec_decode.spans import KeptRows, Spans
from vllm_metal.patches.mlx_patches.seam import AttendingCache

if TYPE_CHECKING:
    from vllm_metal.engine.models.parts import HiddenStates
    from vllm_metal.engine.spec_decode.head_images import HeadImages


class MTPChain(Head):
    """MTP layers of which layer i drafts token i, from the hidden states of layer i - 1.

    Computes what vLLM's `MultiModuleMTPSpeculator` computes.
    """

    def __init__(self, heads: Sequence[Head]) -> None:
        super().__init__()
        self.heads, self.input_size = list(heads), heads[0].input_size

    def drafts(
        self, embeds: mx.array, hidden: mx.array, last: mx.array, caches: Sequence[AttendingCache]
    ) -> mx.array:
        """Drafts one token per layer, [R, number of layers] int32.

        Args:
            embeds: [T, H] embeddings of the token after each row.
            hidden: [T, H], the target's.
            last: [R] int32, each request's last accepted row.
            caches: one per layer, for these rows.
        """
        found: list[mx.array] = []
        for head, cache in zip(self.heads, caches, strict=True):
            if found:
                embeds = mx.concatenate([embeds[1:], embeds[:1]])
                embeds[last] = self.embed_tokens(found[-1]).astype(embeds.dtype)
            out, hidden = head(embeds, hidden, [cache])
            found.append(self.tokens(out[last]))
        return mx.stack(found, axis=1)


class ChainPasses(HeadPasses):
    """Runs all layers of a chain in one pass."""

    module: MTPChain

    def next_tokens(
        self, inputs: PassInputs, caches: list[Any]
    ) -> tuple[mx.array, mx.array | None]:
        """Returns [N, number of layers] drafts after the wanted rows, of all N requests."""
        assert inputs.hidden is not None and inputs.wanted is not None
        embeds = inputs.embeddings
        if embeds is None:
            embeds = self.module.embed_tokens(inputs.input_ids)
        return self.module.drafts(embeds, inputs.hidden, inputs.wanted, caches), None


class ChainProposer(HeadProposer):
    """Drafts in one pass over the tokens of the newest step and the last ones before it."""

    def __init__(
        self,
        chain: MTPChain,
        passes: Passes,
        states: HiddenStates,
        num_drafts: int,
        images: HeadImages | None = None,
    ) -> None:
        """
        Args:
            chain: loaded, with an embedding and an output head.
            passes: the chain's passes, over the shared pool.
            states: the target's hidden states.
            num_drafts: K, the number of layers.
            images: the images that the chain reads; None if its target reads none.
        """
        super().__init__(chain, passes, states, num_drafts, images)
        self.lookahead = num_drafts
        # By req_idx, what the newest pass has read; embeddings only if any request has images.
        self._earlier: dict[int, KeptRows] = {}
        self._embedded: dict[int, KeptRows] = {}

    def forget_request(self, req_idx: int) -> None:
        super().forget_request(req_idx)
        self._earlier.pop(req_idx, None)
        self._embedded.pop(req_idx, None)

    def _reads(self, spans: Spans, kept: Sequence[KeptRows]) -> tuple[Spans, mx.array]:
        """Begins each span earlier, by the tokens whose reads may have included drafts."""
        spans, hidden = super()._reads(spans, kept)
        req_indices, starts_np = spans.req_indices_np.tolist(), spans.starts_np
        begins_np, parts = starts_np.copy(), []
        firsts = spans.query_start_loc_np.tolist()
        counts = (spans.ends_np - starts_np).tolist()
        for place, (req_idx, start) in enumerate(zip(req_indices, starts_np.tolist(), strict=True)):
            before = self._earlier.get(req_idx)
            if before is None or not before.start <= start <= before.start + before.count:
                before = KeptRows(hidden, 0, start, 0)  # after a prefix hit, whose K/V are right
            begin = max(before.start, start - self.lookahead + 1)
            begins_np[place] = begin
            first = before.first_row + begin - before.start
            parts.append(KeptRows(before.states, first, begin, start - begin))
            parts.append(KeptRows(hidden, firsts[place], start, counts[place]))
        pairs = np.repeat(spans.req_indices_np, 2)
        bounds_np = np.stack([begins_np, starts_np, spans.ends_np], axis=1)
        both = Spans(pairs, bounds_np[:, :2].ravel(), bounds_np[:, 1:].ravel())
        whole = Spans(spans.req_indices_np, begins_np, spans.ends_np)
        self._both, states = both, rows_of(parts, both)
        columns = whole.query_start_loc_np[:-1], begins_np, whole.ends_np - begins_np
        of_each = zip(req_indices, *(column.tolist() for column in columns), strict=True)
        self._earlier |= {req_idx: KeptRows(states, *rest) for req_idx, *rest in of_each}
        return whole, states

    def _embeddings(
        self, following: mx.array, spans: Spans, kept: Sequence[KeptRows], encode: bool
    ) -> mx.array | None:
        """Embeds the newest step's tokens, and takes the rows before them of the pass before."""
        req_indices, both = spans.req_indices_np.tolist(), self._both
        known = [self._embedded.pop(req_idx, None) for req_idx in req_indices]
        if self._images is None or not self._images.any_requests:
            return None
        before, newest = (
            Spans(spans.req_indices_np, both.starts_np[part::2], both.ends_np[part::2])
            for part in range(2)
        )
        rows = [mx.array(np.flatnonzero(both.index_np % 2 == part)) for part in range(2)]
        found = self._images.embeddings(following[rows[1]], newest, kept, encode)
        if found is None:
            found = self._head.embed_tokens(following[rows[1]])
        # A request without embeddings of its last pass had no image then.
        text, parts = self._head.embed_tokens(following[rows[0]]), []
        for place, of in enumerate(known):
            begin, start, end = (
                int(each[place]) for each in (before.starts_np, before.ends_np, newest.ends_np)
            )
            states, first = text, int(before.query_start_loc_np[place])
            if of is not None:
                states, first = of.states, of.first_row + begin - of.start
            parts.append(KeptRows(states, first, begin, start - begin))
            parts.append(KeptRows(found, int(newest.query_start_loc_np[place]), start, end - start))
        embeddings = rows_of(parts, both)
        firsts, counts = spans.query_start_loc_np[:-1], spans.ends_np - spans.starts_np
        of_each = zip(
            req_indices, firsts.tolist(), spans.starts_np.tolist(), counts.tolist(), strict=True
        )
        self._embedded |= {req_idx: KeptRows(embeddings, *rest) for req_idx, *rest in of_each}
        return embeddings

    def _draft(
        self,
        spans: Spans,
        input_ids: mx.array,
        hidden: mx.array | None,
        limits_np: np.ndarray,
        lag: PositionLag | None = None,
        embeddings: mx.array | None = None,
    ) -> mx.array:
        everyone = np.arange(len(limits_np))
        drafts, _ = self._first(spans, input_ids, hidden, everyone, lag, embeddings)
        return drafts
