# SPDX-License-Identifier: Apache-2.0
"""n-grams of Qwen4-Exp choose the rows of their tables as transformers does, text by text."""

import mlx.core as mx
import numpy as np
import pytest
from engine.models.published import FAMILIES, VOCAB, log_probabilities, make, write
from engine.models.test_latent_prompts import Served
from engine.models.test_sparse import TOLERANCE, farthest

from vllm_metal.engine.models.loader import lazy_model
from vllm_metal.patches.mlx_patches.families import qwen4_exp

pytestmark = pytest.mark.usefixtures("unfused")

END = 2  # of a text


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Our model, and transformers'."""
    model, folder = make(FAMILIES["qwen4_exp"]), tmp_path_factory.mktemp("published")
    write(model, folder)
    return lazy_model(folder, mx.float32), model


def texts():
    """Texts that end within them, at the edges of chunks among others, and one of a token."""
    rng = np.random.default_rng(8)
    found = [rng.integers(3, VOCAB, length).tolist() for length in (40, 21, 1)]
    for place in (6, 7, 12, 14, 15, 17):
        found[0][place] = END
    found[1][0] = END
    return found


def of_chunks(model, prompts, chunk):
    return Served(model, "it", prompts).in_chunks([*map(len, prompts)], chunk)


@pytest.mark.parametrize("chunk", [1, 7, 40])
def test_ngrams_end_with_a_text(both, chunk):
    ours, theirs = both
    expected = log_probabilities(theirs, texts())
    for found, wanted in zip(of_chunks(ours, texts(), chunk), expected, strict=True):
        assert farthest(found, wanted) <= TOLERANCE


def forget_ends(layer, tokens, earlier):
    return CHOOSE(layer, tokens, [mx.where(t == END, 3, t) for t in earlier])


def forget_the_second(layer, tokens, earlier):
    return CHOOSE(layer, tokens, [earlier[0], earlier[0]])


CHOOSE = qwen4_exp.ngram_rows


@pytest.mark.parametrize("fault", [forget_ends, forget_the_second])
def test_other_rows_are_seen(both, fault, monkeypatch):
    ours, theirs = both
    expected = log_probabilities(theirs, texts())
    monkeypatch.setattr(qwen4_exp, "ngram_rows", fault)
    (found, *_) = of_chunks(ours, texts(), 7)
    assert farthest(found, expected[0]) > 10 * TOLERANCE
