# SPDX-License-Identifier: Apache-2.0
"""Incomplete files are named before anything is read."""

import json

import mlx.core as mx
import pytest

from vllm_metal.engine.weights.files import check_weight_files, stored_arrays
from vllm_metal.identity.model_files import ModelLoadError, weight_files


@pytest.fixture
def weights(tmp_path):
    """A complete file, of which each test breaks one thing."""
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
    assert str(weights) in message and "not a readable safetensors file" in message


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


def shards(folder, names, index=True):
    """Writes two files with a tensor each, and a third one outside of the index."""
    for place, file in enumerate((*names, "model-00003-of-00003.safetensors")):
        arrays = {f"tensor.{min(place, 1)}": mx.full((2,), float(place))}
        mx.save_safetensors(str(folder / file), arrays)
    if index:
        weight_map = {f"tensor.{place}": file for place, file in enumerate(names)}
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("stem", ["model-0000{}-of-00002", "pytorch_model-{}", "weights.0{}"])
def test_files_are_those_of_the_index(tmp_path, stem):
    names = [f"{stem.format(n)}.safetensors" for n in (1, 2)]
    shards(tmp_path, names)
    assert [path.name for path in weight_files(tmp_path)] == names
    assert {name: array.tolist() for name, array in stored_arrays(tmp_path)} == {
        "tensor.0": [0.0, 0.0],
        "tensor.1": [1.0, 1.0],
    }


def test_a_tensor_of_two_files_comes_from_the_one_that_the_index_names(tmp_path):
    names = ["a.safetensors", "b.safetensors"]
    shards(tmp_path, names)
    both = {"tensor.0": mx.full((2,), 5.0), "tensor.1": mx.full((2,), 7.0)}
    mx.save_safetensors(str(tmp_path / names[0]), both)
    assert {name: array[0].item() for name, array in stored_arrays(tmp_path)} == {
        "tensor.0": 5.0,
        "tensor.1": 1.0,
    }


def test_without_an_index_a_tensor_of_two_files_is_named(tmp_path):
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    shards(tmp_path, names, index=False)
    message = refusal(tmp_path)
    assert "tensor.1 is stored twice" in message and "model-00003-of-00003.safetensors" in message
    (tmp_path / "model-00003-of-00003.safetensors").unlink()
    check_weight_files(tmp_path)


@pytest.mark.parametrize("names", [["pytorch_model.safetensors"], ["weights.00.safetensors"]])
def test_files_of_other_names_are_read_where_there_is_no_index(tmp_path, names):
    mx.save_safetensors(str(tmp_path / names[0]), {"one": mx.ones((2,))})
    assert [path.name for path in weight_files(tmp_path)] == names
