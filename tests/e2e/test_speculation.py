# SPDX-License-Identifier: Apache-2.0
"""Speculation changes the number of steps, never the text."""

import pytest
from e2e.harness import (
    Dense,
    checked_passes,
    counters,
    engine,
    generate,
    greedy,
    make_prompts,
    text_tokens,
)
from engine.spec_decode.fitted import FittedHeads
from vllm import SamplingParams

from vllm_metal.engine.spec_decode.ngram import NgramProposer
from vllm_metal.engine.spec_decode.proposer import Drafts

pytestmark = pytest.mark.heavy

MAX_TOKENS = 16
FIXED = {"fixed_draft_length": True}  # --additional-config


@pytest.fixture(scope="module")
def dense(smollm2):
    return Dense(smollm2)


@pytest.fixture(scope="module")
def fitted(smollm2, tmp_path_factory):
    """Heads on the model's hidden states that are sometimes right."""
    return FittedHeads(smollm2, text_tokens(smollm2)[:2048], tmp_path_factory.mktemp("heads"))


def lookup(num_drafts, method="ngram_gpu"):
    return {
        "method": method,
        "num_speculative_tokens": num_drafts,
    } | ({} if method == "suffix" else {"prompt_lookup_max": 3, "prompt_lookup_min": 1})


def serve_and_check(model, dense, prompts, speculative_config, **options):
    """Serves the prompts twice and checks every output; returns counters per pass."""
    with engine(
        model,
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        speculative_config=speculative_config,
        **options,
    ) as llm:
        seen = checked_passes(llm, dense, prompts, MAX_TOKENS)
    cold, warm = seen
    assert warm["vllm:prefix_cache_hits"] > cold["vllm:prefix_cache_hits"]
    assert cold["vllm:spec_decode_num_accepted_tokens"] > 0
    return seen


@pytest.mark.parametrize(
    ("method", "async_scheduling", "num_drafts", "block_size", "num_blocks"),
    [
        ("ngram_gpu", True, 3, 16, 20),
        pytest.param("ngram", False, 7, 32, 24, marks=pytest.mark.slow),
        pytest.param("suffix", False, 5, 16, 20, marks=pytest.mark.more),
    ],
)
def test_prompt_lookup(short, method, async_scheduling, num_drafts, block_size, num_blocks):
    cold, _ = serve_and_check(
        short,
        Dense(short),
        make_prompts(text_tokens(short), 12, 200),
        lookup(num_drafts, method),
        num_gpu_blocks_override=num_blocks,
        block_size=block_size,
        async_scheduling=async_scheduling,
        additional_config=FIXED,  # what pays on this machine is not for a test to know
    )
    assert cold["vllm:num_preemptions"] > 0 or block_size == 32  # room for all of these


@pytest.mark.slow
@pytest.mark.parametrize("method", ["eagle", "medusa"])
def test_a_head_on_hidden_states(smollm2, dense, fitted, method):
    serve_and_check(
        smollm2,
        dense,
        make_prompts(text_tokens(smollm2), 16, 200),
        fitted.speculation(method) | {"num_speculative_tokens": 3},
        additional_config=FIXED,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "async_scheduling"),
    [(method, True) for method in ("ngram", "ngram_gpu", "draft_model", "eagle", "eagle3")]
    + [(method, False) for method in ("ngram", "ngram_gpu", "suffix", "draft_model")]
    + [(method, False) for method in ("eagle", "eagle3", "medusa")],
)
@pytest.mark.parametrize("num_drafts", range(1, 8))
def test_every_method_and_number_of_drafts(
    smollm2, dense, fitted, method, async_scheduling, num_drafts
):
    match method:
        case "draft_model":
            config = {"method": method, "model": smollm2}
        case "eagle" | "eagle3" | "medusa":
            config = fitted.speculation(method)
        case _:
            config = lookup(num_drafts, method)
    serve_and_check(
        smollm2,
        dense,
        make_prompts(text_tokens(smollm2), 64, 200),
        config | {"num_speculative_tokens": num_drafts},
        block_size=16 if num_drafts % 2 else 32,
        async_scheduling=async_scheduling,
        additional_config=FIXED,
    )


@pytest.mark.parametrize(
    "async_scheduling",
    [pytest.param(True, id="async"), pytest.param(False, id="sync", marks=pytest.mark.slow)],
)
def test_a_draft_model_that_is_the_target_is_always_right(tiny, tiny_text, async_scheduling):
    spec = {"method": "draft_model", "model": tiny, "num_speculative_tokens": 4}
    _, warm = serve_and_check(
        tiny,
        Dense(tiny),
        make_prompts(tiny_text, 6, 80),
        spec,
        async_scheduling=async_scheduling,
        additional_config=FIXED,
    )
    drafted = warm["vllm:spec_decode_num_draft_tokens"]
    assert warm["vllm:spec_decode_num_accepted_tokens"] == drafted


class Script:
    """Proposes a known text's greedy continuation, with the first few tokens right."""

    def __init__(self, text, vocab_size):
        self._text, self._vocab_size = text, vocab_size
        self.num_drafts = self.num_right = 0

    def propose(self, proposer, request):
        guesses = []
        columns = request.req_indices_np, request.num_tokens_np, request.limits_np
        for req_idx, length, limit in zip(*columns, strict=True):
            assert request.token_ids_np[req_idx, :length].tolist() == self._text[:length]
            ahead = self._text[length:][: self.num_drafts]
            guesses.append([*ahead[: self.num_right], *self.wrong(ahead)[self.num_right :]][:limit])
        return Drafts.of_lists(guesses, 7)

    def wrong(self, tokens):
        return [(token + 1) % self._vocab_size for token in tokens]


@pytest.fixture
def script(tiny, tiny_text, monkeypatch):
    """Replaces prompt lookup; provides a text with a known greedy continuation."""
    dense, text = Dense(tiny), tiny_text[:15]
    while len(text) < 48:
        text.append(int(dense.logits(text)[-1].argmax()))
    script = Script(text, int(dense.logits(text[:1]).shape[1]))
    monkeypatch.setattr(NgramProposer, "propose", lambda *arguments: script.propose(*arguments))
    return script, text


def scripted_engine(model):
    return engine(
        model,
        max_model_len=128,
        max_num_seqs=4,
        speculative_config=lookup(7),
        additional_config=FIXED,
    )


@pytest.mark.parametrize(
    "num_drafts", [7, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 7))]
)
def test_every_way_to_cross_a_block(tiny, script, num_drafts):
    """Tries lengths around a block's end with 0 to all drafts right, then replays them."""
    script, text = script
    lengths = (15, 16, 17, 32)
    prompts, block = [text[:length] for length in lengths], 16
    with scripted_engine(tiny) as llm:
        before = counters(llm)
        for right in range(num_drafts + 1):
            script.num_drafts, script.num_right = num_drafts, right
            assert llm.reset_prefix_cache()
            expected = [text[length : length + 10] for length in lengths]
            assert generate(llm, prompts, greedy(10)) == expected
            after = counters(llm)
            accepted, drafted = (
                after[f"vllm:spec_decode_num_{name}_tokens"]
                - before.get(f"vllm:spec_decode_num_{name}_tokens", 0)
                for name in ("accepted", "draft")
            )
            assert (accepted > 0) == (right > 0) and (accepted < drafted or right == num_drafts)
            # The tokens cached now give the same result.
            longer = text[: max(lengths) + 9]
            script.num_drafts = 0
            assert generate(llm, [longer], greedy(2)) == [text[len(longer) :][:2]]
            before = counters(llm)
            hits = before["vllm:prefix_cache_hits"] - after["vllm:prefix_cache_hits"]
            assert hits == len(longer) // block * block


def test_a_rejected_draft_is_never_a_cache_hit(tiny, script):
    script, text = script
    script.num_drafts = 7
    with scripted_engine(tiny) as llm:
        assert generate(llm, [text[:16]], greedy(30)) == [text[16:46]]
        before = counters(llm)
        assert before["vllm:spec_decode_num_accepted_tokens"] == 0
        assert before["vllm:spec_decode_num_draft_tokens"] >= 7 * 20
        # The drafts that stood at these positions, one after the other.
        planted = [*text[:17], *script.wrong(text[17:40])]
        script.num_drafts = 0
        script.propose = lambda proposer, request: Drafts.of_lists(
            [[] for _ in request.req_indices_np], 7
        )
        generate(llm, [planted], greedy(2))
        hits = counters(llm)["vllm:prefix_cache_hits"] - before["vllm:prefix_cache_hits"]
        assert hits == 16  # the block before the first draft, and no other


def sampled(seed, **options):
    return SamplingParams(
        temperature=0.8, top_p=0.9, seed=seed, max_tokens=24, ignore_eos=True, **options
    )


@pytest.mark.more
def test_seeded_requests_draw_the_same_tokens(short):
    """Mixes penalties, bad words, logprobs and a grammar, drafted and undrafted."""
    text = text_tokens(short)
    prompts = [text[30 * n : 30 * n + 40] * 2 for n in range(6)]
    params = [
        sampled(1),
        sampled(2, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2),
        sampled(3, min_tokens=20, stop_token_ids=[28]),
        sampled(4, bad_words=[" the", " of the"]),
        sampled(5, logprobs=2, top_k=20),
        greedy(24, structured_outputs=regex("[a-f ]+")),
    ]
    outputs, accepted = [], []
    for spec in (None, lookup(5)):
        with engine(short, max_num_seqs=8, speculative_config=spec, additional_config=FIXED) as llm:
            found = llm.generate(
                [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
            )
            outputs.append([output.outputs[0] for output in found])
            accepted.append(counters(llm).get("vllm:spec_decode_num_accepted_tokens", 0))
    without, with_drafts = outputs
    assert accepted[1] > 0
    for one, other in zip(without, with_drafts, strict=True):
        assert list(one.token_ids) == list(other.token_ids)
    for one, other in zip(without[4].logprobs, with_drafts[4].logprobs, strict=True):
        assert one.keys() == other.keys()
        for token in one:
            assert one[token].logprob == pytest.approx(other[token].logprob, abs=1e-3)


def regex(pattern):
    from vllm.sampling_params import StructuredOutputsParams

    return StructuredOutputsParams(regex=pattern)
