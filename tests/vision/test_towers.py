# SPDX-License-Identifier: Apache-2.0
"""Prompts with images, in any chunks and beside others, equal transformers' same model."""

import numpy as np
import pytest
from vision.toys import Prompt, Toy

FAMILIES = ("qwen3_vl", "qwen3_5")


@pytest.fixture(scope="module", params=FAMILIES)
def toy(request, tmp_path_factory):
    return Toy(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def served(toy):
    return toy.served()


@pytest.fixture(scope="module")
def two(toy):
    """A text with two images of different shapes."""
    prompt = Prompt().say(*toy.words(5)).show(toy.picture(2, 5), "first")
    return prompt.say(*toy.words(7)).show(toy.picture(4, 2), "second").say(*toy.words(6))


def check(logits, expected):
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(logits, expected, atol=2e-4)


def test_logits_equal_those_of_transformers_wherever_chunks_end(toy, served, two):
    expected = toy.logits(two)
    check(served.step({"a": len(two.ids)}, [served.new("a", two.ids, two.features)])["a"], expected)
    parts = [served.step({"b": 8}, [served.new("b", two.ids, two.features)])["b"]]
    parts += [served.step({"b": count})["b"] for count in (14, 3, len(two.ids) - 25)]
    check(np.concatenate(parts), expected)
    assert toy.encoder.num_encoded == 2  # in one request, in two, in any number of chunks
