# SPDX-License-Identifier: Apache-2.0
"""Adapters of experts, recurrent layers and quantized weights, in mixed batches."""

import json

import mlx.core as mx
import pytest
import torch
from e2e.harness import Dense, engine
from e2e.test_lora import NUM_TOKENS, SMALL, ask, named, prompt, tokens
from engine.lora.toys import Toy, adapter_of, greedy_tokens
from engine.weights.toys import stored_as, write_stored
from mlx_lm.utils import dequantize_model, load_config, load_model, quantize_model, save_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from vllm_metal.engine.models.embedded import smollm2_gguf

pytestmark = pytest.mark.more
PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def check(base, adapters, toy):
    """Checks two adapters and none in one batch of prompts longer and shorter than a step."""
    prompts = [prompt(70, 1), prompt(9, 2), prompt(30, 3)]
    models = [*(adapted for _, adapted in adapters), toy.model]
    expected = [
        greedy_tokens(model, each, NUM_TOKENS) for model, each in zip(models, prompts, strict=True)
    ]
    requests = [*(named(n, folder) for n, (folder, _) in enumerate(adapters, 1)), None]
    with engine(base, max_loras=2, **SMALL) as llm:
        assert tokens(ask(llm, prompts, requests)) == expected
        again = ask(llm, prompts[:1], requests[:1])
        assert again[0].num_cached_tokens > 0
        assert tokens(again) == expected[:1]


@pytest.mark.parametrize(
    "kind",
    ["qwen3_5", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("gpt2", "gemma3"))],
)
def test_adapters_of_all_linear_layers(tmp_path, kind):
    toy = Toy(kind, tmp_path / "base")
    base = toy.save()
    adapters = [(tmp_path / str(n), toy.adapter(tmp_path / str(n), n)) for n in (1, 2)]
    check(base, adapters, toy)


def test_experts_in_one_array_and_one_by_one(tmp_path):
    toy = Toy("qwen3_moe", tmp_path / "base")
    base = toy.save()
    adapted = toy.adapter(
        tmp_path / "1", 1, target_modules=["q_proj"], target_parameters=PARAMETERS
    )
    apart = tmp_path / "2"
    adapted.save_pretrained(apart)
    save_file(by_expert(load_file(apart / "adapter_model.safetensors"), 4), apart / "a")
    (apart / "a").replace(apart / "adapter_model.safetensors")
    check(base, [(tmp_path / "1", adapted), (apart, adapted)], toy)


def by_expert(tensors, num_experts):
    """Splits an adapter of stacked experts into one module per expert."""
    found = {}
    for name, array in tensors.items():
        if ".experts." not in name or "lora_B" in name:
            if ".experts." not in name:
                found[name] = array
            continue
        b = tensors[name.replace("lora_A", "lora_B")]
        a = array.reshape(num_experts, -1, array.shape[-1])
        b = b.reshape(b.shape[0], -1, num_experts)
        inner = ".base_layer" in name
        stem = name.replace(".base_layer", "").removesuffix("lora_A.weight")
        for expert in range(num_experts):
            matrix = b[..., expert]
            halves = dict(zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True))
            for part, rows in halves.items() if inner else [("down_proj", matrix)]:
                found[f"{stem}{expert}.{part}.lora_A.weight"] = a[expert].clone()
                found[f"{stem}{expert}.{part}.lora_B.weight"] = rows.contiguous()
    return found


def test_an_adapter_over_quantized_weights(tmp_path):
    """Compares with mlx-lm alone over dequantized weights that include the update."""
    toy = Toy("llama", tmp_path / "base")
    toy.save()
    adapted = toy.adapter(tmp_path / "adapter", 1)
    model, config = load_model(tmp_path / "base")
    model, config = quantize_model(model, config, group_size=32, bits=4)
    save_model(tmp_path / "4bit", model)
    write_config(tmp_path, "4bit", config)
    model = dequantize_model(model)
    updates = {
        name: module.get_delta_weight("default").detach().numpy()
        for name, module in adapted.base_model.model.named_modules()
        if hasattr(module, "get_delta_weight")
    }
    for name, module in model.named_modules():
        if name in updates:
            module.weight = module.weight + mx.array(updates[name])
    save_model(tmp_path / "merged", model)
    write_config(tmp_path, "merged", load_config(tmp_path / "base"))
    text = prompt(50, 4)
    with engine(str(tmp_path / "4bit"), max_loras=1, **SMALL) as llm:
        (generated,) = tokens(ask(llm, [text], [named(1, tmp_path / "adapter")]))
    Dense(str(tmp_path / "merged")).check(text, generated)
    assert generated != greedy_tokens(toy.model, text, NUM_TOKENS)


@pytest.mark.parametrize(
    "form",
    [
        "gptq 4 bits, ordered",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("fp8 rows", "compressed nvfp4")),
    ],
)
def test_an_adapter_over_published_weights(tmp_path, form):
    """Compares with stored values that include the update."""
    toy = Toy("llama", tmp_path / "base")
    toy.save()
    adapted = toy.adapter(tmp_path / "adapter", 1)
    stored, dense = stored_as(form, load_file(tmp_path / "base" / "model.safetensors"))
    for name, module in adapted.base_model.model.named_modules():
        if hasattr(module, "get_delta_weight"):
            update = module.get_delta_weight("default").detach()
            dense[f"{name}.weight"] = dense[f"{name}.weight"] + update
    for name in ("published", "merged"):
        (tmp_path / name).mkdir()
        write_config(tmp_path, name, load_config(tmp_path / "base"))
    write_stored(form, stored, tmp_path / "published")
    merged = {name: tensor.contiguous() for name, tensor in dense.items()}
    save_file(merged, tmp_path / "merged" / "model.safetensors", {"format": "pt"})
    text = prompt(50, 4)
    with engine(str(tmp_path / "published"), max_loras=1, **SMALL) as llm:
        (generated,) = tokens(ask(llm, [text], [named(1, tmp_path / "adapter")]))
    Dense(str(tmp_path / "merged")).check(text, generated)
    assert generated != greedy_tokens(toy.model, text, NUM_TOKENS)


def test_an_adapter_over_a_gguf_file(tmp_path):
    """Llama's file orders rows of queries and keys differently than adapters do."""
    file = smollm2_gguf()
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    adapted = adapter_of(model, tmp_path / "adapter", 1)
    text = prompt(50, 4)
    with engine(str(file), max_loras=1, **SMALL) as llm:
        (generated,) = tokens(ask(llm, [text], [named(1, tmp_path / "adapter")]))
    assert generated == greedy_tokens(adapted, text, NUM_TOKENS)
    assert generated != greedy_tokens(model, text, NUM_TOKENS)


def write_config(folder, name, config):
    (folder / name / "config.json").write_text(json.dumps(config))
