# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of prompt tokens, as lazy arrays."""

import mlx.core as mx
import numpy as np

from vllm_metal.sample.logprobs import Logprobs, gather_logprobs


def prompt_logprobs(
    logits: mx.array, target_ids: mx.array | np.ndarray, num_logprobs: int
) -> Logprobs:
    """Logprobs of prompt tokens.

    logits: any float [n, V], the rows that predict the targets. target_ids: int [n].
    num_logprobs: as in SamplingParams.prompt_logprobs, -1 for the whole vocabulary.
    """
    vocab_size = logits.shape[1]
    width = vocab_size if num_logprobs < 0 else min(num_logprobs, vocab_size)
    return gather_logprobs(logits, mx.array(target_ids), width)
