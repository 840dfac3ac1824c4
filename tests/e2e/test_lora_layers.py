# SPDX-License-Identifier: Apache-2.0
"""Adapters of every supported layer, against the merged model."""

import json
import shutil

import mlx.core as mx
import pytest
from e2e.harness import Dense, engine
from e2e.test_lora import SMALL, ask, named, tokens
from engine.models import latent
from engine.models.recurrent import FAMILIES, VOCAB, write_model
from mlx.utils import tree_flatten

from vllm_metal.engine.lora.updates import Updates
from vllm_metal.engine.models.loader import dense_model

pytestmark = pytest.mark.slow

ALL = {f"recurrent {name}": family for name, family in FAMILIES.items()}
ALL |= {f"latent {name}": family for name, family in latent.FAMILIES.items()}
RANK, SCALE = 2, 2.0


def write_adapter(model_path, folder, merged):
    """Writes an adapter of all layers in mlx-lm's form, and the merged model."""
    model = dense_model(model_path)
    layers = Updates(model, 1, RANK, mx.float32).layers
    tensors = {}
    for number, (name, layer) in enumerate(layers.items()):
        sizes, (key_a, key_b) = layer.sizes, mx.random.split(mx.random.key(number))
        experts = () if sizes.num_experts is None else (sizes.num_experts,)
        a = mx.random.normal((*experts, RANK, sizes.num_in), key=key_a) / sizes.num_in**0.5
        b = mx.random.normal((*experts, sizes.num_out, RANK), key=key_b)
        module = model
        for part in name.split("."):
            module = module[int(part)] if isinstance(module, list) else module[part]
        weight = module.weight
        b = b * 0.3 * mx.sqrt(mx.mean(weight * weight) * sizes.num_in)
        module.weight = weight + SCALE * b @ a
        matrices = (a, b) if experts else (a.T, b.T)
        tensors |= {f"{name}.lora_{x}": y for x, y in zip("ab", matrices, strict=True)}
    folder.mkdir()
    mx.save_safetensors(str(folder / "adapters.safetensors"), tensors)
    config = {"fine_tune_type": "lora", "lora_parameters": {"rank": RANK, "scale": SCALE}}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    merged.mkdir()
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(merged / "model.safetensors"), weights, {"format": "mlx"})
    shutil.copy(model_path / "config.json", merged)
    return set(layers)


@pytest.mark.parametrize("name", ALL)
def test_an_adapter_of_every_layer(name, tmp_path):
    base = tmp_path / "base"
    write_model(ALL[name], base, drawn=True)
    layers = write_adapter(base, tmp_path / "adapter", tmp_path / "merged")
    assert len(layers) > 4
    key = mx.random.key(0)
    prompts = [mx.random.randint(3, VOCAB, (n,), key=key).tolist() for n in (70, 20, 9)]
    request = named(1, tmp_path / "adapter")
    with engine(str(base), max_loras=1, **SMALL | {"max_num_batched_tokens": 32}) as llm:
        found = tokens(ask(llm, prompts, [request, None, request], 12))
    merged, plain = Dense(str(tmp_path / "merged")), Dense(str(base))
    for prompt, generated, dense in zip(prompts, found, (merged, plain, merged), strict=True):
        dense.check(prompt, generated)
