# SPDX-License-Identifier: Apache-2.0
"""Folders as transformers writes them: the engine's log-probabilities equal transformers' own.

Each is served in float32, in chunks of a few tokens, then again from the prefix cache.
"""

import numpy as np
import pytest
from e2e.harness import counters, engine, greedy
from models.published import FAMILIES, REFUSED, VOCAB, log_probabilities, make, write

#: Of log-probabilities. Both sides compute in float32, and sum in different orders.
TOLERANCE = 1e-3
NUM_TOKENS = 6
#: Windows and a soft cap, in two groups of layers.
QUICK = ("gemma2",)
#: Files that mlx-lm's modules cannot read: packed weights only, other names of arrays, arrays of
#: experts that are none, or a text model without the multimodal one around it.
UNREAD = (
    "bitnet",
    "gemma3n_text",
    "llama4_text",
    "longcat_flash",
    "nanochat",
    "qwen3_5_moe_text",
    "qwen3_5_text",
)
SLOW = [
    pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES if name not in (*QUICK, *UNREAD)
]


def prompts_of():
    """Two begin alike, in more than two blocks of 16."""
    rng = np.random.default_rng(1)
    shared = rng.integers(3, VOCAB, 40).tolist()
    own = [rng.integers(3, VOCAB, n).tolist() for n in (11, 4, 29, 1)]
    return [[*shared, *own[0]], [*shared, *own[1]], own[2], own[3]]


def table(of_tokens):
    """[T, V] of vLLM's dictionaries by token."""
    return np.array([[row[token].logprob for token in range(VOCAB)] for row in of_tokens])


@pytest.mark.parametrize("name", [*QUICK, *SLOW])
def test_log_probabilities_equal_transformers(name, tmp_path):
    model, prompts = make(FAMILIES[name]), prompts_of()
    folder = write(model, tmp_path / "model")
    options = {"skip_tokenizer_init": True, "max_model_len": 128, "dtype": "float32"}
    chunks = {"max_num_batched_tokens": 9, "max_num_seqs": 3, "block_size": 16}
    told = {"logprobs": VOCAB, "detokenize": False}
    worst = 0.0
    with engine(folder, max_logprobs=VOCAB, **options, **chunks) as llm:
        for of_prompt in (
            VOCAB,
            None,
        ):  # a request that asks for these takes nothing from the cache
            outputs = llm.generate(
                [{"prompt_token_ids": prompt} for prompt in prompts],
                greedy(NUM_TOKENS, prompt_logprobs=of_prompt, **told),
                use_tqdm=False,
            )
            texts = [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in outputs]
            expected = log_probabilities(model, [text[:-1] for text in texts])
            for output, rows in zip(outputs, expected, strict=True):
                found = table(output.outputs[0].logprobs)
                if of_prompt:
                    found = np.concatenate(
                        [table(output.prompt_logprobs[1:]).reshape(-1, VOCAB), found]
                    )
                worst = max(worst, np.abs(found - rows[-len(found) :]).max())
        assert counters(llm)["vllm:prefix_cache_hits"] > 0
    best = np.concatenate(expected).argmax(-1)
    assert len(set(best.tolist())) > 8, "the reference says the same whatever it reads"
    print(f"{name}: {worst:.1e}")
    assert worst <= TOLERANCE


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
