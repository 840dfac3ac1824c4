# SPDX-License-Identifier: Apache-2.0
"""Computes log-probabilities of prompt tokens in chunks of rows, as lazy arrays."""

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from vllm_metal.engine.sample.logprobs import Logprobs, gather_logprobs


def prompt_logprob_chunks(
    hidden_states: mx.array,  # [n, 1, H], the rows that predict the targets
    target_ids_np: np.ndarray,  # int [n]
    num_logprobs: int,  # as in SamplingParams.prompt_logprobs, -1 for the whole vocabulary
    compute_logits: Callable[[mx.array], mx.array],  # [m, 1, H] -> any float [m, V]
    rows_at_once: int,
    after: Sequence[mx.array] = (),
    *,
    normalize: bool = True,  # report log-probabilities rather than logits, as `logprobs_mode`
) -> list[Logprobs]:
    """Returns lazy logprobs of one request's prompt tokens, in chunks of `rows_at_once` rows.

    after: arrays that the device computes before the first chunk's logits; to continue with
    another request, pass the last chunk's `arrays()`.
    """
    # Sampler stages do not change these logits, so raw and processed modes agree.
    chunks: list[Logprobs] = []
    done = list(after)
    for start in range(0, len(target_ids_np), rows_at_once):
        rows = slice(start, start + rows_at_once)
        hidden = hidden_states[rows]
        # The device finishes one chunk before it computes the next one's logits: the logits of a
        # whole prompt can take more memory than the model.
        logits = compute_logits(mx.depends(hidden, done) if done else hidden)
        most = logits.shape[1]
        width = most if num_logprobs < 0 else min(num_logprobs, most)
        targets = mx.array(target_ids_np[rows])
        chunks.append(gather_logprobs(logits, targets, width, normalize=normalize))
        done = list(chunks[-1].arrays())
    return chunks
