# SPDX-License-Identifier: Apache-2.0
"""Draft networks with another vocabulary than their target's."""

from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import pytest

from vllm_metal.engine.models.loader import ModelLoadError
from vllm_metal.engine.spec_decode.vocabulary import bounded, check_drafted

VOCAB = 33


@pytest.fixture
def config():
    return SimpleNamespace(
        model_config=SimpleNamespace(model="target", get_vocab_size=lambda: VOCAB),
        speculative_config=SimpleNamespace(model="drafts"),
    )


@pytest.mark.parametrize("rows", [VOCAB - 5, VOCAB, VOCAB + 5])
def test_no_row_beyond_an_embedding_is_read(config, rows):
    embedding = nn.Embedding(rows, 3)
    found = bounded(embedding, config)(mx.array([0, rows - 1, VOCAB - 1]))
    expected = embedding.weight[mx.array([0, rows - 1, min(rows, VOCAB) - 1])]
    assert mx.array_equal(found, expected)


@pytest.mark.parametrize("wrong", [-1, VOCAB])
def test_drafts_that_the_target_does_not_have(config, wrong):
    check_drafted(mx.array([0, VOCAB - 1]), config)
    with pytest.raises(ModelLoadError, match=f"drafts drafts .*{wrong}.* target has {VOCAB} tok"):
        check_drafted(mx.array([4, wrong, 5]), config)
