# SPDX-License-Identifier: Apache-2.0
"""Speculation on interpreted kernels, with steps prepared before the last one is read."""

from contextlib import contextmanager

import numpy as np
import pytest
from e2e.drafting import (
    FEW,
    METHODS,
    NUM_DRAFTS,
    Toy,
    draft_counts,
    drafting_engine,
    watching,
    write_toys,
)
from e2e.harness import Dense, counters, run_out, text_tokens
from engine.spec_decode import repeating
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from vllm_metal.engine.worker.model_runner import ModelRunner

HYBRIDS = ("hybrid", "hybrid, draft model", "hybrid, dflash")
TOYS = (*METHODS, "windowed", "several", "inkling", "assistant", *HYBRIDS)
MARKS = {"draft_model": (), "hybrid": pytest.mark.more, "several": pytest.mark.more}
MARKS |= {"inkling": pytest.mark.more}


@pytest.fixture(scope="module")
def toys(tmp_path_factory):
    return write_toys(tmp_path_factory.mktemp("toys"), for_kernels=True)


@pytest.fixture
def serve(monkeypatch):
    """Starts an engine on the kernels; with `waits`, one whose steps wait for the one before.

    Gives the engine, its runner, and what it drafts.
    """

    @contextmanager
    def start(toy, waits=False, **options):
        made, init = [], ModelRunner.__init__

        def noting(self, *arguments, **keywords):
            init(self, *arguments, **keywords)
            made.append(self)

        with monkeypatch.context() as patch, watching(patch) as drafted:
            patch.setattr(ModelRunner, "__init__", noting)
            patch.setenv("VLLM_METAL_KERNELS", "mlx" if waits else "interpret")
            settings = {"async_scheduling": True, "max_model_len": 128} | options
            with drafting_engine(toy, None, **settings) as llm:
                yield llm, made[0], drafted

    return start


def prompts(*lengths, seed=0):
    return [[(7 * i * i + 3 * n + i // 5 + seed) % FEW for i in range(n)] for n in lengths]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=MARKS.get(name, pytest.mark.slow)) for name in TOYS],
)
def test_no_step_waits_and_drafts_are_those_of_an_engine_that_waits(toys, serve, name):
    asked, found = prompts(5, 33, 50), {}
    for waits in (True, False):
        with serve(toys[name], waits) as (llm, runner, drafted):
            params = [sampled(None, temperature=0), sampled(1), sampled(2, top_k=3)]
            found[waits] = (generated(llm, asked, params), draft_counts(llm), drafted.take())
            assert (runner.num_waits > 20) if waits else (runner.num_waits == 0)
    assert found[True] == found[False]
    tokens, (num_drafts, num_accepted), _ = found[False]
    assert 0 < num_accepted < num_drafts
    Dense(toys[name].model).check(asked[0], tokens[0][0])


def sampled(seed, **options):
    settings = {"temperature": 1.0, "ignore_eos": True, "detokenize": False, "max_tokens": 24}
    return SamplingParams(**(settings | {"seed": seed} | options))


def generated(llm, asked, params):
    """Returns tokens and stop reasons of requests sent at once."""
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in asked], params, use_tqdm=False
    )
    run_out(llm)
    found = [output.outputs[0] for output in outputs]
    return [(list(one.token_ids), one.finish_reason) for one in found]


LOAD = [  # length of the prompt, what is asked
    (70, sampled(None, temperature=0, max_tokens=100)),  # as many as the model has room for
    (33, sampled(1, max_tokens=9)),
    (34, sampled(2, repetition_penalty=1.3, presence_penalty=0.5)),
    (5, sampled(3, min_tokens=11, stop_token_ids=[1, 2, 3], max_tokens=40)),
    (50, sampled(None, temperature=0, max_tokens=17)),
    (33, sampled(4, stop_token_ids=[5], max_tokens=30)),
    (1, sampled(None, temperature=0, max_tokens=31)),
    (70, sampled(5, logprobs=1, max_tokens=3)),
]


#: A request of 96 tokens takes as many of each group, so that the pool is short of some:
#: there are three and seven groups.
NUM_BLOCKS = {"windowed": 30, "several": 90, "inkling": 70}


@pytest.mark.more
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "hybrid" else pytest.mark.slow) for name in TOYS],
)
def test_requests_that_come_and_go_under_load(toys, serve, name):
    """Has chunks, preemption, prefix hits, stops within drafts and the longest text."""
    asked, found = prompts(*(length for length, _ in LOAD)), {}
    for waits, lookup in ((True, False), (False, False), (False, True)):
        with serve(
            toys[name],
            waits,
            max_model_len=96,
            max_num_seqs=4,
            max_num_batched_tokens=32,
            num_gpu_blocks_override=NUM_BLOCKS.get(name, 15),
            additional_config={"fixed_draft_length": True, "prompt_lookup": lookup},
        ) as (llm, runner, drafted):
            tokens = [generated(llm, asked, [params for _, params in LOAD]) for _ in range(2)]
            found[waits, lookup] = tokens
            seen = counters(llm)
            assert seen["vllm:num_preemptions"] > 0 and seen["vllm:prefix_cache_hits"] > 0
            if lookup:  # not all toys repeat themselves
                assert runner.num_waits >= drafted.num_copied
            else:
                assert (runner.num_waits > 20) if waits else (runner.num_waits == 0)
                assert not drafted.num_copied
    assert found[True, False] == found[False, False] == found[False, True]
    (cold, warm), dense = found[False, False], Dense(toys[name].model)
    assert cold == warm
    for prompt, (_, params), (tokens, reason) in zip(asked, LOAD, cold, strict=True):
        if params.temperature == 0:
            dense.check(prompt, tokens)
            assert reason == "length" and len(tokens) == min(params.max_tokens, 96 - len(prompt))
    assert "stop" in {reason for _, reason in cold}


def test_only_steps_in_which_a_request_copies_wait(tmp_path, serve):
    length = 32
    target = repeating.write_target(tmp_path / "target", length)
    drafter = repeating.write_drafter(
        tmp_path / "drafter", target, period=length, num_unknown=repeating.VOCAB // 3
    )
    speculation = {"method": "dflash", "model": str(drafter), "num_speculative_tokens": NUM_DRAFTS}
    toy = Toy(str(target), speculation)
    file, other = (
        repeating.text(np.random.default_rng(seed), 2 * length + 1, length) for seed in (1, 2)
    )
    # All tokens have been there, so that it levels them: what is drawn at random repeats nothing.
    noise = sampled(1, repetition_penalty=50.0, max_tokens=24)
    copy = sampled(None, temperature=0, max_tokens=length - 1)
    lookup = {"fixed_draft_length": True, "prompt_lookup": True}
    with serve(toy, max_model_len=256, additional_config=lookup) as (llm, runner, drafted):
        alone = generated(llm, [other], [noise])
        assert len(drafted.take()) > 16
        assert runner.num_waits == drafted.num_copied == 0
        together = generated(llm, [file, other], [copy, noise])
        assert together == [(file[length + 1 :][: length - 1], "length"), *alone]
        num_steps = len(drafted.take())
        assert 3 < drafted.num_copied < num_steps - 8
        assert drafted.num_copied <= runner.num_waits <= drafted.num_copied + 1


@pytest.mark.more
def test_a_grammar_that_joins_and_leaves(short, serve):
    """Only steps that contain its request wait."""
    text = text_tokens(short)
    speculation = {"method": "draft_model", "model": short, "num_speculative_tokens": 2}
    grammar = StructuredOutputsParams(regex="[a-f ]+")
    params = [
        sampled(1, max_tokens=30),
        sampled(None, temperature=0, max_tokens=4),
        sampled(2, max_tokens=6, structured_outputs=grammar),  # when the second is done
    ]
    asked, found, num_waits = [text[:20], text[50:60], text[90:105]], {}, {}
    for waits in (True, False):
        with serve(Toy(short, speculation), waits, max_num_seqs=2, skip_tokenizer_init=False) as (
            llm,
            runner,
            _,
        ):
            found[waits] = generated(llm, asked, params), draft_counts(llm)
            num_waits[waits] = runner.num_waits
    assert found[True] == found[False]
    assert 0 < num_waits[False] < num_waits[True] - 5
    _, (num_drafts, num_accepted) = found[False]
    assert 0 < num_accepted < num_drafts
