# SPDX-License-Identifier: Apache-2.0
"""fp8 and int8 KV caches: their size, and tokens equal to those of a naive quantized forward.

An element that lies by rounding between two codes takes either, and so moves by up to an eighth of
itself; in the layers above, more elements lie elsewhere for it, and take other codes. Two correct
computations in different batches drift apart in this way, over all 30 layers of SmolLM2 to half of
what the quantization itself changes. So tokens are compared on the first two layers of the models,
where the drift is no more than TIE; benchmarks/cache_quality.py measures whole models.
"""

from collections import Counter

import metal_interpreter
import mlx.core as mx
import numpy as np
import pytest
import torch
from e2e.harness import Dense, counters, engine, generate, greedy, make_prompts, text_tokens
from mlx_lm.models.cache import make_prompt_cache

pytestmark = pytest.mark.heavy

CACHES = ("fp8", "int8")
TOP_CODES = {"fp8": (448, 416, 384, 352, 320, 288, 256), "int8": (127,)}
MEMORY = 64 << 20
BLOCK = 16
LAYERS, KV_HEADS, HEAD_SIZE = 2, 3, 64  # of SmolLM2-135M, and as many layers as `short` has
#: Largest gap of two logits that counts as a tie.
TIE = 0.05


def held(rows, cache):
    """Quantizes and dequantizes [..., D] rows with torch and the best bfloat16 scale per row."""
    values = torch.from_numpy(np.array(rows))
    choices = []
    for top in TOP_CODES[cache]:
        scales = (values.abs().amax(-1, keepdim=True) / top).bfloat16().float()
        codes = values / torch.where(scales > 0, scales, 1.0)
        codes = codes.clamp(-448, 448).to(torch.float8_e4m3fn) if cache == "fp8" else codes.round()
        choices.append(codes.float() * scales)
    errors = torch.stack([(values - each).double().square().sum(-1) for each in choices])
    best = errors.argmin(0)[None, ..., None].expand(1, *values.shape)
    return mx.array(torch.stack(choices).gather(0, best)[0].numpy())


class Holding:
    """One of mlx-lm's caches with `held` applied to each row."""

    def __init__(self, inner, cache):
        self._inner, self._cache = inner, cache

    def update_and_fetch(self, keys, values):
        rows = (held(rows, self._cache) for rows in (keys, values))
        return self._inner.update_and_fetch(*rows)

    def __getattr__(self, name):
        return getattr(self._inner, name)


class QuantizedDense(Dense):
    """mlx-lm's own forward over such caches."""

    def __init__(self, path, cache):
        super().__init__(path, tie=TIE)
        self._cache = cache

    def forward(self, tokens):
        caches = [Holding(inner, self._cache) for inner in make_prompt_cache(self.model)]
        return self.model(tokens, cache=caches)


def serve(model, prompts, max_tokens, passes=1, **options):
    """Returns tokens and counters of each pass."""
    found = []
    with engine(model, **options) as llm:
        for _ in range(passes):
            tokens = generate(llm, prompts, greedy(max_tokens))
            found.append((tokens, counters(llm)))
    return found


def num_blocks(model, cache):
    with engine(model, kv_cache_dtype=cache, kv_cache_memory_bytes=MEMORY) as llm:
        return llm.llm_engine.vllm_config.cache_config.num_gpu_blocks


@pytest.mark.more
def test_a_token_takes_its_codes_and_two_bytes_a_row(short):
    rows = 2 * LAYERS * KV_HEADS  # of a token
    of_float32 = num_blocks(short, "auto")
    assert of_float32 == MEMORY // (BLOCK * rows * HEAD_SIZE * 4)
    of_float16 = MEMORY // (BLOCK * rows * HEAD_SIZE * 2)
    for cache in CACHES:
        found = num_blocks(short, cache)
        assert found == MEMORY // (BLOCK * rows * (HEAD_SIZE + 2))
        assert found >= 1.9 * of_float16
        assert found >= 3.7 * of_float32


@pytest.mark.parametrize("cache", ["fp8", pytest.param("int8", marks=pytest.mark.more)])
def test_cold_and_warm_in_a_small_pool_equal_a_naive_forward(short, cache):
    prompts = make_prompts(text_tokens(short), 12, 160)
    cold, warm = serve(
        short,
        prompts,
        max_tokens=12,
        passes=2,
        kv_cache_dtype=cache,
        num_gpu_blocks_override=16,
        max_model_len=176,
    )
    assert cold[0] == warm[0]
    assert warm[1]["vllm:prefix_cache_hits"] > cold[1]["vllm:prefix_cache_hits"] > 0
    assert cold[1]["vllm:num_preemptions"] > 0
    dense = QuantizedDense(short, cache)
    for prompt, tokens in zip(prompts, cold[0], strict=True):
        dense.check(prompt, tokens)


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["fp8", "int8"])
def test_windows_and_chunks_equal_a_naive_forward(windowed, cache):
    tokens = text_tokens(windowed)
    prompts = [tokens[:180], tokens[100:117], tokens[:160]]
    cold, warm = serve(
        windowed, prompts, 8, passes=2, kv_cache_dtype=cache, max_num_batched_tokens=64
    )
    assert cold[0] == warm[0]
    assert warm[1]["vllm:prefix_cache_hits"] > cold[1]["vllm:prefix_cache_hits"]
    dense = QuantizedDense(windowed, cache)
    for prompt, found in zip(prompts, cold[0], strict=True):
        dense.check(prompt, found)


@pytest.mark.more
def test_a_forward_over_another_cache_differs_by_more_than_a_tie(short, windowed):
    for model in (short, windowed):
        prompt = text_tokens(model)[:200]
        rows = [QuantizedDense(model, cache).logits(prompt) for cache in CACHES]
        rows.append(Dense(model).logits(prompt))
        for one in range(3):
            assert np.abs(rows[one] - rows[one - 1]).max() > 4 * TIE


@pytest.mark.slow
@pytest.mark.parametrize("cache", CACHES)
def test_speculation_changes_no_token(short, cache):
    tokens = text_tokens(short)
    prompts = [tokens[:150], tokens[60:90], [*tokens[200:260], *tokens[200:240]]]
    lookup = {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 4,
    }
    ((plain, _),) = serve(short, prompts, 24, kv_cache_dtype=cache)
    ((found, seen),) = serve(
        short,
        prompts,
        24,
        kv_cache_dtype=cache,
        speculative_config=lookup,
        additional_config={"fixed_draft_length": True},
    )
    assert found == plain
    assert seen["vllm:spec_decode_num_accepted_tokens"] > 0


@pytest.mark.more
@pytest.mark.parametrize("cache", ["fp8", pytest.param("int8", marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", ["short", pytest.param("windowed", marks=pytest.mark.slow)])
def test_kernels_and_scatter_give_the_same_tokens(model, cache, request, monkeypatch):
    model = request.getfixturevalue(model)
    prompts = make_prompts(text_tokens(model), 6, 100)
    options = {
        "kv_cache_dtype": cache,
        "max_model_len": 128,
        "max_num_batched_tokens": 32,
        "num_gpu_blocks_override": 40,
    }
    ((plain, _),) = serve(model, prompts, 6, **options)
    monkeypatch.setenv("VLLM_METAL_KERNELS", "interpret")
    ran = Counter()

    def noting(name, **source):
        run = compiler(name=name, **source)

        def call(**arguments):
            ran[name] += 1
            return run(**arguments)

        return call

    compiler = metal_interpreter.metal_kernel
    monkeypatch.setattr(metal_interpreter, "metal_kernel", noting)
    cold, warm = serve(model, prompts, 6, passes=2, **options)
    assert cold[0] == warm[0] == plain
    assert warm[1]["vllm:prefix_cache_hits"] > cold[1]["vllm:prefix_cache_hits"]
    # More than the start launches to have it compiled: eight plans, of which six decode.
    assert all(ran[name] > 8 for name in ("kv_write", "decode", "prefill"))
