# SPDX-License-Identifier: Apache-2.0
"""The whole engine on the interpreted Metal kernels, with a Mac's dispatches and plans."""

import sys
from collections import Counter
from dataclasses import replace

import metal_interpreter
import numpy as np
import pytest
from e2e.drafting import transfer
from e2e.harness import (
    Dense,
    checked_passes,
    engine,
    generate,
    greedy,
    make_prompts,
    text_tokens,
)
from e2e.test_hybrids import NGRAM
from engine.models import recurrent

from metal_kernels.paged_attention import Tiles
from tests.metal_kernels.hazards import Logger, prove, prove_always


class Counted:
    """Wraps a kernel compiler; counts launches by kernel."""

    def __init__(self, compiler):
        self.calls, self._compiler = {}, compiler

    def metal_kernel(self, name, **source):
        run = self._compiler(name=name, **source)

        def call(**arguments):
            self.calls[name] = self.calls.get(name, 0) + 1
            return run(**arguments)

        return call


@pytest.fixture
def interpreted(monkeypatch):
    """The launched kernels by name."""
    counted = Counted(metal_interpreter.metal_kernel)
    monkeypatch.setenv("VLLM_METAL_KERNELS", "interpret")
    monkeypatch.setattr(metal_interpreter, "metal_kernel", counted.metal_kernel)
    return counted.calls


def serve_and_check(model, prompts, max_tokens, passes, calls, **options):
    """Serves the prompts `passes` times and checks every output; counters after each pass.

    `calls` counts what the requests launch, not the start.
    """
    dense = Dense(model)
    with engine(model, **options) as llm:
        assert calls["kv_blocks"] > 0  # compiled before any request asks for it
        calls.clear()
        return checked_passes(llm, dense, prompts, max_tokens, passes)


@pytest.mark.slow
def test_cold_and_warm_under_load(short, interpreted):
    cold, warm = serve_and_check(
        short,
        make_prompts(text_tokens(short), 16, 90),
        max_tokens=12,
        passes=2,
        calls=interpreted,
        max_model_len=128,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        num_gpu_blocks_override=14,
    )
    assert warm["vllm:prefix_cache_hits"] > cold["vllm:prefix_cache_hits"] > 0
    assert cold["vllm:num_preemptions"] > 0
    assert all(interpreted[name] > 0 for name in ("kv_write", "decode", "prefill"))


@pytest.fixture
def shared(monkeypatch):
    """Keys of each shared prefix, whatever sharing saves."""
    keys, module = [], sys.modules["metal_kernels.paged_attention.plan"]
    of_layer, shared_prefixes = Tiles.for_layer, module.shared_prefixes

    def noting(*arguments):
        found = shared_prefixes(*arguments)
        keys.extend(() if found is None else found.keys.tolist())
        return found

    monkeypatch.setattr(module, "shared_prefixes", noting)
    every = staticmethod(lambda *kind: replace(of_layer(*kind), shared=0))
    monkeypatch.setattr(Tiles, "for_layer", every)
    return keys


@pytest.mark.more
@pytest.mark.parametrize("speculative", [pytest.param(None, marks=pytest.mark.slow), NGRAM])
def test_shared_prefixes_under_load(short, interpreted, shared, speculative):
    """Has prefix hits, preemption and drafts over blocks that requests share."""
    tokens = text_tokens(short)
    common, others = tokens[:50], make_prompts(tokens, 10, 40)
    cold, warm = serve_and_check(
        short,
        [[*common, *prompt[:25]] for prompt in others],
        max_tokens=24,
        passes=2,
        calls=interpreted,
        max_model_len=128,
        max_num_seqs=8,
        max_num_batched_tokens=128,
        num_gpu_blocks_override=15,
        speculative_config=speculative,
    )
    assert warm["vllm:prefix_cache_hits"] > cold["vllm:prefix_cache_hits"] > 0
    assert cold["vllm:num_preemptions"] > 0
    assert len(shared) > 10 and interpreted["reduce"] > 0


@pytest.mark.heavy
@pytest.mark.slow
def test_window_layers_past_their_window(gemma3, interpreted):
    tokens = text_tokens(gemma3)
    prompts = [tokens[:540], tokens[100:117]]
    cold, warm = serve_and_check(
        gemma3,
        prompts,
        max_tokens=4,
        passes=2,
        calls=interpreted,
        max_num_batched_tokens=128,
        max_num_seqs=4,
    )
    assert warm["vllm:prefix_cache_hits"] > cold["vllm:prefix_cache_hits"]
    assert interpreted["reduce"] > 0  # contexts so long are split


@pytest.mark.parametrize(
    ("model", "layers"), [("short", 2), pytest.param("smollm2", 30, marks=pytest.mark.slow)]
)
def test_every_read_of_the_pool_is_ordered_with_every_write(request, monkeypatch, model, layers):
    model = request.getfixturevalue(model)
    logger = Logger(metal_interpreter.metal_kernel)
    monkeypatch.setenv("VLLM_METAL_KERNELS", "interpret")
    monkeypatch.setattr(metal_interpreter, "metal_kernel", logger.metal_kernel)
    tokens = text_tokens(model)
    # Chunks of a prompt, mixed steps and decode, queued two deep.
    with engine(model, max_num_batched_tokens=32, async_scheduling=True) as llm:
        generate(llm, [tokens[:40], tokens[50:55]], greedy(2))
    names = {dispatch.name for dispatch in logger.log}
    assert {"kv_write", "decode", "prefill"} <= names
    num_writes = sum(dispatch.name == "kv_write" for dispatch in logger.log)
    assert num_writes >= 3 * layers  # in so many steps
    assert prove_always(logger.log) == []
    for ops_per_buffer in (0, 1, 2, 5, 40, 50):
        assert prove(logger.log, ops_per_buffer) == []


#: A family with layers of states, its heads of a size that the kernels take.
HYBRID = replace(
    recurrent.FAMILIES["qwen3_next, large states"],
    config=recurrent.FAMILIES["qwen3_next, large states"].config | {"head_dim": 64},
)


@pytest.mark.parametrize("speculative", [pytest.param(None, marks=pytest.mark.slow), NGRAM])
def test_a_hybrid_under_load(speculative, tmp_path, interpreted):
    model = recurrent.write_model(HYBRID, tmp_path / "model")
    rng = np.random.default_rng(2)
    shared = rng.integers(3, recurrent.VOCAB, 60).tolist()
    prompts = [[*shared[: 20 + 5 * n], *rng.integers(3, recurrent.VOCAB, 3)] for n in range(8)]
    cold, warm = serve_and_check(
        model,
        [list(map(int, prompt)) for prompt in prompts],
        max_tokens=12,
        passes=2,
        calls=interpreted,
        skip_tokenizer_init=True,
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=48,
        num_gpu_blocks_override=24,
        speculative_config=speculative,
    )
    assert warm["vllm:prefix_cache_hits"] > cold["vllm:prefix_cache_hits"]
    assert all(interpreted[name] > 0 for name in ("kv_write", "convolution", "recurrence"))


@pytest.mark.parametrize("model", ["hybrid", pytest.param("states alone", marks=pytest.mark.more)])
def test_every_read_of_a_state_is_ordered_with_every_write(model, tmp_path, monkeypatch):
    logger = Logger(metal_interpreter.metal_kernel)
    monkeypatch.setenv("VLLM_METAL_KERNELS", "interpret")
    monkeypatch.setattr(metal_interpreter, "metal_kernel", logger.metal_kernel)
    family = HYBRID if model == "hybrid" else recurrent.FAMILIES["mamba2"]
    folder = recurrent.write_model(family, tmp_path / "model")
    tokens = np.random.default_rng(2).integers(3, recurrent.VOCAB, 60).tolist()
    with engine(
        folder, skip_tokenizer_init=True, max_num_batched_tokens=32, async_scheduling=True
    ) as llm:
        generate(llm, [tokens[:40], tokens[50:55]], greedy(6))
    count = Counter(dispatch.name for dispatch in logger.log)
    # Each of 7 forwards has two dispatches a layer, however many requests.
    assert min(count["convolution"], count["recurrence"]) >= 7 * 3
    assert prove_always(logger.log) == []
    for ops_per_buffer in (0, 1, 2, 5, 40, 50):
        assert prove(logger.log, ops_per_buffer) == []


@pytest.mark.more
def test_what_a_draft_network_writes_beside_steps_is_ordered_with_them(
    short, tmp_path, monkeypatch
):
    logger = Logger(metal_interpreter.metal_kernel)
    monkeypatch.setenv("VLLM_METAL_KERNELS", "interpret")
    monkeypatch.setattr(metal_interpreter, "metal_kernel", logger.metal_kernel)
    tokens = text_tokens(short)
    draft = {"method": "draft_model", "model": short, "num_speculative_tokens": 2}
    with engine(
        short,
        max_num_batched_tokens=32,
        async_scheduling=True,
        speculative_config=draft,
        kv_transfer_config=transfer(tmp_path, "kv_producer"),
    ) as llm:
        generate(llm, [tokens[:40], tokens[50:55]], greedy(2))
    writes = sum(dispatch.name == "kv_write" for dispatch in logger.log)
    assert writes >= 3 * (2 + 2)  # steps, layers of both
    assert prove_always(logger.log) == []
    for ops_per_buffer in (0, 1, 2, 5, 40, 50):
        assert prove(logger.log, ops_per_buffer) == []
