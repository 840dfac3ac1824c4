# SPDX-License-Identifier: Apache-2.0
"""Medusa's drafts follow its paper's formula (arXiv:2401.10774) on mlx-lm's hidden states."""

import numpy as np
import pytest
import torch
from engine.models.cases import cases
from engine.spec_decode.heads import (
    HIDDEN,
    VOCAB,
    Bench,
    DenseTarget,
    K,
    engine_config,
    random_arrays,
    write_head,
    write_target,
)
from torch.nn.functional import silu

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


def head_of(arrays, index, hidden):
    """Returns a head's [1, vocabulary] logits: h + silu(W h + b) per layer, then a projection."""
    layer = 0
    while True:
        weight = arrays.get(f"blocks.{index}.layers.{layer}.weight")
        name = f"{index}.{layer}.linear"
        weight = arrays.get(f"{name}.weight") if weight is None else weight
        if weight is None:
            break
        bias = arrays.get(f"{name}.bias", torch.zeros(HIDDEN))
        hidden = hidden + silu(hidden @ weight.T + bias)
        layer += 1
    names = (f"lm_heads.{index}.weight", f"{index}.{layer}.weight", "lm_heads.0.weight")
    logits = hidden @ next(arrays[name] for name in names if name in arrays).T
    if (known := arrays.get("token_map")) is None:
        return logits
    found = torch.full_like(logits, -torch.inf)
    found[:, known] = logits[:, known]
    return found


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
    arrays = {
        name.removeprefix("medusa_heads."): each
        for name, each in (random_arrays(shapes) | extra).items()
    }
    config = engine_config(target, head, "medusa")
    dense = DenseTarget(target)

    def judge(text, drafts):
        hidden = dense.states(text)[-1][len(text) - 2 : len(text) - 1]
        return torch.cat([head_of(arrays, index, hidden) for index in range(len(drafts))]).numpy()

    found = Bench(config, judge)
    found.num_heads = num_heads
    return found


def test_drafts_are_the_papers_after_any_pattern_of_acceptance(bench):
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
