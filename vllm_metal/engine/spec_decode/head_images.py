# SPDX-License-Identifier: Apache-2.0
"""Image embeddings and positions for the tokens that a draft head reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np

from vllm_metal.engine.attention.forward_inputs import ForwardInputs
from vllm_metal.engine.batch.rows import Rows
from vllm_metal.engine.spec_decode.head import Head
from vllm_metal.engine.spec_decode.passes import PassInputs
from vllm_metal.engine.spec_decode.spans import KeptRows, Spans
from vllm_metal.engine.vision.column import ImageColumn, StepImages
from vllm_metal.engine.vision.rotation import positioned


class HeadImages:
    """Makes a head read images as its target does.

    As in vLLM's EAGLE proposer, a head reads the embedding of token i + 1, which may be an image's,
    and rotates by the target's positions of token i.
    """

    def __init__(self, head: Head, images: ImageColumn) -> None:
        """
        Args:
            head: its layers rotate by three positions from now on, if the target's do.
            images: the target's.

        Raises:
            ModelLoadError: the RoPE of the head's layers does not support images.
        """
        self._head, self._images = head, images
        self._rotation = None if images.axes is None else head.rotate_by_three(images.axes)

    @property
    def newest(self) -> StepImages | None:
        """The image tokens of the target's newest forward."""
        return self._images.newest

    @property
    def any_requests(self) -> bool:
        """Whether any request has images."""
        return self._images.any_requests

    def placed(self, inputs: PassInputs, rows: Rows) -> PassInputs:
        shifts_np = self._images.shifts_of(rows)
        if shifts_np is None:
            return inputs
        at = ForwardInputs(inputs.input_ids, inputs.positions[None])
        at = positioned(at, shifts_np, self._rotation)
        return replace(inputs, positions=at.positions[0], extras=at.extras)

    def embeddings(
        self, input_ids: mx.array, spans: Spans, kept: Sequence[KeptRows], encode: bool
    ) -> mx.array | None:
        """Embeds the tokens that follow the spans, image tokens included.

        Args:
            input_ids: [T] int32, the token after each position of the spans.
            spans: positions of R requests.
            kept: hidden states of the same requests, which cover the spans.
            encode: whether a coming step reads the tokens after the spans, so that the scheduler
                has room for their images in the encoder cache. Otherwise an image that is not
                encoded yet is embedded as its placeholder, as in vLLM.

        Returns:
            [T, H]; None if no token is an image's.
        """
        if not self._images.any_requests:
            return None
        rows: list[np.ndarray] = []
        outputs: list[mx.array] = []
        firsts_np = spans.query_start_loc_np
        columns = spans.req_indices_np, spans.ends_np, firsts_np[:-1], np.diff(firsts_np)
        for of, *of_span in zip(kept, *(column.tolist() for column in columns), strict=True):
            req_idx, end, first, num_rows = of_span
            offset = first - of.first_row - 1  # from a token of the step to the row before it
            if of.images is not None:
                here = of.images.rows_np
                last = of.first_row + min(num_rows, of.count - 1)
                begin, stop = np.searchsorted(here, [of.first_row + 1, last + 1]).tolist()
                if begin < stop:
                    rows.append(here[begin:stop] + np.int32(offset))
                    outputs.append(of.images.embeddings[begin:stop])
            if num_rows == of.count:
                ahead = self._images.embedding_at(req_idx, end, encode)
                if ahead is not None:
                    rows.append(np.array([first + num_rows - 1], np.int32))
                    outputs.append(ahead)
        if not rows:
            return None
        at, input_ids = mx.array(np.concatenate(rows)), mx.array(input_ids)
        input_ids[at] = 0  # an image's token id may exceed the vocabulary
        embeddings: mx.array = self._head.embed_tokens(input_ids)
        embeddings[at] = mx.concatenate(outputs).astype(embeddings.dtype)
        return embeddings
