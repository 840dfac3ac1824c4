# SPDX-License-Identifier: Apache-2.0
"""A request that the worker cannot add fails alone with the reason."""

import pytest
from e2e.fuzz.models import VOCAB
from e2e.harness import Dense, counters, engine, free_blocks, generate, greedy, run_out
from e2e.sessions import held_rows

from vllm_metal.engine.batch.requests import BlockTables
from vllm_metal.engine.sample import Sampler
from vllm_metal.engine.spec_decode.speculator import Speculator
from vllm_metal.engine.worker.recovery import MAX_FAILURES_IN_A_ROW

NUM_TOKENS = 12
MARK = VOCAB - 1  # a token of the requests that are not taken in
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}


def refuse_by_prompt(monkeypatch):
    """Makes the sampler raise for marked prompts, halfway through adding them."""
    add = Sampler.add_request

    def add_request(self, req_idx, params, prompt, output):
        add(self, req_idx, params, prompt, output)
        if MARK in prompt:
            raise ValueError("no such prompt")

    monkeypatch.setattr(Sampler, "add_request", add_request)


def refuse_by_speculator(monkeypatch):
    begin = Speculator.enter

    def begin_request(self, state):
        begin(self, state)
        if MARK in state.prompt_token_ids:
            raise ValueError("no such prompt")

    monkeypatch.setattr(Speculator, "enter", begin_request)


def refuse_by_length(monkeypatch):
    """Makes block tables too small for requests of 48 tokens or more."""
    replace = BlockTables.replace

    def replace_blocks(self, req_idx, block_ids):
        replace(self, req_idx, block_ids)
        if len(block_ids[0]) > 2:
            raise ValueError("no such prompt")

    monkeypatch.setattr(BlockTables, "replace", replace_blocks)


@pytest.mark.parametrize(
    ("refuse", "speculative_config", "async_scheduling"),
    [
        (refuse_by_prompt, None, True),
        pytest.param(refuse_by_speculator, NGRAM, True, marks=pytest.mark.more),
        pytest.param(refuse_by_length, None, True, marks=pytest.mark.more),
        pytest.param(refuse_by_prompt, None, False, marks=pytest.mark.slow),
        pytest.param(refuse_by_speculator, NGRAM, False, marks=pytest.mark.slow),
    ],
)
def test_it_ends_alone(tiny, tiny_text, monkeypatch, refuse, speculative_config, async_scheduling):
    text = [token for token in tiny_text if token != MARK]
    dense = Dense(tiny)
    bad = [*text[:20], MARK, *text[20:49]]  # more than two blocks
    # Begins as the one before does, whose first block is in the prefix cache and never computed.
    alike = [*text[:18], 5, 6]
    prompts = [text[60:74], bad, alike, text[30:44], text[90:104]]
    with engine(
        tiny,
        max_model_len=128,
        max_num_seqs=3,
        async_scheduling=async_scheduling,
        speculative_config=speculative_config,
        skip_tokenizer_init=True,
        additional_config={"fixed_draft_length": True},
    ) as llm:
        free = free_blocks(llm)
        with monkeypatch.context() as patch:
            refuse(patch)
            for _ in range(MAX_FAILURES_IN_A_ROW + 2):  # which are failures of no step
                outputs = llm.generate(
                    [{"prompt_token_ids": prompt} for prompt in prompts],
                    greedy(NUM_TOKENS, detokenize=False),
                    use_tqdm=False,
                )
                for prompt, output in zip(prompts, outputs, strict=True):
                    (completion,) = output.outputs
                    if prompt is bad:
                        assert completion.finish_reason == "error"
                        assert "could not be added: ValueError: no such" in completion.stop_reason
                        assert not completion.token_ids
                    else:
                        assert completion.finish_reason == "length"
                        assert len(completion.token_ids) == NUM_TOKENS
                        dense.check(prompt, list(completion.token_ids))
            run_out(llm)
            assert free_blocks(llm) == free and held_rows(llm) == 0
        assert counters(llm)["vllm:num_preemptions"] > 0  # the others started again
        (tokens,) = generate(llm, [bad], greedy(NUM_TOKENS, detokenize=False))
        dense.check(bad, tokens)
