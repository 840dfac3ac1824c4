# SPDX-License-Identifier: Apache-2.0
"""Estimated settings and pool, against vLLM's own."""

import json
import os

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import psutil
import pytest
import torch
from e2e.harness import engine as served
from e2e.small_device import ngram
from vllm.engine.arg_utils import EngineArgs

from vllm_metal.cli.fit import engine
from vllm_metal.cli.fit.estimate import Model, estimate
from vllm_metal.cli.fit.machine import Machine
from vllm_metal.engine.memory import planner

MIB = 2**20
SETTINGS = {"max_model_len": 256, "max_num_batched_tokens": 64, "max_num_seqs": 8}


@pytest.mark.parametrize("drafts", [0, 3])
def test_what_is_not_asked_for_is_as_in_an_engine(folder, drafts):
    args = EngineArgs(
        model=str(folder("llama")),
        skip_tokenizer_init=True,
        speculative_config=ngram(drafts) if drafts else None,
        **SETTINGS,
    )
    theirs = args.create_engine_config()
    ours = engine.config(
        model_type="llama",
        dtype=torch.float32,
        cache_dtype="auto",
        block_size=16,
        num_drafts=drafts,
        **SETTINGS,
    )
    assert ours.max_in_flight_tokens == theirs.max_in_flight_tokens
    assert ours.num_prefill_lookahead_tokens == theirs.num_prefill_lookahead_tokens
    for part, names in {
        "cache_config": ("gpu_memory_utilization", "cache_dtype", "block_size"),
        "scheduler_config": ("max_num_seqs", "max_num_batched_tokens", "async_scheduling"),
        "model_config": ("max_model_len", "dtype", "max_logprobs", "logprobs_mode", "seed"),
        "parallel_config": ("decode_context_parallel_size", "pipeline_parallel_size"),
    }.items():
        for name in names:
            assert getattr(getattr(ours, part), name) == getattr(getattr(theirs, part), name), name


@pytest.mark.parametrize(
    ("content", "length"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"text_config": {"max_position_embeddings": 4096}}, 4096),
        ({"n_positions": 1024}, 1024),
        (
            {
                "max_position_embeddings": 2048,
                "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            },
            8192,
        ),
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
            },
            131072,
        ),
        (
            {
                "model_type": "gemma3_text",
                "max_position_embeddings": 131072,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
            131072,  # as vLLM has it: the length holds the factor
        ),
        ({"text_config": ["odd"], "max_position_embeddings": 512}, 512),
        ({}, None),
    ],
)
def test_the_length_a_model_is_made_for(content, length):
    assert engine.longest_text(content) == length


@pytest.mark.parametrize(
    ("content", "dtype"),
    [
        ({"torch_dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": "float16"}, torch.float16),
        ({"torch_dtype": "float32"}, torch.bfloat16),
        ({}, torch.bfloat16),
        ({"text_config": {"dtype": "float16"}}, torch.float16),
        ({"dtype": "float16", "model_type": "gemma3_text"}, torch.bfloat16),
    ],
)
def test_the_dtype_on_a_mac(content, dtype):
    assert engine.dtype_of(content, "metal") == dtype
    assert engine.dtype_of(content, "cpu") == torch.float32
    assert engine.dtype_of(content, "metal", "float16") == torch.float16


@pytest.mark.parametrize(
    ("name", "cache_dtype", "drafts"),
    [
        ("gemma3, windows", "int8", 0),
        ("qwen3_next, states", "fp8", 5),
        pytest.param("deepseek_v3, latents", "auto", 0, marks=pytest.mark.slow),
        pytest.param("deepseek_v32, index keys", "fp8", 0, marks=pytest.mark.more),
        pytest.param("minimax_m3, index keys", "fp8", 0, marks=pytest.mark.more),
        pytest.param("qwen3_next, states", "auto", 0, marks=pytest.mark.slow),
    ],
)
def test_given_the_measured_peaks_the_pool_is_the_engines(
    folder, monkeypatch, name, cache_dtype, drafts
):
    path, measured = folder(name), []
    at_work = planner.at_work

    def noted(*args):
        measured.append(args[-1])
        return at_work(*args)

    monkeypatch.setattr(planner, "at_work", noted)
    utilization = 256 * MIB / psutil.virtual_memory().total
    options = SETTINGS | {"gpu_memory_utilization": utilization}
    with served(
        str(path),
        kv_cache_memory_bytes=None,
        skip_tokenizer_init=True,
        kv_cache_dtype=cache_dtype,
        speculative_config=ngram(drafts) if drafts else None,
        **options,
    ) as llm:
        config = llm.llm_engine.vllm_config
        blocks, (peaks,) = config.cache_config.num_gpu_blocks, measured
    model_type = json.loads((path / "config.json").read_text())["model_type"]
    found = estimate(
        Model.read(path, model_type, torch.float32),
        engine.config(
            model_type=model_type,
            dtype=torch.float32,
            cache_dtype=cache_dtype,
            block_size=16,
            num_drafts=drafts,
            **options,
        ),
        Machine.this(),
        peaks=peaks,
    )
    assert found.block_size == config.cache_config.block_size
    assert found.num_blocks == pytest.approx(blocks, rel=0.01)
    assert found.tokens == pytest.approx(config.cache_config.kv_cache_size_tokens, rel=0.01)
