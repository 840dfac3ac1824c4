# SPDX-License-Identifier: Apache-2.0
"""The paged forward of real mlx-lm families equals their own dense forward."""

import importlib

import mlx.core as mx
import numpy as np
import pytest
from engine.models import further
from engine.models.cases import cases
from engine.models.recurrent import VOCAB, make_model
from mlx_lm.models.cache import make_prompt_cache
from vllm import SamplingParams
from vllm.v1.core.sched.output import NewRequestData

from vllm_metal.engine.attention.layers import attention_layers
from vllm_metal.engine.batch.input_batch import prepare
from vllm_metal.engine.batch.requests import BlockTables, Requests
from vllm_metal.engine.kv_cache.scatter import SCATTER
from vllm_metal.engine.models.executor import ModelExecutor
from vllm_metal.engine.models.parts import ModelParts
from vllm_metal.patches.mlx_patches import registry, seam

pytestmark = pytest.mark.usefixtures("unfused")

BLOCK = 16
COMMON = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "layernorm_epsilon": 1e-5,
    "vocab_size": 128,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "rope_scaling": None,
}
MOE = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": MOE,
    "mixtral": MOE,
    "phi3": {},
    "cohere2": {"sliding_window": 24, "sliding_window_pattern": 2, "logit_scale": 1.0},
    "gemma": {},
    "gemma3_text": {"sliding_window": 24, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16},
    "gpt_oss": MOE | {"sliding_window": 24},
    "olmo2": {},
    "olmo3": {"sliding_window": 24},
    "starcoder2": {},
    "gpt2": {"n_ctx": 512, "n_embd": 64, "n_head": 4, "n_layer": 4, "n_positions": 512},
}

#: Models whose layers keep states or latents, or are otherwise unusual.
SMALL = further.ALL


def build(model_type: str):
    """Makes a small model of the family with random weights."""
    seam.install()
    if model_type in SMALL:
        return make_model(SMALL[model_type], seed=7)
    module = importlib.import_module(f"mlx_lm.models.{model_type}")
    seam.install()
    registry.install()
    mx.random.seed(7)
    config = COMMON | FAMILIES[model_type] | {"model_type": model_type}
    model = module.Model(module.ModelArgs.from_dict(config))
    mx.eval(model.parameters())
    return model


def executor(model, model_type: str, num_blocks: int, elements=mx.float32, backend=SCATTER):
    layers = attention_layers(model, model_type)
    kv_caches = {
        layer.name: layer.allocate(num_blocks, BLOCK, elements, backend) for layer in layers
    }
    group_of = {layer.name: 0 for layer in layers}
    return ModelExecutor(ModelParts(model), layers, kv_caches, group_of, BLOCK)


def new_request(req_id, tokens, block_ids):
    """Makes a request as vLLM's scheduler sends it."""
    return NewRequestData(req_id, tokens, [], SamplingParams(), None, [block_ids], 0, None)


#: One of each kind of layer: K/V, with a window, sinks, or from other layers; latents; states by
#: each recurrence, and by runs.
QUICK = (
    *("llama", "gpt2", "gpt_oss", "gemma4_text", "deepseek_v3", "deepseek_v32"),
    *("kimi_linear", "qwen3_next", "falcon_h1", "jamba", "lfm2", "recurrent_gemma"),
)
#: Models that run other code of ours: a patch, or a form of states.
MORE = (
    *("gemma2", "gemma3n", "minicpm3", "mistral4", "longcat_flash", "longcat_flash_ngram"),
    *("baichuan_m1", "bailing_hybrid", "bailing_moe_linear", "bailing_moe_v3", "gear", "kimi_k3"),
    *("granitemoehybrid", "mamba", "mamba2", "nemotron_h", "olmo_hybrid", "plamo2", "rwkv7"),
)


@pytest.mark.parametrize("model_type", cases(sorted({**FAMILIES, **SMALL}), QUICK, MORE))
def test_chunks_of_a_mixed_batch_equal_the_dense_forward(model_type):
    model, prompts, blocks, dense = mixed_batch(model_type)
    whole = chunk_by_chunk(model, model_type, prompts, blocks, of_states)
    for expected, parts in zip(dense, whole, strict=True):
        np.testing.assert_allclose(np.concatenate(parts), expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("model_type", ["llama", "qwen3_next"])
def test_rows_that_sample_have_logits_of_their_own(model_type):
    model, prompts, blocks, dense = mixed_batch(model_type)
    sampled = chunk_by_chunk(model, model_type, prompts, blocks, of_sampling_rows)
    for expected, parts in zip(dense, sampled, strict=True):
        np.testing.assert_allclose(np.concatenate(parts), expected[-1:], atol=2e-4, rtol=2e-4)


def mixed_batch(model_type):
    """A model, prompts, their blocks, and the logits of mlx-lm's dense forward."""
    model = build(model_type)
    rng = np.random.default_rng(3)
    lengths = [70, 33, 1, 48]
    vocab_size = VOCAB if model_type in SMALL else COMMON["vocab_size"]
    prompts = [rng.integers(0, vocab_size, n).tolist() for n in lengths]
    dense = [np.array(model(mx.array([p]), cache=make_prompt_cache(model))[0]) for p in prompts]
    blocks = rng.permutation(np.arange(1, 40))  # a pool with no order to lean on
    return model, prompts, blocks, dense


def of_states(run, batch, tables):
    """Returns logits of every row by request, computed in two pieces."""
    states = run.forward_hidden(batch, tables)
    middle = len(states) // 2
    halves = states[:middle], states[middle:]
    logits = np.concatenate([run.compute_logits(half) for half in halves])
    return enumerate(np.split(logits, batch.query_start_loc_np[1:-1]))


def of_sampling_rows(run, batch, tables):
    logits = np.array(run.forward(batch, tables))
    assert len(logits) == len(batch.sampling_np)
    return zip(batch.sampling_np.tolist(), logits[:, None], strict=True)


def chunk_by_chunk(model, model_type, prompts, blocks, logits_of):
    """Returns a paged model's logits of each prompt, with chunks that share batches."""
    return chunk_of(executor(model, model_type, num_blocks=40), prompts, blocks, logits_of)


def chunk_of(run, prompts, blocks, logits_of):
    """Runs prompts on a paged model in chunks; returns results of `logits_of` by prompt."""
    requests = Requests(len(prompts), 128, BlockTables(1, len(prompts), 9))
    for index, prompt in enumerate(prompts):
        ids = blocks[index * 6 : index * 6 + -(-len(prompt) // BLOCK)].tolist()
        requests.add_request(new_request(str(index), prompt, ids))
    found = [[] for _ in prompts]
    chunk = [7, 20, 1, 16]
    done, lengths = [0] * len(prompts), [len(prompt) for prompt in prompts]
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        step = {
            str(i): min(chunk[i], lengths[i] - done[i])
            for i in range(len(prompts))
            if done[i] < lengths[i]
        }
        for req_id in step:
            requests.num_computed_tokens_np[requests[req_id].req_idx] = done[int(req_id)]
        batch = prepare(requests, step, mx.zeros(len(prompts), mx.int32))
        for index, logits in logits_of(run, batch, requests.block_tables):
            found[int(batch.requests[index].req_id)].append(logits)
        for req_id, count in step.items():
            done[int(req_id)] += count
    return found
