# SPDX-License-Identifier: Apache-2.0
"""The interface of draft heads that read the target's hidden states and keep K/V."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn

from vllm_metal.patches.mlx_patches.seam import AttendingCache

if TYPE_CHECKING:
    from vllm_metal.engine.vision.column import Axes
    from vllm_metal.engine.vision.rotation import Rotation


class Head(nn.Module):
    """Works on rows: row i takes the hidden state of position i and the token of position i + 1,
    keeps K/V at position i, and predicts the token of position i + 2.

    `embed_tokens` and `lm_head` are the target's unless the checkpoint has its own.
    """

    input_size: int  # of the target's hidden states

    def combine(self, hidden: mx.array) -> mx.array:
        """The target's hidden states, [T, input_size], as the head takes them, [T, H]."""
        return hidden

    def rotate_by_three(self, axes: Axes) -> Rotation | None:
        """Makes its layers rotate by a pass's ROTATION (`vision.rotation`).

        Args:
            axes: the target's.

        Returns:
            None: rows have one position each.

        Raises:
            ModelLoadError: its layers have another kind of RoPE.
        """
        return None

    def __call__(
        self, embeds: mx.array, hidden: mx.array, caches: Sequence[AttendingCache]
    ) -> tuple[mx.array, mx.array]:
        """
        Args:
            embeds: [T, H], of `embed_tokens`, or of an image.
            hidden: [T, H], combined or from the head itself.
            caches: one a layer, for the rows of this pass.

        Returns:
            [T, H] for `tokens`, and [T, H] for the pass after the next token.
        """
        raise NotImplementedError

    def drafted_tokens(self) -> mx.array:
        """[V] int32, the tokens that `lm_head` can draft, as the target numbers them."""
        return mx.arange(len(self.lm_head.weight), dtype=mx.int32)

    def tokens(self, out: mx.array) -> mx.array:
        """[N] int32, the likeliest token of each of [N, H], as the target numbers it."""
        return mx.argmax(self.lm_head(out), axis=-1).astype(mx.int32)
