# SPDX-License-Identifier: Apache-2.0
"""Checkpoints written by transformers: the engine's text equals transformers'."""

import json
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from e2e.harness import Dense, counters, generate
from e2e.test_hybrids import NGRAM, greedy_ids, hybrid_engine, prompts_of
from engine.models import latent, recurrent
from engine.models.recurrent import config_of
from own_configs import own_config
from transformers import AutoModelForCausalLM

FAMILIES = {**recurrent.FAMILIES, **latent.FAMILIES}
#: A gated delta rule, Mamba 2 beside attention, Mamba 2 alone, short convolutions, and MLA with
#: experts.
NAMES = ("qwen3_next", "falcon_h1", "mamba2", "lfm2", "deepseek_v3")
MORE = ("qwen3_next", "deepseek_v3")


@dataclass
class Transformers(Dense):
    """transformers' forward of a whole text, to judge greedy tokens."""

    def __post_init__(self) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32).eval()
        self._known: set[tuple[int, ...]] = set()

    def logits(self, tokens) -> np.ndarray:
        with torch.no_grad():
            return self._model(torch.tensor([list(tokens)]), use_cache=False).logits[0].numpy()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.more if name in MORE else pytest.mark.slow)
        for name in NAMES
    ],
)
def test_text_equals_transformers(name, tmp_path):
    content = config_of(FAMILIES[name])
    content["tie_word_embeddings"] = name == "lfm2"  # as mlx-lm has it
    changes = {key: value for key, value in content.items() if key != "model_type"}
    config = own_config(content["model_type"], **changes)
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:  # large enough that logits differ
                parameter.mul_(4)
    model.save_pretrained(tmp_path)
    # mlx-lm looks for settings of rotary embeddings where checkpoints of the time have them.
    saved = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(saved | content))
    dense, prompts = Transformers(str(tmp_path)), prompts_of(8)
    with hybrid_engine(str(tmp_path), speculative_config=NGRAM, block_size=32) as llm:
        for _ in range(2):
            for prompt, tokens in zip(prompts, generate(llm, prompts, greedy_ids()), strict=True):
                dense.check(prompt, tokens)
        assert counters(llm)["vllm:prefix_cache_hits"] > 0
