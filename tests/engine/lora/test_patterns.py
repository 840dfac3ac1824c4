# SPDX-License-Identifier: Apache-2.0
"""Random adapter configurations update the same weights as PEFT's merge, equally."""

import copy
import json
import random
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from engine.lora.toys import Toy
from mlx.utils import tree_flatten
from peft import PeftModel

from vllm_metal.engine.lora.adapter import read_adapter
from vllm_metal.engine.lora.files import AdapterError, AdapterFiles
from vllm_metal.engine.lora.names import on_modules
from vllm_metal.engine.lora.patterns import Patterns
from vllm_metal.engine.models.loader import dense_model

MODULES = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
ROUTER = "mlp.gate.weight"
#: Keys of patterns: names, ends of names, expressions, and some that match nothing.
KEYS = [
    *("q_proj", "self_attn.k_proj", "layers.1.self_attn.v_proj", "model.layers.0.mlp.up_proj"),
    *("down_proj", r".*\.layers\.0\..*", "(o|q)_proj", "proj", "experts", "layers.1", "^q_proj"),
    *("experts.gate_up_proj", "mlp.experts.down_proj", "gate_up_proj", "experts.base_layer"),
    *("gate.weight", "mlp.gate", "model.layers.0.mlp.experts.gate_up_proj", r"experts\.\w+"),
]


def some(rng, values, least=1):
    return rng.sample(values, rng.randint(least, len(values)))


def draw_targets(rng, kind):
    """Draws updated modules or parameters, as in a PEFT configuration."""
    if kind == "qwen3_moe" and rng.random() < 0.8:
        modules = some(rng, MODULES, 0)
        return {"target_modules": modules, "target_parameters": some(rng, [*EXPERTS, ROUTER])}
    names = some(rng, MODULES + (MLP if kind == "llama" else []))
    expression = rf".*layers\.[{rng.choice(['0', '1', '01'])}]\..*({'|'.join(names)})"
    return {"target_modules": rng.choice([names, expression, "all-linear"])}


def draw_config(rng, kind):
    config = {"r": rng.choice([2, 3, 4]), "lora_alpha": rng.choice([1, 5, 8])}
    config |= draw_targets(rng, kind)
    config["use_rslora"] = rng.random() < 0.3
    if rng.random() < 0.6:
        config["rank_pattern"] = {key: rng.randint(1, 5) for key in some(rng, KEYS)[:4]}
    if rng.random() < 0.8:
        config["alpha_pattern"] = {key: rng.randint(0, 9) for key in some(rng, KEYS)[:4]}
    if rng.random() < 0.2:
        config["exclude_modules"] = rng.choice([["v_proj", "layers.1.mlp.up_proj"], r".*\.k_proj"])
    # PEFT takes it beside lists only.
    if isinstance(config["target_modules"], list) and rng.random() < 0.3:
        config["layers_to_transform"] = rng.choice([0, [1], [0, 1]])
        config["layers_pattern"] = rng.choice([None, "layers", ["h", "layers"]])
    return config


def edit(rng, config):
    """Edits a saved configuration as users might."""
    config["init_lora_weights"] = True  # PEFT updates nothing where the file has no tensors
    if rng.random() < 0.3 and config["alpha_pattern"]:
        config["alpha_pattern"] = dict(reversed(config["alpha_pattern"].items()))
    if rng.random() < 0.2:
        config["lora_alpha"] = 7
    if rng.random() < 0.2 and isinstance(config["target_modules"], list):
        config["target_modules"] = config["target_modules"][:-1]
    if rng.random() < 0.1:
        config["exclude_modules"] = ["o_proj"]
    if rng.random() < 0.1 and isinstance(config["target_modules"], list):
        config["layers_to_transform"] = [1]


@pytest.fixture(scope="module", params=["llama", "qwen3_moe"])
def base(request, tmp_path_factory):
    """A toy, and its weights in mlx-lm."""
    toy = Toy(request.param, tmp_path_factory.mktemp(request.param))
    model = dense_model(Path(toy.save()))
    return toy, model


def weights(model):
    return {key.removesuffix(".weight"): np.array(w) for key, w in tree_flatten(model.parameters())}


def write_adapter(toy, seed, folder):
    """Writes an adapter with a possibly edited configuration; returns PEFT's model or error."""
    rng, path = random.Random(seed), folder / "adapter" / "adapter_config.json"
    toy.adapter(path.parent, seed, **draw_config(rng, toy.kind))
    config = json.loads(path.read_text())
    edit(rng, config)
    path.write_text(json.dumps(config))
    try:
        adapted = PeftModel.from_pretrained(copy.deepcopy(toy.model), path.parent)
    except (ValueError, RuntimeError) as error:
        return config, error
    return config, adapted.merge_and_unload()


def read(folder, model):
    """Returns updates by mlx-lm's modules."""
    adapter = read_adapter(AdapterFiles.find("mine", str(folder)).read(), 64)
    return on_modules(adapter, model)


def fits(folder, model):
    """Returns whether an engine accepts the adapter: it is readable and fits the model."""
    try:
        updates, found = read(folder, model), weights(model)
    except AdapterError:
        return False
    return all(
        name in found and mx.matmul(each.b, each.a).shape == found[name].shape
        for name, each in updates.items()
    )


def check(base, seed, folder):
    """Writes an adapter and compares its updates; returns False if PEFT rejects it too."""
    toy, model = base
    try:
        config, merged = write_adapter(toy, seed, folder)
    except ValueError as error:  # nothing is targeted
        assert "target" in str(error), error
        return False
    if isinstance(merged, Exception):
        assert not fits(folder / "adapter", model), (config, merged)
        return False
    compare(merged, model, folder, (seed, config))
    return True


def compare(merged, model, folder, named):
    """Asserts that our updates reproduce PEFT's merged weights."""
    merged.save_pretrained(folder / "merged")
    found = weights(model)
    updates = read(folder / "adapter", model)
    assert updates.keys() <= found.keys(), named
    for module, update in updates.items():
        found[module] = found[module] + np.array(mx.matmul(update.b, update.a))
    expected = weights(dense_model(folder / "merged"))
    assert found.keys() == expected.keys()
    different = {
        name: float(np.abs(found[name] - expected[name]).max())
        for name in found
        if not np.allclose(found[name], expected[name], atol=1e-4)
    }
    assert not different, (different, named)


@pytest.mark.filterwarnings("ignore")  # PEFT's, of patterns that match nothing
@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 100), marks=pytest.mark.slow)])
def test_random_configurations(base, seeds, tmp_path):
    compared = [seed for seed in seeds if check(base, seed, tmp_path / str(seed))]
    assert len(compared) >= len(seeds) / 2


#: By family: updated modules with another name in files, in mlx-lm or in both.
RENAMED = {
    "falcon_h1": {"target_modules": [*MODULES, "in_proj", "up_proj", "down_proj"]},
    "nemotron_h": {"target_modules": [*MODULES, "in_proj", "up_proj", "down_proj"]},
    "kimi_linear": {
        "target_modules": [*MODULES[:3], "f_a_proj", "f_b_proj", "shared_experts.up_proj"],
        "target_parameters": [*EXPERTS, ROUTER],
    },
    "mixtral": {"target_modules": [], "target_parameters": [*EXPERTS, ROUTER]},
}
#: Updates of mlx-lm's modules that this makes.
LEAST = {"falcon_h1": 7, "nemotron_h": 7, "kimi_linear": 14, "mixtral": 8}


@pytest.mark.more
@pytest.mark.parametrize("kind", RENAMED)
def test_modules_that_files_name_otherwise(kind, tmp_path):
    toy = Toy(kind, tmp_path / "base")
    model = dense_model(Path(toy.save()))
    adapted = toy.adapter(tmp_path / "adapter", 1, **RENAMED[kind])
    compare(adapted.merge_and_unload(), model, tmp_path, kind)
    assert len(read(tmp_path / "adapter", model)) >= LEAST[kind]


def test_wrappers_of_a_modules_parameters_are_named_from_the_innermost():
    module = "model.layers.0.mlp.experts"
    config = {"r": 2, "lora_alpha": 4, "target_parameters": ["down_proj", "gate_up_proj"]}
    patterns = Patterns(config, [module, f"{module}.base_layer"])
    assert patterns.update_of(module).name == f"{module}.down_proj"
    assert patterns.update_of(f"{module}.base_layer").name == f"{module}.gate_up_proj"
