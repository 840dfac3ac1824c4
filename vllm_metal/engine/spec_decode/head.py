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
    """Predicts token i + 2 from the target's hidden state at i and token i + 1; its K/V are at i.

    `embed_tokens` and `lm_head` are the target's unless the checkpoint has its own. `target_norm`
    is the target's last norm, if its decoder leaves that to its head.
    """

    input_size: int  # of the target's hidden states
    num_tokens: int | None = None  # tokens of the target, if `lm_head` has rows of padding, too

    def combine(self, hidden: mx.array) -> mx.array:
        """Maps the target's hidden states, [T, input_size], to the head's input, [T, H]."""
        return self.target_norm(hidden) if "target_norm" in self else hidden

    def rotate_by_three(self, axes: Axes) -> Rotation | None:
        """Makes the head's layers apply M-RoPE, with a pass's rotation (`vision.rotation`).

        Args:
            axes: the coordinate that each of the target's frequencies rotates by.

        Returns:
            The rotation of its positions; None if each token has a single position.

        Raises:
            ModelLoadError: the layers have another kind of RoPE.
        """
        return None

    def __call__(
        self, embeds: mx.array, hidden: mx.array, caches: Sequence[AttendingCache]
    ) -> tuple[mx.array, mx.array]:
        """Runs the head over T tokens.

        Args:
            embeds: [T, H], token or image embeddings.
            hidden: [T, H], output of `combine`, or the head's own from the pass before.
            caches: one per layer, for the tokens of this pass.

        Returns:
            [T, H] input of `tokens`, and [T, H] hidden states for the pass over the next token.
        """
        raise NotImplementedError

    def drafted_tokens(self) -> mx.array:
        """[V] int32, the target's ids of the tokens that `lm_head` can draft."""
        return mx.arange(len(self.lm_head.weight), dtype=mx.int32)

    def tokens(self, out: mx.array) -> mx.array:
        """[N] int32, the likeliest token of each of [N, H] outputs, as the target's ids."""
        logits = self.lm_head(out)
        if self.num_tokens is not None:
            logits = logits[..., : self.num_tokens]
        return mx.argmax(logits, axis=-1).astype(mx.int32)
