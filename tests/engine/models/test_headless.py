# SPDX-License-Identifier: Apache-2.0
"""Decoders without a head or with another one, and rows of heads."""

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import torch
from engine.pooling import checkpoints
from mlx.utils import tree_flatten
from safetensors.torch import load_file, save_file

from vllm_metal.engine.models import headless
from vllm_metal.engine.models.loader import lazy_model
from vllm_metal.engine.models.parts import ModelParts
from vllm_metal.identity.model_files import ModelLoadError

IDS = [5, 9, 700]


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    return checkpoints.qwen3(tmp_path_factory.mktemp("untied") / "model", tied=False)


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return checkpoints.qwen3(tmp_path_factory.mktemp("tied") / "model")


def load(folder):
    return lazy_model(Path(folder), mx.float32, classes=headless.classes)


def names(model):
    return {name for name, _ in tree_flatten(model.parameters())}


def hidden_states(folder):
    return np.array(ModelParts(load(folder)).dense_hidden([1, 2, 3]))


def test_a_head_is_there_if_the_files_have_it(untied):
    model = load(untied)
    assert headless.head_path(model) == "lm_head"
    with_it = names(model)
    headless.drop_head(model)
    assert headless.head_path(model) is None
    assert with_it - names(model) == {"lm_head.weight"}
    headless.drop_head(model)  # nothing more goes


def test_files_of_a_decoder_alone_or_with_another_head_give_the_same(untied, tmp_path):
    whole = hidden_states(untied)
    arrays = load_file(Path(untied) / "model.safetensors")
    del arrays["lm_head.weight"]
    alone = {name.removeprefix("model."): array for name, array in arrays.items()}
    classifies = arrays | {"score.weight": torch.zeros(3, checkpoints.HIDDEN)}
    for place, changed in (("alone", alone), ("classifies", classifies)):
        folder = tmp_path / place
        folder.mkdir()
        (folder / "config.json").write_bytes((Path(untied) / "config.json").read_bytes())
        save_file(changed, folder / "model.safetensors", {"format": "pt"})
        assert headless.head_path(load(folder)) is None
        np.testing.assert_array_equal(hidden_states(folder), whole)


def test_an_array_that_nobody_knows_is_refused_still(untied, tmp_path):
    arrays = load_file(Path(untied) / "model.safetensors")
    (tmp_path / "config.json").write_bytes((Path(untied) / "config.json").read_bytes())
    save_file(arrays | {"other.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"other\.weight"):
        load(tmp_path)


@pytest.mark.parametrize(("of", "quantized"), [("tied", False), ("untied", True)])
def test_rows_of_a_head_give_its_logits(request, of, quantized):
    model = load(request.getfixturevalue(of))
    if quantized:
        nn.quantize(model, group_size=32, bits=4)
    parts = ModelParts(model)
    hidden = mx.random.normal((4, 1, checkpoints.HIDDEN), key=mx.random.key(0))
    rows = headless.head_rows(model, parts.input_embedding, IDS)
    wanted = np.array(parts.compute_logits(hidden))[:, IDS]
    np.testing.assert_allclose(np.array(hidden[:, 0] @ rows.T), wanted, atol=1e-4)
