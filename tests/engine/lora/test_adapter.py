# SPDX-License-Identifier: Apache-2.0
"""Adapter files are read as by PEFT and mlx-lm, or rejected."""

import json
import math

import numpy as np
import pytest
import torch
from safetensors.numpy import save, save_file

from vllm_metal.engine.lora.adapter import read_adapter
from vllm_metal.engine.lora.files import AdapterError, AdapterFiles

MODULE = "model.layers.0.self_attn.q_proj"
KEY = f"base_model.model.{MODULE}.lora_%s.weight"
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": ["q_proj"]}


def arrays(rank=2, num_in=5, num_out=3):
    rng = np.random.default_rng(0)
    shapes = {"A": (rank, num_in), "B": (num_out, rank)}
    return {KEY % name: rng.normal(size=s).astype(np.float32) for name, s in shapes.items()}


def write(folder, tensors, file="adapter_model.safetensors", **config):
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    if file.endswith(".bin"):
        torch.save({key: torch.tensor(array) for key, array in tensors.items()}, folder / file)
    else:
        save_file(tensors, folder / file)
    return AdapterFiles.find("mine", str(folder))


def read(files, max_rank=16):
    return read_adapter(files.read(), max_rank)


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "adapter_model.bin"])
@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({}, 3),
        ({"use_rslora": True}, 6 / math.sqrt(2)),
        ({"alpha_pattern": {"q_proj": 10}}, 5),
    ],
)
def test_an_update_of_peft_has_its_scale(tmp_path, file, config, scale):
    given = arrays()
    adapter = read(write(tmp_path, given, file, **config))
    update = adapter.updates[MODULE]
    delta = np.array(update.b) @ np.array(update.a)
    np.testing.assert_allclose(delta, scale * given[KEY % "B"] @ given[KEY % "A"], rtol=1e-5)


@pytest.mark.parametrize(("parameter", "scale"), [("gate_up_proj", 5), ("down_proj", 2)])
def test_one_parameter_of_experts_has_its_own_scale(tmp_path, parameter, scale):
    """PEFT's file names either the same."""
    module, rng = "model.layers.0.mlp.experts", np.random.default_rng(0)
    given = {
        f"base_model.model.{module}.lora_{name}.weight": rng.normal(size=shape).astype(np.float32)
        for name, shape in {"A": (6, 5), "B": (4, 6)}.items()  # three experts
    }
    config = {
        "target_modules": [],
        "target_parameters": [f"experts.{parameter}"],
        "alpha_pattern": {"experts.gate_up_proj": 10, "down_proj": 4, "experts": 8},
    }
    update = read(write(tmp_path, given, **config)).updates[module]
    a, b = (given[f"base_model.model.{module}.lora_{name}.weight"] for name in "AB")
    expected = np.einsum("ore,eri->eoi", b.reshape(4, 2, 3), a.reshape(3, 2, 5))
    np.testing.assert_allclose(np.array(update.b @ update.a), scale * expected, atol=1e-5)


@pytest.mark.parametrize(
    "targets",
    [
        {"target_modules": ["k_proj"]},
        {"target_modules": r".*\.k_proj"},
        {"exclude_modules": ["q_proj"]},
        {"layers_to_transform": [1]},
    ],
)
def test_tensors_that_the_configuration_does_not_target_do_not_count(tmp_path, targets):
    with pytest.raises(AdapterError, match=f"no tensor that applies: .* not target {MODULE}"):
        read(write(tmp_path, arrays(), **targets))


def test_an_update_of_mlx_lm_has_its_scale(tmp_path):
    given = {
        f"{MODULE}.lora_a": np.ones((5, 2), np.float32),
        f"{MODULE}.lora_b": np.full((2, 3), 2, np.float32),
    }
    config = {"fine_tune_type": "lora", "lora_parameters": {"rank": 2, "scale": 10.0}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    save_file(given, tmp_path / "adapters.safetensors")
    update = read(AdapterFiles.find("mine", str(tmp_path))).updates[MODULE]
    assert update.sizes == (5, 3)
    np.testing.assert_array_equal(np.array(update.b) @ np.array(update.a), np.full((3, 5), 40))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"peft_type": "LOHA"}, "LOHA"),
        ({"something_new": 3}, "something_new"),
        ({"lora_alpha": None}, "configuration"),
        ({"lora_alpha": float("inf")}, "scale inf"),
        ({"lora_alpha": float("nan")}, "scale nan"),
        ({"lora_alpha": 1e300}, "q_proj"),
    ],
)
def test_what_an_adapter_does_besides_is_refused(tmp_path, config, named):
    with pytest.raises(AdapterError, match=f"'mine' .*{named}"):
        read(write(tmp_path, arrays(), **config))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda given: given[KEY % "A"].fill(np.nan), "NaN or infinity: .*q_proj.lora_A"),
        (lambda given: given[KEY % "A"].fill(1e30), "update of up to .* at .*q_proj"),
        (lambda given: given.pop(KEY % "B"), "no lora_B for .*q_proj"),
        (lambda given: given.update(arrays(rank=3)), "ranks 3 and 3 at .*q_proj, and 2 in"),
        (lambda given: given.update({"x.bias": np.zeros((2, 2), np.float32)}), "x.bias"),
    ],
)
def test_a_tensor_that_cannot_be_served_is_named(tmp_path, change, named):
    given = arrays()
    change(given)
    with pytest.raises(AdapterError, match=f"'mine' .*{named}"):
        read(write(tmp_path, given))


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "adapter_model.bin"])
def test_a_truncated_file_is_named(tmp_path, file):
    files = write(tmp_path, arrays(), file)
    files.weights.write_bytes(files.weights.read_bytes()[:-20])
    with pytest.raises(AdapterError, match=f"'mine' has an unreadable {file}"):
        read(files)


def test_a_rank_above_the_largest_is_refused(tmp_path):
    with pytest.raises(AdapterError, match=r"rank 2 at .*q_proj: --max-lora-rank is 1"):
        read(write(tmp_path, arrays()), max_rank=1)


@pytest.mark.parametrize("kind", ["dora", "full"])
def test_other_kinds_of_mlx_lm_are_refused(tmp_path, kind):
    config = {"fine_tune_type": kind, "lora_parameters": {"rank": 2, "scale": 10.0}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "adapters.safetensors").write_bytes(save({"x.lora_a": np.ones((2, 2))}))
    with pytest.raises(AdapterError, match=f"fine_tune_type '{kind}'"):
        read(AdapterFiles.find("mine", str(tmp_path)))
