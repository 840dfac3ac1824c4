# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of prompt tokens, a few rows at once, as lazy arrays."""

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from vllm_metal.engine.sample.logprobs import Logprobs, gather_logprobs


def prompt_logprob_chunks(
    hidden_states: mx.array,
    target_ids_np: np.ndarray,
    num_logprobs: int,
    compute_logits: Callable[[mx.array], mx.array],
    rows_at_once: int,
    after: Sequence[mx.array] = (),
    *,
    normalize: bool = True,
) -> list[Logprobs]:
    """Logprobs of one request's prompt tokens, in chunks of `rows_at_once` rows; nothing waits.

    No stage of the sampler changes them: raw ones are processed ones here.
    The device computes one chunk wholly before it computes logits of the next: the logits of a
    whole prompt can take more memory than the model.

    hidden_states: [n, 1, H], the rows that predict the targets. target_ids_np: int [n].
    num_logprobs: as in SamplingParams.prompt_logprobs, -1 for the whole vocabulary.
    compute_logits: hidden states [m, 1, H] -> logits, any float [m, V].
    after: arrays that the device computes before the first chunk's logits. To go on with another
    request, pass the last chunk's `arrays()`.
    normalize: report log-probabilities rather than logits, as `logprobs_mode` says.
    """
    chunks: list[Logprobs] = []
    done = list(after)
    for start in range(0, len(target_ids_np), rows_at_once):
        rows = slice(start, start + rows_at_once)
        hidden = hidden_states[rows]
        logits = compute_logits(mx.depends(hidden, done) if done else hidden)
        most = logits.shape[1]
        width = most if num_logprobs < 0 else min(num_logprobs, most)
        targets = mx.array(target_ids_np[rows])
        chunks.append(gather_logprobs(logits, targets, width, normalize=normalize))
        done = list(chunks[-1].arrays())
    return chunks
