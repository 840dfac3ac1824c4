# SPDX-License-Identifier: Apache-2.0
"""Folders written by transformers: the engine's log-probabilities equal transformers'.

Each is served in float32, in chunks of a few tokens, with drafts of which most are rejected, with
blocks for few of the requests that run at once, then again from the prefix cache.
"""

import itertools

import numpy as np
import pytest
import torch
import transformers
from e2e.harness import counters, engine, run_out
from engine.models.published import FAMILIES, REFUSED, VOCAB, draw, log_probabilities, make, write
from vllm import SamplingParams

pytestmark = pytest.mark.more

#: Tolerance for log-probabilities. Both sides compute in float32, and sum in different orders.
TOLERANCE = 1e-3
NUM_TOKENS = 12
#: Blocks that all requests have, as a multiple of those that the longest text takes.
ROOM = 1.4
OPTIONS = {
    "skip_tokenizer_init": True,
    "max_model_len": 80,
    "dtype": "float32",
    "max_num_batched_tokens": 19,
    "max_num_seqs": 4,
    "block_size": 16,
    "max_logprobs": VOCAB,
    "additional_config": {"fixed_draft_length": True},
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 2,
        "prompt_lookup_min": 1,
    },
}
TOLD = {
    "drafted": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
    "preemptions": "vllm:num_preemptions",
    "hits": "vllm:prefix_cache_hits",
    "read": "vllm:metal_table_read_bytes",
}
#: Windows and a soft cap, in two groups of layers.
QUICK = ("gemma2",)
#: Files that mlx-lm's module cannot read: it has packed weights only.
UNREAD = ("bitnet",)
#: Tables of per-layer embeddings.
WITH_TABLES = ("gemma3n_text", "gemma4_text")
SLOW = [
    pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES if name not in (*QUICK, *UNREAD)
]


def prompts_of():
    """Makes prompts of 1 to 60 tokens; some share two blocks, most are repetitive."""
    rng = np.random.default_rng(1)
    shared = rng.integers(3, VOCAB, 40).tolist()
    own = [rng.integers(3, VOCAB, n).tolist() for n in (11, 4, 20, 29, 1)]
    return [[*shared, *own[0]], [*shared, *own[1]], [*shared, *own[2]], own[2] * 2, own[3], own[4]]


def leave_few_blocks(llm, prompt, params):
    """Takes all blocks of the pool but a few, and returns them.

    How many a text takes depends on the kinds of its layers.
    """
    pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    free = least = pool.get_num_free_blocks()
    llm.llm_engine.add_request("longest", prompt, params)
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
        least = min(least, pool.get_num_free_blocks())
    run_out(llm)
    assert llm.reset_prefix_cache()
    return pool.get_new_blocks(free - int(ROOM * (free - least)))


def table(of_tokens):
    """Converts vLLM's dictionaries by token to [T, V]."""
    return np.array([[row[token].logprob for token in range(VOCAB)] for row in of_tokens])


def farthest(model, outputs, of_prompt):
    """Returns the largest log-probability difference, and transformers' tokens."""
    worst, expected = 0.0, []
    for output in outputs:
        tokens = output.outputs[0].token_ids
        (rows,) = log_probabilities(model, [[*output.prompt_token_ids, *tokens][:-1]])
        found = table(output.outputs[0].logprobs)
        if of_prompt:
            found = np.concatenate([table(output.prompt_logprobs[1:]).reshape(-1, VOCAB), found])
        rows = rows[-len(found) :]
        worst = max(worst, np.abs(found - rows).max())
        expected += rows.argmax(-1).tolist()
    return worst, expected


def give_back(llm, blocks):
    llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool.free_blocks(blocks)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        *itertools.product(QUICK, ["memory"]),
        *(pytest.param(*case.values, "memory", marks=case.marks) for case in SLOW),
        *itertools.product(WITH_TABLES, ["disk"]),
        pytest.param("qwen4_exp", "disk", marks=pytest.mark.more),  # n-grams' tables, in shards
    ],
)
def test_log_probabilities_equal_transformers(name, place, tmp_path):
    model = make(FAMILIES[name])
    folder, worst, seen = write(model, tmp_path / "model"), 0.0, set()
    prompts = [{"prompt_token_ids": prompt} for prompt in prompts_of()]
    told = {"temperature": 1.0, "seed": 3, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    told |= {"logprobs": VOCAB, "detokenize": False}
    options = OPTIONS | {"additional_config": {"embedding_tables": place}}
    options["additional_config"] |= OPTIONS["additional_config"]
    with engine(folder, num_gpu_blocks_override=100, **options) as llm:
        taken = leave_few_blocks(llm, prompts[2], SamplingParams(**told))
        # A request that asks for its prompt's takes nothing from the cache.
        for turn, of_prompt in enumerate((VOCAB, None, None)):
            asked = prompts
            if turn == 2:  # states are kept for long where there is room alone
                give_back(llm, taken)
                asked = prompts[:2]
                llm.generate(asked, SamplingParams(**told), use_tqdm=False)
            params = SamplingParams(prompt_logprobs=of_prompt, **told)
            outputs = llm.generate(asked, params, use_tqdm=False)
            found, expected = farthest(model, outputs, of_prompt)
            worst, seen = max(worst, found), seen.union(expected)
        counted = {what: counters(llm)[key] for what, key in TOLD.items()}
    print(f"{name}: {worst:.1e}", counted)
    assert len(seen) > 8, "the reference says the same whatever it reads"
    assert worst <= TOLERANCE
    assert counted["drafted"] > counted["accepted"]
    assert counted["preemptions"] > 0 and counted["hits"] > 0
    assert (counted["read"] > 0) == (place == "disk")


def test_the_text_of_gemma_4_unified(tmp_path):
    """Its class takes images and sound; vLLM is told to load its text model alone."""
    text = transformers.Gemma4UnifiedTextConfig(
        **{"vocab_size": VOCAB, "hidden_size": 72, "intermediate_size": 88, "head_dim": 16},
        **{"num_attention_heads": 6, "num_key_value_heads": 2, "global_head_dim": 16},
        **{"num_hidden_layers": 3, "sliding_window": 7, "num_kv_shared_layers": 0},
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        hidden_size_per_layer_input=0,
    )
    # Tokens that no prompt here has.
    tokens = {"image_token_id": 0, "video_token_id": 1, "audio_token_id": 2}
    config = transformers.Gemma4UnifiedConfig(text_config=text.to_dict(), **tokens)
    model = transformers.Gemma4UnifiedForConditionalGeneration(config).float().eval()
    draw(model, torch.Generator().manual_seed(0))
    prompts = [{"prompt_token_ids": prompt} for prompt in prompts_of()[2:4]]
    told = {"max_tokens": 4, "temperature": 0, "ignore_eos": True, "detokenize": False}
    params = SamplingParams(logprobs=VOCAB, prompt_logprobs=VOCAB, **told)
    with engine(write(model, tmp_path), **OPTIONS) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    worst, expected = farthest(model, outputs, VOCAB)
    assert worst <= TOLERANCE
    assert len(set(expected)) > 8


@pytest.mark.slow
@pytest.mark.parametrize("name", [*REFUSED, *UNREAD])
def test_what_differs_is_refused_by_name(name, tmp_path):
    family, reason = REFUSED.get(name) or (FAMILIES[name], "mlx-lm cannot load")
    folder = write(make(family), tmp_path / "model")
    with (
        pytest.raises(Exception, match=reason),
        engine(folder, skip_tokenizer_init=True, max_model_len=128, dtype="float32"),
    ):
        pass
