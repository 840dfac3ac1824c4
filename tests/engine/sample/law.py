# SPDX-License-Identifier: Apache-2.0
"""Computes the sampling distribution from its definition, one row at a time, in float64."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from scipy.stats import chisquare
from vllm import SamplingParams


def distribution(
    logits: np.ndarray,
    params: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    grammar: Sequence[int] | None = None,
) -> np.ndarray:
    """Returns the next token's probabilities, float64 [V]; greedy: 1 for one token."""
    scores = logits.astype(np.float64).copy()
    vocabulary = range(len(scores))
    if grammar is not None:
        scores[[v for v in vocabulary if v not in set(grammar)]] = -np.inf
    if params.allowed_token_ids:
        scores[[v for v in vocabulary if v not in params.allowed_token_ids]] = -np.inf
    for word in params.bad_words_token_ids or []:
        prefix = list(word[:-1])
        if len(prefix) <= len(output) and list(output[len(output) - len(prefix) :]) == prefix:
            scores[word[-1]] = -np.inf
    if len(output) < params.min_tokens:
        scores[list(params.all_stop_token_ids)] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        scores[token] += bias
    counts = Counter(output)
    for token in set(prompt) | set(output):
        r = params.repetition_penalty
        scores[token] = scores[token] / r if scores[token] > 0 else scores[token] * r
    for token, count in counts.items():
        scores[token] -= params.frequency_penalty * count + params.presence_penalty
    if params.temperature < 1e-5:
        return np.eye(len(scores))[scores.argmax()]
    probs = softmax(scores / params.temperature)
    probs = np.where(probs >= params.min_p * probs.max(), probs, 0)
    best_first = sorted(vocabulary, key=lambda v: -probs[v])
    if params.top_k > 0:
        probs[best_first[params.top_k :]] = 0
    probs /= probs.sum()
    mass = 0.0
    for token in best_first:
        if mass >= params.top_p:
            probs[token] = 0
        mass += probs[token]
    return probs / probs.sum()


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def p_value(counts: np.ndarray, expected: np.ndarray) -> float:
    """Returns the chi-square probability of counts at least this far from the expected ones.

    counts: int [B], count of each outcome. expected: float64 [B], its probability. Returns 0 if an
    impossible outcome occurred.
    """
    if counts[expected == 0].any():
        return 0.0
    num_draws = counts.sum()
    rare = expected * num_draws < 5  # chi-square needs about five expected draws per bin
    observed = [*counts[~rare], counts[rare].sum()]
    wanted = [*(expected[~rare] * num_draws), expected[rare].sum() * num_draws]
    if wanted[-1] == 0:
        observed, wanted = observed[:-1], wanted[:-1]
    return float(chisquare(observed, wanted).pvalue)


def assert_follows(counts: np.ndarray, expected: np.ndarray) -> None:
    """Asserts that counts follow a distribution; see `p_value`.

    A correct sampler fails with probability 1e-4 over the choice of the engine seed; it is fixed,
    so the result is reproducible.
    """
    assert p_value(counts, expected) > 1e-4
