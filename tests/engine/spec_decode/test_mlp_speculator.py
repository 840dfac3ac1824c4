# SPDX-License-Identifier: Apache-2.0
"""An MLP speculator's drafts follow its paper's formulas on mlx-lm's hidden states."""

import math

import numpy as np
import pytest
import torch
from engine.models.cases import cases
from engine.spec_decode.heads import (
    CONFIG,
    HIDDEN,
    VOCAB,
    Bench,
    DenseTarget,
    K,
    engine_config,
    random_arrays,
    serve_and_check,
    write_head,
    write_target,
)
from torch.nn.functional import gelu

from vllm_metal.engine.models import loader, parts
from vllm_metal.engine.spec_decode.registry import load_network

INNER = 48


def shapes(num_steps, num_projections, prefix="", vocab=VOCAB, hidden=HIDDEN):
    """Returns a speculator's arrays; tied ones once."""
    found = {}
    for step in range(num_steps):
        found |= {
            f"emb.{step}.weight": (vocab, INNER),
            f"ln.{step}.weight": (INNER,),
            f"ln.{step}.bias": (INNER,),
            f"head.{step}.weight": (vocab, INNER),
        }
    for step in range(num_projections):
        found[f"proj.{step}.weight"] = (INNER, INNER if step else hidden)
    return {prefix + name: shape for name, shape in found.items()}


def config_json(num_steps, **changes):
    return {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "emb_dim": HIDDEN,
        "inner_dim": INNER,
        "vocab_size": VOCAB,
        "n_predict": num_steps,
        "top_k_tokens_per_head": [3] * num_steps,
        "tie_weights": False,
        "scale_input": False,
    } | changes


#: Arrays that all steps share, under one step's name, and every step's own.
TIED = shapes(1, 2, "speculator.") | {
    f"speculator.head.{step}.weight": (VOCAB, INNER) for step in range(1, 4)
}
#: Shapes, config.json, file, steps.
CASES = {
    "each step its own": (shapes(5, 5), config_json(5), "pytorch_model.bin", 5),
    "tied, input scaled": (
        TIED,
        config_json(4, tie_weights=True, scale_input=True),
        "model.safetensors",
        4,
    ),
    "fewer steps than drafts": (
        shapes(2, 2, "speculator."),
        config_json(2, scale_input=True),
        "model.safetensors",
        2,
    ),
}


class Recurrence:
    """The formulas of arXiv:2404.19124, with its authors' weights and norms."""

    def __init__(self, arrays, settings):
        self.arrays = {name.removeprefix("speculator."): array for name, array in arrays.items()}
        self.state_weight = 0.5 ** (0.5 / settings["n_predict"])
        self.token_weight = math.sqrt((1 - self.state_weight**2) * (INNER / 2))
        self.scales = settings["scale_input"]

    def of(self, kind, step, part="weight"):
        """Returns a step's array; where arrays are tied, later steps use the last one."""
        last = sum(f"{kind}.{each}.{part}" in self.arrays for each in range(9)) - 1
        return self.arrays[f"{kind}.{min(step, last)}.{part}"]

    @staticmethod
    def normed(x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    def logits(self, state, tokens):
        """Returns [steps, vocabulary] logits after each token, from one hidden state."""
        if self.scales:
            state = self.normed(state) / math.sqrt(2)
        found = []
        for step, token in enumerate(tokens):
            token = self.of("emb", step)[token] * (self.token_weight / self.state_weight)
            mixed = self.normed(state @ self.of("proj", step).T + token)
            state = gelu(self.of("ln", step) * mixed + self.of("ln", step, "bias"))
            found.append(state @ self.of("head", step).T)
        return torch.cat(found).numpy()


@pytest.fixture(
    scope="module",
    params=cases(CASES, ["tied, input scaled"], ["each step its own", "fewer steps than drafts"]),
)
def bench(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    arrays, head_config, file, num_steps = CASES[request.param]
    target = write_target(folder / "target")
    head = write_head(folder / "head", arrays, {}, head_config, file)
    config = engine_config(target, head, "mlp_speculator")
    recurrence = Recurrence(random_arrays(arrays), head_config)
    dense = DenseTarget(target)

    def judge(text, drafts):
        """Returns the logits at the drafts' places."""
        state = dense.states(text)[-1][len(text) - 2 : len(text) - 1]
        return recurrence.logits(state, [text[-1], *drafts[:-1]])

    found = Bench(config, judge)
    found.num_steps = num_steps
    return found


@pytest.mark.usefixtures("unfused")
def test_drafts_are_the_papers_after_any_pattern_of_acceptance(bench):
    most = min(K, bench.num_steps)
    bench.begin(0, bench.prompt(41))
    bench.begin(1, bench.prompt(2))
    assert bench.step([0, 1], [0, 0], chunk=20) == [0, 0]
    assert bench.step([1, 0], [K, 0], chunk=20) == [most, 0]
    assert bench.step([0, 1], [0, K], chunk=20) == [0, most]
    for _ in range(5):
        limits = bench.rng.integers(0, K + 1, 2)
        assert bench.step(bench.rng.permutation(2), limits) == np.minimum(limits, most).tolist()
    assert bench.graphs.num_built > 0
    for req_idx in range(2):
        bench.proposer.forget_request(req_idx)


@pytest.mark.parametrize(
    ("arrays", "changes", "reason"),
    [
        (shapes(3, 3), {}, "3 of the 4 arrays emb.STEP.weight"),
        ({"fc.weight": (4, 4)}, {}, "contains no MLP speculator"),
        (shapes(4, 4, hidden=32), {"emb_dim": 32}, "hidden size 32, but the target's .* 64"),
        (shapes(4, 4, vocab=VOCAB + 8), {}, f"ids from 0 to {VOCAB + 7}, but .* has {VOCAB} tok"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, arrays, changes, reason):
    target = write_target(tmp_path / "target")
    head = config_json(4, **changes)
    head = write_head(tmp_path / "head", arrays, {}, head, "model.safetensors")
    config = engine_config(target, head, "mlp_speculator")
    model = loader.load(config)
    with pytest.raises(loader.ModelLoadError, match=reason):
        load_network(config, parts.ModelParts(model))


@pytest.mark.more
@pytest.mark.usefixtures("unfused")
def test_served(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    small = {"vocab_size": 32, "num_hidden_layers": 2}
    target = write_target(tmp_path / "target", CONFIG | small)
    head = config_json(3, vocab_size=32)
    head = write_head(tmp_path / "head", shapes(3, 3, vocab=32), {}, head, "model.safetensors")
    # The method follows from the checkpoint.
    serve_and_check(target, {"model": str(head), "num_speculative_tokens": 3})
