# SPDX-License-Identifier: Apache-2.0
"""Files that did not arrive whole are named before anything is read."""

import json

import mlx.core as mx
import pytest

from vllm_metal.models.weight_files import ModelLoadError, check_weight_files


@pytest.fixture
def weights(tmp_path):
    """A file that is whole, so that each test breaks one thing."""
    path = tmp_path / "model.safetensors"
    mx.save_safetensors(str(path), {"one": mx.ones((5, 7)), "other": mx.zeros((3,))})
    check_weight_files(tmp_path)
    return path


def refusal(folder):
    with pytest.raises(ModelLoadError) as error:
        check_weight_files(folder)
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("kept", [0, 7, 8, 30, -1])
def test_a_file_that_is_cut_off_is_named_with_its_size(weights, kept):
    whole = weights.read_bytes()
    weights.write_bytes(whole[:kept])
    message = refusal(weights.parent)
    assert str(weights) in message
    assert f"{len(whole[:kept])} bytes of " in message
    assert kept != -1 or f"of {len(whole)}" in message


@pytest.mark.parametrize(
    "header",
    [b"x" * 64, b"[1, 2]" + b" " * 58, b'{"one": {"dtype": "F32"}}' + b" " * 39, b"\xff" * 64],
)
def test_a_file_whose_header_says_nothing_is_named(weights, header):
    weights.write_bytes(len(header).to_bytes(8, "little") + header + bytes(200))
    message = refusal(weights.parent)
    assert str(weights) in message and "no readable safetensors file" in message


def test_a_folder_without_weights_says_which_file_is_wanted(weights):
    weights.unlink()
    assert f"{weights} is missing" in refusal(weights.parent)


def test_a_file_that_the_index_names_must_be_there(weights):
    parts = [weights.parent / f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    weights.rename(parts[0])
    named = {"one": parts[0].name, "other": parts[1].name}
    index = weights.parent / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": named}))
    assert f"{parts[1]} is missing" in refusal(weights.parent)
    parts[1].write_bytes(parts[0].read_bytes())
    check_weight_files(weights.parent)
    index.write_text("{")
    assert f"{index} is unreadable" in refusal(weights.parent)
