# SPDX-License-Identifier: Apache-2.0
"""Speculation keeps the distribution of sampled text, through the whole engine.

Continuations of one prompt, their first token from the prefill and the others from drafts that were
verified, against the exact joint law of these tokens: mlx-lm's dense model, and the transforms
straight from their definitions. The engine's seed is fixed, so a pass today is a pass tomorrow;
over the choice of it a right engine would fail a setting with probability 2e-4.
"""

import json

import mlx.core as mx
import numpy as np
import pytest
from e2e.harness import Dense, counters, engine, generate
from engine.sample.law import distribution, p_value
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.models import llama
from vllm import SamplingParams

pytestmark = pytest.mark.heavy

VOCAB, HIDDEN, BLOCK = 14, 32, 16
LENGTH, NUM_DRAFTS = 3, 2  # tokens of a continuation; the last two can come from one window
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
EXACTLY = {"max_tokens": LENGTH, "ignore_eos": True, "detokenize": False}
GREEDY = SamplingParams(temperature=0, **EXACTLY)
#: One request for many continuations costs vLLM the least. Its engine's core sees many requests.
AT_ONCE = 50
PENALTIES = {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": -0.3}
SAMPLED = SamplingParams(n=AT_ONCE, temperature=0.7, top_p=0.9, **PENALTIES, **EXACTLY)
#: vLLM's own engines refuse these beside speculation. Each forbids tokens, and moves the others.
BIAS = {1: 1.5, 4: -1.5, 6: 0.8, 9: -100.0}
UNUSUAL = {
    "min_p": {"temperature": 1.2, "min_p": 0.15},
    "logit_bias": {"temperature": 0.9, "logit_bias": BIAS},
    "both, and penalties": {"temperature": 0.9, "min_p": 0.1, "logit_bias": BIAS} | PENALTIES,
}


def random_weights(seed, config):
    """Makes weights whose logits spread by about 1.5 and depend on all earlier tokens."""
    mx.random.seed(seed)
    model = llama.Model(llama.ModelArgs.from_dict(config))
    large = ("self_attn", "lm_head")
    weights = tree_map_with_path(
        lambda name, array: 3 * array if any(part in name for part in large) else array,
        model.parameters(),
    )
    return dict(tree_flatten(weights))


def save(folder, weights, config):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return str(folder)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save(tmp_path_factory.mktemp("models") / "target", random_weights(3, CONFIG), CONFIG)


@pytest.fixture(scope="module")
def dense(target):
    return Dense(target)


@pytest.fixture(scope="module")
def prompt(dense):
    """Two blocks and a token. Two tokens of the vocabulary are missing, so that the repetition
    penalty tells tokens apart; each of the others is followed, where it is first, by a likely one,
    for drafts from the prompt."""
    rng, text = np.random.default_rng(0), []
    while len(text) <= 2 * BLOCK:
        text.append(int(rng.integers(0, VOCAB - 2)))
        text.append(int(dense.logits(text)[-1, : VOCAB - 2].argmax()))
    return text[: 2 * BLOCK + 1]


@pytest.fixture(scope="module")
def rows(dense, prompt):
    """Returns float32 [V, V, LENGTH, V] logits along each continuation, by its first two tokens."""
    firsts = np.ndindex(VOCAB, VOCAB)
    found = [dense.logits([*prompt, *first])[-LENGTH:] for first in firsts]
    return np.stack(found).reshape(VOCAB, VOCAB, LENGTH, VOCAB)


def law_of(params, prompt, rows):
    """Returns float64 [V, V, V] probabilities of continuations."""
    law = np.ones((VOCAB,) * LENGTH)
    for first in np.ndindex(*law.shape[:-1]):
        laws = [distribution(row, params, prompt, first[:i]) for i, row in enumerate(rows[first])]
        law[first] = laws[0][first[0]] * laws[1][first[1]] * laws[2]
    return law


def counts_of(outputs):
    """Returns int64 [V, V, V] counts of continuations."""
    counts = np.zeros((VOCAB,) * LENGTH, np.int64)
    for output in outputs:
        for continuation in output.outputs:
            counts[tuple(continuation.token_ids)] += 1
    return counts


def p_values(counts, law):
    return {
        "the two verified tokens": p_value(counts.sum(axis=0).ravel(), law.sum(axis=0).ravel()),
        "all three tokens": p_value(counts.ravel(), law.ravel()),
    }


def ngram(folder):
    return {"method": "ngram_gpu", "prompt_lookup_min": 1, "prompt_lookup_max": 2}


def suffix(folder):
    return {"method": "suffix"}


def draft_model(folder):
    """Writes another one-layer model that is sometimes right."""
    config = CONFIG | {"num_hidden_layers": 1}
    weights = random_weights(3, CONFIG)
    near = {name: array for name, array in weights.items() if "layers.1" not in name}
    return {"method": "draft_model", "model": save(folder / "draft", near, config)}


def eagle(folder):
    config = CONFIG | {"num_hidden_layers": 1}
    weights = {
        name.removeprefix("model."): array
        for name, array in random_weights(4, config).items()
        if "layers" in name and "input_layernorm" not in name
    } | {"fc.weight": mx.random.normal((HIDDEN, 2 * HIDDEN)) / HIDDEN**0.5}
    return {"method": "eagle", "model": save(folder / "eagle", weights, config)}


def medusa(folder):
    config = {
        "model_type": "medusa",
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "num_heads": NUM_DRAFTS,
        "num_hidden_layers": 1,
    }
    mx.random.seed(5)
    weights = {}
    for head in range(NUM_DRAFTS):
        weights[f"blocks.{head}.layers.0.weight"] = mx.random.normal((HIDDEN, HIDDEN)) / HIDDEN**0.5
        weights[f"lm_heads.{head}.weight"] = mx.random.normal((VOCAB, HIDDEN))
    return {"method": "medusa", "model": save(folder / "medusa", weights, config)}


def settings(speculation):
    """Returns engine settings with these drafts; None: without."""
    options = {
        "skip_tokenizer_init": True,
        "max_model_len": 64,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "kv_cache_memory_bytes": 16 << 20,
        "block_size": BLOCK,
    }
    if speculation is None:
        return options
    return options | {
        "speculative_config": speculation | {"num_speculative_tokens": NUM_DRAFTS},
        "additional_config": {"fixed_draft_length": True},
    }


@pytest.mark.parametrize(
    ("proposer", "num_continuations"),
    [
        pytest.param(eagle, 10_000, marks=pytest.mark.more),
        *(
            pytest.param(proposer, 50_000, marks=pytest.mark.slow)
            for proposer in (ngram, draft_model, eagle, medusa, suffix)
        ),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_verified_tokens_follow_the_targets_law(
    target, dense, prompt, rows, tmp_path, proposer, num_continuations
):
    num_requests = num_continuations // AT_ONCE
    shorter = [prompt[: BLOCK + 1 + index % BLOCK] for index in range(num_requests)]
    with engine(target, **settings(proposer(tmp_path))) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": text} for short in shorter for text in (prompt, short)],
            [SAMPLED, GREEDY] * num_requests,
            use_tqdm=False,
        )
        seen = counters(llm)
    counts = counts_of(outputs[::2])
    assert counts.sum() == num_continuations
    found = p_values(counts, law_of(SAMPLED, prompt, rows))
    print(proposer.__name__, found)
    assert min(found.values()) > 1e-4, found
    for short, output in zip(shorter, outputs[1::2], strict=True):
        dense.check(short, list(output.outputs[0].token_ids))
    accepted = seen["vllm:spec_decode_num_accepted_tokens"]
    assert 0 < accepted < seen["vllm:spec_decode_num_draft_tokens"]
    assert seen["vllm:prefix_cache_hits"] > 0


@pytest.mark.more
def test_min_p_and_logit_bias_hold_where_drafts_are_verified(target, prompt, rows):
    """Each alone, and both with penalties; a forbidden token must not appear."""
    params = [SamplingParams(n=AT_ONCE, **options, **EXACTLY) for options in UNUSUAL.values()]
    num_requests = 3_000 // AT_ONCE
    with engine(target, **settings(ngram(None))) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt}] * (len(params) * num_requests),
            params * num_requests,
            use_tqdm=False,
        )
        seen = counters(llm)
    for index, (name, asked) in enumerate(zip(UNUSUAL, params, strict=True)):
        counts, law = counts_of(outputs[index :: len(params)]), law_of(asked, prompt, rows)
        assert counts.sum() == num_requests * AT_ONCE
        assert (law == 0).any(), "nothing is forbidden"
        found = p_values(counts, law)
        print(name, found)
        assert min(found.values()) > 1e-4, (name, found)
    accepted = seen["vllm:spec_decode_num_accepted_tokens"]
    assert 0 < accepted < seen["vllm:spec_decode_num_draft_tokens"]


def test_seeds_draw_the_same_tokens_with_and_without_drafts(target, prompt):
    params = [
        SamplingParams(**options, seed=seed, max_tokens=24, ignore_eos=True, detokenize=False)
        for seed in range(16)
        for options in UNUSUAL.values()
    ]
    prompts = [prompt[: 20 + index % 13] for index in range(len(params))]
    texts = []
    for speculation in (None, ngram(None)):
        with engine(target, **settings(speculation)) as llm:
            texts.append(generate(llm, prompts, params))
            seen = counters(llm)
    assert texts[0] == texts[1]
    assert seen["vllm:spec_decode_num_accepted_tokens"] > 100
    assert len({tuple(text) for text in texts[0]}) > len(params) // 2
