# SPDX-License-Identifier: Apache-2.0
"""Falcon OCR's text model equals the formulas of the code that trained it, written with torch.

The reference is falcon_perception/model.py of github.com/tiiuae/Falcon-Perception.
"""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import torch
from engine.models import of_mlx_vlm
from engine.models.recurrent import make_model, write_model
from mlx.utils import tree_flatten
from torch.nn import functional

from vllm_metal.engine.models.loader import lazy_model

pytestmark = pytest.mark.more
TOKENS = [3, 5, 7, 61, 9, 2, 33]
HEADS, KV_HEADS, SIZE, THETA = 6, 2, 16, 700.0


def norm(x):
    return functional.rms_norm(x, x.shape[-1:])


def rotated(x):
    """Rotates neighboring pairs in the first half of [L, H, D] heads."""
    half = SIZE // 2
    frequencies = THETA ** (-torch.arange(0, half, 2) / half)
    angles = torch.arange(len(x))[:, None, None] * frequencies
    turned = torch.view_as_complex(x[..., :half].unflatten(-1, (-1, 2)).contiguous())
    turned = torch.view_as_real(turned * torch.polar(torch.ones_like(angles), angles)).flatten(-2)
    return torch.cat([turned, x[..., half:]], dim=-1)


def reference(weights):
    """Computes [L, V] logits from arrays by published name."""
    hidden = weights["tok_embeddings.weight"][TOKENS]
    layers = {int(name.split(".")[1]) for name in weights if name.startswith("layers.")}
    for index in sorted(layers):
        of_layer = {
            name.split(".", 2)[2].removesuffix(".weight"): array
            for name, array in weights.items()
            if name.startswith(f"layers.{index}.")
        }
        packed = norm(hidden) @ of_layer["attention.wqkv"].T
        heads = packed.unflatten(-1, (-1, SIZE))
        queries, keys, values = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        queries, keys = rotated(norm(queries)), rotated(norm(keys))
        keys, values = (part.repeat_interleave(HEADS // KV_HEADS, 1) for part in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", queries, keys) / SIZE**0.5
        scores += torch.full(scores.shape[1:], -torch.inf).triu(1)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
        sinks = of_layer["attention.sinks"]
        mixed *= torch.sigmoid(scores.logsumexp(-1).T - sinks)[..., None]
        hidden = hidden + mixed.flatten(1) @ of_layer["attention.wo"].T
        packed = norm(hidden) @ of_layer["feed_forward.w13"].T
        gated = functional.relu(packed[:, 0::2]).pow(2) * packed[:, 1::2]
        hidden = hidden + gated @ of_layer["feed_forward.w2"].T
    hidden = functional.rms_norm(hidden, hidden.shape[-1:], weights["norm.weight"], 1e-5)
    return hidden @ weights["output.weight"].T


def test_logits_are_those_of_the_formulas():
    model = make_model(of_mlx_vlm.FAMILIES["falcon_ocr"], drawn=True)
    # Small embeddings, of which the norms' epsilon is a large part.
    embedding = model.language_model.model.embed_tokens
    embedding.weight = embedding.weight * 0.004
    arrays = of_mlx_vlm.PUBLISHED_NAMES["falcon_ocr"](dict(tree_flatten(model.parameters())))
    expected = reference({name: torch.tensor(np.array(array)) for name, array in arrays.items()})
    found = np.array(model(mx.array([TOKENS]))[0])
    np.testing.assert_allclose(found, expected.numpy(), atol=2e-4)


def test_activations_have_the_models_dtype(tmp_path):
    written = write_model(of_mlx_vlm.FAMILIES["falcon_ocr"], tmp_path, drawn=True)
    model = lazy_model(Path(written), mx.bfloat16)
    assert model(mx.array([TOKENS])).dtype == mx.bfloat16
