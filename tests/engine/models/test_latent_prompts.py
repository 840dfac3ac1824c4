# SPDX-License-Identifier: Apache-2.0
"""Prompts of latent attention with expanded keys and values, against mlx-lm.

Chunks of any length, beside each other and beside requests that decode or verify drafts.
"""

from dataclasses import replace

import metal_interpreter
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from engine.models.latent import FAMILIES
from engine.models.recurrent import VOCAB, make_model
from engine.models.test_executor import BLOCK, executor, new_request
from mlx_lm.models.cache import make_prompt_cache

from metal_kernels import kernel
from vllm_metal.engine.attention import latent_heads
from vllm_metal.engine.batch.input_batch import prepare
from vllm_metal.engine.batch.requests import BlockTables, Requests
from vllm_metal.engine.kv_cache.kernels import KERNELS
from vllm_metal.engine.kv_cache.scatter import SCATTER

#: Each prompt's length, and how it is cut up: the last chunk is what remains.
PROMPTS = [(520, (512,)), (300, (33, 200)), (90, (31, 32)), (150, (1, 1, 100)), (40, (7,) * 5)]
WIDTH = 35
#: Sizes that all differ, as a layer's: a mistake in one shows.
SIZES = {"qk_nope_head_dim": 32, "v_head_dim": 24, "kv_lora_rank": 64, "qk_rope_head_dim": 8}
FEWEST = 50  # rows for which a layer of such sizes builds keys and values


@pytest.fixture
def built(monkeypatch):
    """(rows, context) of each call that expanded keys and values."""
    calls, attend = [], latent_heads.attend

    def noting(queries, context, *rest):
        calls.append((len(queries), len(context)))
        return attend(queries, context, *rest)

    monkeypatch.setattr(latent_heads, "attend", noting)
    return calls


def small(name, quantized=False, sizes=SIZES):
    family = FAMILIES[name]
    model = make_model(replace(family, config=family.config | sizes), seed=5)
    if quantized:
        of_latents = ("embed_q", "unembed_out")
        nn.quantize(model, 32, 8, class_predicate=lambda path, _: path.endswith(of_latents))
    return model


def texts():
    rng = np.random.default_rng(8)
    return [rng.integers(0, VOCAB, length).tolist() for length, _ in PROMPTS]


class Served:
    """Requests over a pool of one model."""

    def __init__(self, model, name, prompts, backend=SCATTER, elements=mx.float32):
        num_blocks = 1 + WIDTH * len(prompts)
        self.run = executor(model, name, num_blocks, elements, backend)
        self.requests = Requests(len(prompts), 640, BlockTables(1, len(prompts), WIDTH))
        order = np.random.default_rng(2).permutation(np.arange(1, 1 + WIDTH * len(prompts)))
        self.blocks = order.reshape(len(prompts), WIDTH).tolist()
        for index, prompt in enumerate(prompts):
            width = -(-len(prompt) // BLOCK)
            self.requests.add_request(new_request(str(index), prompt, self.blocks[index][:width]))

    def step(self, done, counts, drafts=None):
        """Logits of each request's rows, by request.

        `drafts`: number of drafts at the end of the only request, and how many of them are right.
        """
        for index in counts:
            self.requests.num_computed_tokens_np[self.requests[str(index)].req_idx] = done[index]
        rows = {str(index): count for index, count in counts.items()}
        batch = prepare(self.requests, rows, mx.zeros(len(self.blocks), mx.int32))
        if drafts is not None:
            batch = replace(batch, num_drafts_np=np.array(drafts[:1], np.int32))
        states = self.run.forward_hidden(batch, self.requests.block_tables)
        logits = np.array(self.run.compute_logits(states))
        if drafts is not None:
            num_drafts, accepted = drafts
            self.run.record_accepted(
                batch, batch.query_start_loc_np[1:] - 1 - num_drafts + accepted
            )
        parts = np.split(logits, batch.query_start_loc_np[1:-1])
        return {int(each.req_id): part for each, part in zip(batch.requests, parts, strict=True)}

    def in_chunks(self, lengths, chunk):
        """Logits of all rows of requests of these lengths, computed `chunk` rows at a time."""
        done, found = [0] * len(lengths), [[] for _ in lengths]
        while any(count < length for count, length in zip(done, lengths, strict=True)):
            counts = {
                index: min(chunk, length - done[index])
                for index, length in enumerate(lengths)
                if done[index] < length
            }
            for index, logits in self.step(done, counts).items():
                found[index].append(logits)
                done[index] += counts[index]
        return [np.concatenate(parts) for parts in found]


@pytest.mark.usefixtures("unfused")
@pytest.mark.parametrize(
    ("name", "quantized"),
    [
        ("deepseek_v3", False),
        pytest.param("kimi_linear", True, marks=pytest.mark.more),
        *(
            pytest.param(name, quantized, marks=pytest.mark.slow)
            for name, quantized in (
                *(("deepseek_v3", True), ("kimi_linear", False)),
                *(("glm4_moe_lite", False), ("glm4_moe_lite", True)),
            )
        ),
    ],
)
def test_chunks_equal_the_dense_forward(name, quantized, built):
    model, prompts = small(name, quantized), texts()
    dense = [np.array(model(mx.array([p]), cache=make_prompt_cache(model))[0]) for p in prompts]
    served = Served(model, name, prompts)
    cuts = [[*chunks, length - sum(chunks)] for length, chunks in PROMPTS]
    done, found, expected = [0] * len(prompts), [[] for _ in prompts], []
    while any(cuts):
        counts = {index: chunks.pop(0) for index, chunks in enumerate(cuts) if chunks}
        for index, logits in served.step(done, counts).items():
            found[index].append(logits)
            done[index] += counts[index]
        long = [index for index, count in counts.items() if count >= FEWEST]
        num_layers = 1 if name == "kimi_linear" else 3
        expected += [(counts[index], done[index]) for index in long] * num_layers
    for parts, wanted in zip(found, dense, strict=True):
        np.testing.assert_allclose(np.concatenate(parts), wanted, atol=2e-4, rtol=2e-4)
        assert np.array_equal(np.concatenate(parts).argmax(-1), wanted.argmax(-1))
    assert built == expected


def test_a_prompt_behind_a_prefix_that_is_found_or_filled_beside_it(built):
    """The second request starts with the first's blocks, of a step before or its own."""
    model = small("deepseek_v3")
    prompts = texts()[:2]
    prompts[1][:240] = prompts[0][:240]
    dense = [np.array(model(mx.array([p]), cache=make_prompt_cache(model))[0]) for p in prompts]
    served = Served(model, "deepseek_v3", prompts)
    table = served.requests.block_tables.tables_np[0]
    table[1, :15] = table[0, :15]
    served.step([0, 0], {0: 128})
    found = served.step([128, 240], {0: 200, 1: 60})
    np.testing.assert_allclose(found[0], dense[0][128:328], atol=2e-4, rtol=2e-4)
    np.testing.assert_allclose(found[1], dense[1][240:300], atol=2e-4, rtol=2e-4)
    assert built == [*[(128, 128)] * 3, *[(200, 328), (60, 300)] * 3]


@pytest.mark.more
def test_steps_that_come_again_are_graphs(built):
    """A prompt of the same length reuses the graph that the second one traced."""
    model, rng = small("deepseek_v3"), np.random.default_rng(1)
    prompts = [rng.integers(0, VOCAB, 64).tolist() for _ in range(4)]
    served = Served(model, "deepseek_v3", prompts)
    for index, prompt in enumerate(prompts):
        found = served.step([0] * 4, {index: 64})[index]
        wanted = np.array(model(mx.array([prompt]), cache=make_prompt_cache(model))[0])
        np.testing.assert_allclose(found, wanted, atol=2e-4, rtol=2e-4)
    assert len(built) == 3 * 2  # once by itself, and once for the graph


def test_our_kernels_write_what_is_built_of(built):
    """Runs a prompt, a chunk beside a decode and a decode over the widest latents."""
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_hidden_layers": 2}
    model = small("deepseek_v3", sizes=SIZES | sizes)
    prompts = [text[:length] for text, length in zip(texts(), (75, 40), strict=False)]
    dense = [np.array(model(mx.array([p]), cache=make_prompt_cache(model))[0]) for p in prompts]
    with kernel.using(metal_interpreter.metal_kernel):
        served = Served(model, "deepseek_v3", prompts, KERNELS)
        done, found = [0, 0], [[], []]
        for counts in ({0: 36, 1: 3}, {1: 36}, {0: 38, 1: 1}, {0: 1}):
            for index, logits in served.step(done, counts).items():
                found[index].append(logits)
                done[index] += counts[index]
    for parts, wanted in zip(found, dense, strict=True):
        np.testing.assert_allclose(np.concatenate(parts), wanted, atol=2e-4, rtol=2e-4)
    assert built == [(36, 36), (36, 36), (36, 39), (36, 39), (38, 74), (38, 74)]
