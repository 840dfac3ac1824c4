# SPDX-License-Identifier: Apache-2.0
"""The estimated peak of a forward pass, against a real one."""

from functools import partial

import mlx.core as mx
import pytest
import torch
from cli.fit.models import MODELS, read, settings
from peaks import least_peak

from vllm_metal.cli.fit.step import step_peak
from vllm_metal.engine.attention.layers import attention_layers
from vllm_metal.engine.kv_cache.scatter import SCATTER
from vllm_metal.engine.memory import profile
from vllm_metal.engine.models import headless, loader
from vllm_metal.engine.models.parts import ModelParts
from vllm_metal.engine.weights.disk_tables import TableRule

#: Dense, and windows in a quantized pool; then quantized experts: all that differs in the estimate.
FIRST = [("llama", "auto"), ("gemma3, windows", "fp8")]
SECOND = [("qwen3_moe, 4 bits", "auto"), ("phi3, fused", "auto")]
LATER = [
    *((name, "auto") for name in MODELS if (name, "auto") not in FIRST + SECOND),
    ("llama", "fp8"),
    ("qwen3_moe, 4 bits", "fp8"),
]


@pytest.mark.parametrize(
    ("name", "cache_dtype"),
    [
        *FIRST,
        *(pytest.param(*case, marks=pytest.mark.more) for case in SECOND),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in LATER),
    ],
)
def test_the_peak_of_a_step_is_within_15_percent_of_what_is_measured(folder, name, cache_dtype):
    dtype = torch.bfloat16 if "bfloat16" in name else torch.float32
    config = settings(folder(name), dtype, cache_dtype=cache_dtype)
    network = loader.load(config)
    layers, parts = attention_layers(network, name), ModelParts(network)

    def run():
        profile.profile_step(parts, layers, config, SCATTER)

    run()  # what only a first one takes
    measured = least_peak(run)
    model = read(folder(name), dtype)
    found, vocab_size = step_peak(model.parts, layers, config, SCATTER, "cpu")
    assert found.forward == pytest.approx(measured, rel=0.15)
    assert vocab_size == 600


@pytest.mark.more
@pytest.mark.parametrize(
    "name",
    ["gemma4, per layer", pytest.param("gemma4, per layer, 4 bits", marks=pytest.mark.slow)],
)
def test_the_peak_with_a_table_on_disk(folder, name):
    config, on_disk = settings(folder(name), torch.float32), TableRule("disk", 0)
    network = loader.load(config, tables=on_disk)
    layers, parts = attention_layers(network, name), ModelParts(network)

    def run():
        profile.profile_step(parts, layers, config, SCATTER)

    run()  # what only a first one takes
    measured = least_peak(run)
    model = read(folder(name), torch.float32, tables=on_disk)
    found, _ = step_peak(model.parts, layers, config, SCATTER, "cpu")
    assert found.forward == pytest.approx(measured, rel=0.15)


def test_the_peak_of_an_engine_that_pools(folder):
    """It has no logits but all hidden states in float32; the head takes nothing."""
    config = settings(folder("llama"), torch.float32, runner_type="pooling")
    network = loader.load(config, classes=headless.classes, prepare=headless.drop_head)
    layers, parts = attention_layers(network, "llama"), ModelParts(network)

    def run():
        profile.profile_step(parts, layers, config, SCATTER)

    run()  # what only a first one takes
    measured = least_peak(run)
    model = read(folder("llama"), torch.float32, pools=True)
    found, _ = step_peak(model.parts, layers, config, SCATTER, "cpu")
    assert found.forward == pytest.approx(measured, rel=0.15)
    head = network.args.vocab_size * network.args.hidden_size * 4
    assert read(folder("llama"), torch.float32).weights == model.weights + head
    calls = profile.LargestCalls.of(config, layers, SCATTER, 600)
    assert (calls.sampling, calls.vocab_size) == (None, 0)


@pytest.mark.parametrize(
    ("name", "drafts"),
    [
        pytest.param("lfm2, convolutions", 0, marks=pytest.mark.slow),
        pytest.param("lfm2, convolutions", 2, marks=pytest.mark.slow),
        pytest.param("qwen3_next, states", 4, marks=pytest.mark.more),
    ],
)
def test_the_peak_of_requests_that_verify_drafts(folder, name, drafts):
    config = settings(folder(name), torch.float32, num_drafts=drafts)
    network = loader.load(config)
    layers, parts = attention_layers(network, name), ModelParts(network)
    model = read(folder(name), torch.float32)
    found, _ = step_peak(model.parts, layers, config, SCATTER, "cpu")
    assert profile.drafted(config) == (2, drafts)
    for count, estimated in ((0, found.requests), (drafts, found.drafts)):
        # Steps that were run keep what they leave: each run has two of its own.
        prepare = partial(profile.requests_profile, parts, layers, config, SCATTER, count)
        prepare()()  # what only a first one takes
        measured = least_peak(prepare=prepare)
        assert measured > 2 * sum(layer.state_bytes for layer in layers)
        assert estimated == pytest.approx(measured, rel=0.05)


def test_nothing_is_loaded(folder):
    path = folder("llama")
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    model = read(path, torch.float32)
    config = settings(path, torch.float32)
    step_peak(model.parts, model.layers, config, SCATTER, "metal")
    assert mx.get_peak_memory() - before < model.weights / 10
