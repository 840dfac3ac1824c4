# SPDX-License-Identifier: Apache-2.0
"""Memory of requests that verify drafts: layer states, and room left by drafts."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import metal_interpreter
import pytest
import torch
from cli.fit.models import settings
from engine.models.recurrent import FAMILIES, write_model

from metal_kernels import kernel
from vllm_metal.engine.attention.layers import RunLayer, attention_layers
from vllm_metal.engine.attention.recurrent_layer import SequenceLayer
from vllm_metal.engine.kv_cache.kernels import KERNELS
from vllm_metal.engine.kv_cache.scatter import SCATTER
from vllm_metal.engine.memory import planner, profile
from vllm_metal.engine.memory.profile import LargestCalls, Peaks
from vllm_metal.engine.models import loader
from vllm_metal.engine.models.parts import ModelParts

KEY_HEADS, VALUE_HEADS, SIZE, TAPS = 2, 6, 128, 4
#: An eighth of Qwen3.5-27B's heads: states and inputs keep their proportion.
DELTA = {
    "num_hidden_layers": 8,
    "head_dim": 64,
    "num_experts": 0,
    "linear_num_key_heads": KEY_HEADS,
    "linear_num_value_heads": VALUE_HEADS,
    "linear_key_head_dim": SIZE,
    "linear_value_head_dim": SIZE,
    "linear_conv_kernel_dim": TAPS,
}
NUM_LAYERS = 6  # that keep states
CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * SIZE
STATE = VALUE_HEADS * SIZE * SIZE * 4 + (TAPS - 1) * CHANNELS * 2
#: Inputs of the convolution, keys and values in 16 bits; rates and decays in 32.
INPUTS = 2 * (CHANNELS + KEY_HEADS * SIZE + VALUE_HEADS * SIZE) + 4 * 2 * VALUE_HEADS
REQUESTS = 2


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Networks with their layers and settings, by family and drafts; each loaded once."""
    root = tmp_path_factory.mktemp("states")
    written = {}

    def serve(name, drafts, **changes):
        if name not in written:
            family = FAMILIES[name]
            family = replace(family, config=family.config | changes)
            written[name] = Path(write_model(family, root / name))
        config = settings(written[name], torch.bfloat16, num_drafts=drafts)
        network = loader.load(config)
        return ModelParts(network), attention_layers(network, name), config

    return serve


@pytest.mark.parametrize(
    "storage",
    [
        pytest.param(SCATTER, marks=pytest.mark.more),
        pytest.param(KERNELS, marks=pytest.mark.slow),
    ],
)
def test_five_drafts_take_no_more_than_one_but_for_their_rows(served, storage):
    """Within 5 percent, with the states that the requests keep in the pool."""
    kernels = kernel.using(metal_interpreter.metal_kernel) if storage == KERNELS else None
    held = {}
    with kernels or nullcontext():
        for drafts in (1, 5):
            parts, layers, config = served("qwen3_next", drafts, **DELTA)
            states = [layer.state_bytes for layer in layers if layer.state_bytes]
            assert states == [STATE] * NUM_LAYERS
            run = profile.requests_profile(parts, layers, config, storage, drafts)
            # Inputs of two steps: the second applies what the first left, and leaves its own.
            left = 2 * REQUESTS * drafts * NUM_LAYERS * INPUTS
            peak = planner.peak_of(run)
            assert peak > left
            held[drafts] = REQUESTS * sum(states) + peak - left
    assert held[5] <= 1.05 * held[1]


def test_a_draft_is_a_state_only_where_modules_are_called_by_runs(served):
    drafts = 4
    parts, layers, config = served("qwen3_next", drafts, **DELTA)
    by_runs = [
        RunLayer(layer.name, layer.form) if isinstance(layer, SequenceLayer) else layer
        for layer in layers
    ]
    found = []
    for asked in (layers, by_runs):
        without, drafting = (
            planner.peak_of(profile.requests_profile(parts, asked, config, SCATTER, count))
            for count in (0, drafts)
        )
        calls = LargestCalls.of(config, asked, SCATTER, 64)
        assert calls.drafted == (REQUESTS, drafts)
        found.append(
            calls.step_states(Peaks(0, without, drafting), config.scheduler_config.max_num_seqs)
        )
    states = NUM_LAYERS * STATE
    for each in found:  # of a request, from its newest token until the next step
        assert states < each.request < 1.5 * states
    assert found[0].draft < 0.05 * states
    assert states < found[1].draft < 1.5 * states


def test_layers_of_rows_alone_keep_nothing():
    calls = LargestCalls(None, lambda rows: None, 64, 8, 4)
    assert calls.step_states(Peaks(1 << 30), 8) is None
