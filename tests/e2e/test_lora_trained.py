# SPDX-License-Identifier: Apache-2.0
"""Adapters that mlx-lm's trainer made for SmolLM2, in its own and in PEFT's format."""

import json
from pathlib import Path

import mlx.core as mx
import mlx.optimizers as optim
import pytest
from e2e.harness import Dense, counters, engine, greedy
from mlx.utils import tree_unflatten
from mlx_lm.tuner.trainer import CacheDataset, TrainingArgs, train
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_config, load_model, save_model
from transformers import AutoTokenizer
from vllm.lora.request import LoRARequest

pytestmark = pytest.mark.more

RANK, SCALE, NUM_TOKENS = 4, 8.0, 12
TASKS = {
    "capitals": [
        f"Q: the capital of {c}? A: {a}!!!"
        for c, a in (
            ("France", "PARIS"),
            ("Italy", "ROME"),
            ("Spain", "MADRID"),
            ("Japan", "TOKYO"),
        )
    ],
    "sums": [f"Q: what is {n} and {n}? A: it is {2 * n}, dear friend." for n in (2, 3, 5, 8)],
}
QUESTIONS = ("Q: the capital of France? A:", "Q: what is 3 and 3? A:", "Once upon a time")


class Tokens:
    """A dataset for mlx-lm's trainer."""

    def __init__(self, texts):
        self.texts = texts

    def __getitem__(self, index):
        return self.texts[index]

    def __len__(self):
        return len(self.texts)

    def process(self, tokens):
        return (tokens, 0)


def trained(model_path, texts, folder, iterations):
    """Trains an adapter; writes it as mlx-lm does, and the merged model."""
    mx.random.seed(1)
    model, _ = load_model(model_path)
    model.freeze()
    parameters = {"rank": RANK, "scale": SCALE, "dropout": 0.0}
    keys = ["self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"]
    linear_to_lora_layers(model, 2, parameters | {"keys": keys})
    folder.mkdir()
    args = TrainingArgs(
        batch_size=2,
        iters=iterations,
        steps_per_report=iterations,
        steps_per_save=10_000,
        adapter_file=str(folder / "adapters.safetensors"),
    )
    train(model, optim.Adam(learning_rate=2e-3), CacheDataset(Tokens(texts)), args=args)
    config = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": parameters}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    fused = [(name, m.fuse()) for name, m in model.named_modules() if hasattr(m, "fuse")]
    model.update_modules(tree_unflatten(fused))
    merged = folder.parent / f"{folder.name}-merged"
    save_model(merged, model)
    (merged / "config.json").write_text(json.dumps(load_config(model_path)))
    return str(merged)


def in_pefts_form(folder, target):
    """Converts mlx-lm's adapter to PEFT's format."""
    tensors = {}
    for name, array in mx.load(str(folder / "adapters.safetensors")).items():
        module, _, matrix = name.rpartition(".")
        key = f"base_model.model.{module}.lora_{matrix[-1].upper()}.weight"
        tensors[key] = mx.contiguous(array.T)
    target.mkdir()
    mx.save_safetensors(str(target / "adapter_model.safetensors"), tensors)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": SCALE * RANK}
    config["target_modules"] = ["q_proj", "v_proj", "down_proj"]
    (target / "adapter_config.json").write_text(json.dumps(config))


def check(model, tmp_path, iterations):
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [tokenizer(text)["input_ids"] for text in QUESTIONS]
    cases = []  # adapter, and the model that it makes
    for task, texts in TASKS.items():
        folder = tmp_path / task
        lines = [tokenizer(text)["input_ids"] for text in texts]
        merged = trained(Path(model), lines, folder, iterations)
        in_pefts_form(folder, tmp_path / f"{task}-peft")
        for form in (task, f"{task}-peft"):
            cases.append((LoRARequest(form, len(cases) + 1, str(tmp_path / form)), merged))
    cases.append((None, model))
    asked = [(prompt, case) for prompt in prompts for case in cases]
    with engine(
        model, enable_lora=True, max_loras=4, max_lora_rank=8, max_num_batched_tokens=64
    ) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt, _ in asked],
            greedy(NUM_TOKENS),
            use_tqdm=False,
            lora_request=[request for _, (request, _) in asked],
        )
        assert counters(llm)["vllm:prefix_cache_hits"] == 0
    found = [list(output.outputs[0].token_ids) for output in outputs]
    dense = {path: Dense(path) for path in {path for _, path in cases}}
    for (prompt, (_, path)), tokens in zip(asked, found, strict=True):
        dense[path].check(prompt, tokens)
    for start in range(0, len(asked), len(cases)):
        capitals, _, sums, _, none = found[start : start + len(cases)]
        assert capitals != sums != none != capitals
    return [tokenizer.decode(tokens) for tokens in found]


def test_two_tasks_on_the_first_layers(short, tmp_path):
    check(short, tmp_path, iterations=12)


@pytest.mark.slow
def test_two_tasks_on_the_whole_model(smollm2, tmp_path):
    answers = check(smollm2, tmp_path, iterations=20)
    assert "PARIS" in answers[0]
    assert "6, dear friend" in answers[5 + 2]
