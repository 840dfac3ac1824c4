# SPDX-License-Identifier: Apache-2.0
"""Medusa's drafts are those of vLLM's own torch heads on mlx-lm's dense hidden states."""

import numpy as np
import pytest
import torch
from models.cases import cases
from spec_decode.heads import (
    HIDDEN,
    VOCAB,
    Bench,
    DenseTarget,
    K,
    engine_config,
    one_process,
    vllm_module,
    write_head,
    write_target,
)
from vllm.config import set_current_vllm_config
from vllm.model_executor.models.medusa import Medusa

from vllm_metal.models import loader

pytestmark = pytest.mark.usefixtures("unfused")

#: Shapes, other arrays, config.json, file, number of heads.
CASES = {
    "names of vLLM": (
        {f"blocks.{head}.layers.{layer}.weight": (HIDDEN, HIDDEN)
         for head in range(5) for layer in range(2)}
        | {f"lm_heads.{head}.weight": (VOCAB, HIDDEN) for head in range(5)},
        {}, {"num_hidden_layers": 2, "num_heads": 5}, "model.safetensors", 5),
    "names of its authors, biases": (
        {f"{head}.0.linear.weight": (HIDDEN, HIDDEN) for head in range(3)}
        | {f"{head}.0.linear.bias": (HIDDEN,) for head in range(3)}
        | {f"{head}.1.weight": (VOCAB, HIDDEN) for head in range(3)},
        {}, {"medusa_num_layers": 1, "medusa_num_heads": 3, "medusa_fc_bias": True},
        "medusa_lm_head.pt", 3),
    "frequent tokens only, one projection": (
        {f"medusa_heads.blocks.{head}.layers.0.weight": (HIDDEN, HIDDEN) for head in range(4)}
        | {"lm_heads.0.weight": (VOCAB, HIDDEN)},
        {"token_map": torch.arange(40) * 3},
        {"num_hidden_layers": 1, "num_heads": 4, "truncated_vocab_size": 40,
         "original_lm_head": True}, "model.safetensors", 4),
}  # fmt: skip


@pytest.fixture(
    scope="module",
    params=cases(
        CASES,
        ["names of its authors, biases"],
        ["names of vLLM", "frequent tokens only, one projection"],
    ),
)
def bench(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    shapes, extra, changes, file, num_heads = CASES[request.param]
    target = write_target(folder / "target")
    config = {"model_type": "medusa", "hidden_size": HIDDEN, "vocab_size": VOCAB} | changes
    head = write_head(folder / "head", shapes, extra, config, file)
    config = engine_config(target, head, "medusa")
    draft_config = config.speculative_config.draft_model_config
    # By vLLM's own wish it makes as many heads as drafts are wanted.
    draft_config.hf_config.num_heads = min(num_heads, K)
    if "truncated_vocab_size" in changes:  # undone by vLLM where vocab_size is the target's already
        draft_config.hf_config.truncated_vocab_size = changes["truncated_vocab_size"]
    weights = {
        name: torch.tensor(np.array(array))
        for name, array in loader.load_weights(draft_config, config).items()
    }
    module = vllm_module(Medusa, config, weights)
    dense = DenseTarget(target)

    @torch.no_grad()
    def judge(text, drafts):
        hidden = dense.states(text)[-1][len(text) - 2 : len(text) - 1]
        with one_process(), set_current_vllm_config(config):
            logits = module.compute_logits(module(hidden))
        return torch.cat(logits).numpy()[: len(drafts)]

    found = Bench(config, judge)
    found.num_heads = num_heads
    return found


def test_drafts_are_vllms_after_any_pattern_of_acceptance(bench):
    most = min(K, bench.num_heads)
    bench.begin(0, bench.prompt(41))
    bench.begin(1, bench.prompt(2))
    assert bench.step([0, 1], [0, 0], chunk=20) == [0, 0]
    assert bench.step([1, 0], [K, 0], chunk=20) == [most, 0]
    assert bench.step([0, 1], [0, K], chunk=20) == [0, most]
    for _ in range(5):
        limits = bench.rng.integers(0, K + 1, 2)
        assert bench.step(bench.rng.permutation(2), limits) == np.minimum(limits, most).tolist()
    assert bench.graphs.num_built > 0
    assert bench.step([0], [1]) == [1]
    assert bench.step([0, 1], [2, 2]) == [2, 0]  # the other one sat a step out
    for req_idx in range(2):
        bench.proposer.forget_request(req_idx)
