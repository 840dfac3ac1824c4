# SPDX-License-Identifier: Apache-2.0
"""What is estimated of a model, against the same model loaded, run, and served."""

import json
from types import SimpleNamespace

import mlx.core as mx
import pytest
import torch
from fit.models import MODELS, token_bytes

from vllm_metal import memory
from vllm_metal.attention.layers import attention_layers
from vllm_metal.fit import engine
from vllm_metal.fit.estimate import Model, estimate
from vllm_metal.fit.machine import Machine
from vllm_metal.fit.step import step_peak
from vllm_metal.kv_cache.scatter import ScatterRegion
from vllm_metal.models import loader, profile
from vllm_metal.models.parts import SelectedRows

MAC = Machine.mac(16 << 30)


def settings(folder, dtype, **changes):
    """vLLM's configuration, and where the loader finds the model."""
    content = json.loads((folder / "config.json").read_text())
    options = {
        "model_type": content["model_type"],
        "dtype": dtype,
        "cache_dtype": "auto",
        "block_size": 16,
        "max_model_len": 512,
        "max_num_batched_tokens": 128,
        "max_num_seqs": 8,
    }
    config = engine.config(**(options | changes))
    config.model_config.model = str(folder)
    config.model_config.revision = None
    config.model_config.trust_remote_code = False
    object.__setattr__(config, "load_config", SimpleNamespace(download_dir=None))
    return config


def read(folder, dtype):
    content = json.loads((folder / "config.json").read_text())
    return Model.read(folder, content["model_type"], dtype)


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_what_the_loader_holds_to_the_byte(folder, name):
    path = folder(name)
    limit = mx.set_cache_limit(0)  # else arrays may lie in spare buffers that are larger
    try:
        for dtype in (torch.float32, torch.bfloat16):
            before = mx.get_active_memory()
            model = loader.load(settings(path, dtype))
            mx.synchronize()
            held = mx.get_active_memory() - before
            del model
            assert read(path, dtype).weights == held
    finally:
        mx.set_cache_limit(limit)


@pytest.mark.parametrize("name", MODELS)
def test_bytes_of_a_token_are_those_of_the_formula(folder, name):
    model = read(folder(name), torch.bfloat16)
    for cache_dtype, row in {"auto": (2, 0), "fp8": (1, 2), "int8": (1, 2)}.items():
        config = settings(folder(name), torch.bfloat16, cache_dtype=cache_dtype)
        found = estimate(model, config, MAC)
        assert found.token_bytes == token_bytes(name, *row)


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("name", MODELS)
def test_the_peak_of_a_step_is_within_15_percent_of_what_is_measured(folder, name, cache_dtype):
    dtype = torch.bfloat16 if "bfloat16" in name else torch.float32
    config = settings(folder(name), dtype, cache_dtype=cache_dtype)
    network = loader.load(config)
    layers, rows = attention_layers(network, name), SelectedRows(network)

    def run():
        profile.profile_step(network, rows, layers, config, ScatterRegion)

    run()  # what only a first one takes
    # MLX may give memory back an operation late, so the least of some runs is what counts.
    measured = min(memory.peak_of(run) for _ in range(3))
    model = read(folder(name), dtype)
    found = step_peak(model.network, model.rows, layers, config, ScatterRegion, "cpu")
    assert found.nbytes == pytest.approx(measured, rel=0.15)
    assert found.vocab_size == 600


def test_nothing_is_loaded(folder):
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    model = read(folder("llama"), torch.float32)
    config = settings(folder("llama"), torch.float32)
    step_peak(model.network, model.rows, model.layers, config, ScatterRegion, "metal")
    assert mx.get_peak_memory() - before < model.weights / 10
