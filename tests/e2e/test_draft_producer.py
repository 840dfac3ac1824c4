# SPDX-License-Identifier: Apache-2.0
"""An engine that prefills for others writes its draft network's K/V, and drafts nothing."""

import numpy as np
import pytest
from e2e.drafting import (
    BLOCK,
    METHODS,
    VOCAB,
    Toy,
    answer,
    draft_counts,
    drafting_engine,
    payloads,
)
from e2e.harness import counters

from vllm_metal.engine.spec_decode.draft_writer import DraftWriter
from vllm_metal.engine.spec_decode.paged_proposer import PagedProposer
from vllm_metal.engine.worker.model_runner import ModelRunner

#: Lengths of prompts: around ends of blocks, and in several chunks.
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 5 * BLOCK + 3)
NUM_FULL = sum(length // BLOCK for length in LENGTHS)
#: Largest difference of two numbers of the draft's K/V, up to about 6: the order of sums differs.
TIE = 1e-4
DRAFTING = 10  # tokens of requests that draft behind their prompts


def methods(quick=None, more=None):
    """Marks METHODS: one always, one in longer runs, the others nightly."""
    marks = {quick: (), more: pytest.mark.more}
    return pytest.mark.parametrize(
        "method",
        [pytest.param(name, marks=marks.get(name, pytest.mark.slow)) for name in METHODS],
    )


@pytest.fixture
def prompts():
    """Prompts of LENGTHS, and one that shares four blocks with the longest."""
    rng = np.random.default_rng(1)
    found = [rng.integers(2, VOCAB, length).tolist() for length in LENGTHS]
    return [*found, found[-1][: 4 * BLOCK] + rng.integers(2, VOCAB, 2 * BLOCK - 1).tolist()]


def serve(toy, folder, role, prompts, max_tokens, **options):
    """Returns answers to consecutive prompts, and the pages they left."""
    with drafting_engine(toy, folder, role, **options) as llm:
        tokens = [answer(llm, [prompt], max_tokens)[0] for prompt in prompts]
        drafted, _ = draft_counts(llm)
        assert (drafted > 0) == (role == "kv_both" and max_tokens > 1)
    return tokens, payloads(folder)


def check_pages(found, expected, exact=True):
    assert found.keys() <= expected.keys()
    for key, page in found.items():
        if page != expected[key]:
            numbers, others = np.frombuffer(page, np.float32), np.frombuffer(expected[key], "f4")
            assert not exact and np.abs(numbers - others).max() < TIE, key


@pytest.mark.parametrize(
    ("chunk", "ahead"),
    [
        (40, True),
        pytest.param(40, False, marks=pytest.mark.slow),
        pytest.param(256, True, marks=pytest.mark.slow),
        pytest.param(24, True, marks=pytest.mark.slow),
        pytest.param(16, True, marks=pytest.mark.slow),
        pytest.param(16, False, marks=pytest.mark.slow),
        pytest.param(256, False, marks=pytest.mark.slow),
    ],
)
@methods(quick="eagle")
def test_it_writes_what_one_server_has(toys, tmp_path, prompts, method, chunk, ahead):
    options = {"max_num_batched_tokens": chunk, "async_scheduling": ahead}
    one = serve(toys[method], tmp_path / "one", "kv_both", prompts, DRAFTING, **options)
    tokens, pages = serve(toys[method], tmp_path / "p", "kv_producer", prompts, 1, **options)
    assert tokens == [of_one[:1] for of_one in one[0]]
    assert len(pages) == NUM_FULL + 1
    # A draft model of one server may take in a few tokens later, with those of the next step.
    check_pages(pages, one[1], exact=method != "draft_model" or chunk > 24)


@methods(quick="draft_model")
def test_requests_that_end_where_their_next_step_is_scheduled(toys, tmp_path, prompts, method):
    one, pages = serve(toys[method], tmp_path / "one", "kv_both", prompts, DRAFTING)
    folder = tmp_path / "p"
    with drafting_engine(toys[method], folder, "kv_producer", async_scheduling=True) as llm:
        for prompt, (first, *_) in zip(prompts, one, strict=True):
            assert answer(llm, [prompt], 8, stop_token_ids=[first]) == [[first]]
        assert draft_counts(llm) == (0, 0)
    check_pages(payloads(folder), pages)
    assert len(payloads(folder)) == NUM_FULL + 1


@methods(more="eagle")
def test_pages_of_generated_tokens_are_complete_too(toys, tmp_path, prompts, method):
    one, expected = serve(toys[method], tmp_path / "one", "kv_both", prompts, DRAFTING)
    tokens, pages = serve(toys[method], tmp_path / "p", "kv_producer", prompts, DRAFTING)
    assert tokens == one and pages.keys() == expected.keys()
    check_pages(pages, expected, exact=False)  # one row at a time, there several drafts


@pytest.mark.parametrize(
    "method",
    [
        pytest.param("eagle", marks=pytest.mark.more),
        pytest.param("draft_model", marks=pytest.mark.slow),
    ],
)
def test_prompts_that_come_at_once(toys, tmp_path, prompts, method):
    num_tokens = 24  # so many that not all have room
    _, expected = serve(toys[method], tmp_path / "one", "kv_both", prompts, num_tokens)
    folder = tmp_path / "p"
    # A pool so small that requests are preempted.
    options = {"max_num_batched_tokens": 40, "num_gpu_blocks_override": 18}
    with drafting_engine(toys[method], folder, "kv_producer", **options) as llm:
        answer(llm, prompts, num_tokens)
        assert draft_counts(llm) == (0, 0)
        assert counters(llm)["vllm:num_preemptions"] > 0
    found = payloads(folder)
    check_pages({key: page for key, page in found.items() if key in expected}, expected, False)
    assert len(found.keys() & expected.keys()) >= NUM_FULL + 1


@methods(more="eagle")
def test_one_server_leaves_as_much_of_requests_of_one_token(toys, tmp_path, prompts, method):
    options = {"max_num_batched_tokens": 40, "async_scheduling": True}
    _, expected = serve(toys[method], tmp_path / "one", "kv_both", prompts, DRAFTING, **options)
    _, pages = serve(toys[method], tmp_path / "short", "kv_both", prompts, 1, **options)
    assert len(pages) == NUM_FULL + 1
    check_pages(pages, expected, exact=method != "draft_model")


@pytest.mark.more
def test_windows_whose_groups_share_memory_with_the_drafts(tiny_models, tmp_path):
    rng = np.random.default_rng(1)
    prompts = [rng.integers(2, 256, length).tolist() for length in (3 * BLOCK, 130, 200)]
    spec = {"method": "draft_model", "model": str(tiny_models / "windowed-draft")}
    toy = Toy(str(tiny_models / "windowed"), spec | {"num_speculative_tokens": 3})
    options = {"max_num_batched_tokens": 40, "num_gpu_blocks_override": 80}
    _, expected = serve(toy, tmp_path / "one", "kv_both", prompts, DRAFTING, **options)
    _, pages = serve(toy, tmp_path / "p", "kv_producer", prompts, 1, **options)
    both = pages.keys() & expected.keys()
    assert len(both) > len(pages) // 2 > 10
    check_pages({key: pages[key] for key in both}, expected, exact=False)


@pytest.mark.more
def test_a_draft_model_made_for_shorter_texts(toys, tmp_path, prompts):
    toy = toys["draft_model"]
    toy = Toy(toy.model, toy.speculation | {"max_model_len": 3 * BLOCK + 8})
    options = {"max_num_batched_tokens": 40}
    _, expected = serve(toy, tmp_path / "one", "kv_both", prompts, DRAFTING, **options)
    _, pages = serve(toy, tmp_path / "p", "kv_producer", prompts, 1, **options)
    assert len(pages) == NUM_FULL + 1
    check_pages(pages, expected)


@pytest.mark.parametrize("ahead", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", ["draft_model", pytest.param("eagle", marks=pytest.mark.slow)])
def test_nothing_is_proposed(toys, tmp_path, prompts, monkeypatch, method, ahead):
    def never(*arguments, **options):
        raise AssertionError("a producer has no proposer")

    passes, steps = [], []
    write, forward = DraftWriter.write, ModelRunner.forward

    def counted(self, rows, last_token_ids):
        passes.append(len(rows.positions_np))
        return write(self, rows, last_token_ids)

    def noting(self, scheduler_output):
        assert not scheduler_output.scheduled_spec_decode_tokens
        steps.append(scheduler_output.total_num_scheduled_tokens)
        forward(self, scheduler_output)

    monkeypatch.setattr(PagedProposer, "__init__", never)
    monkeypatch.setattr(DraftWriter, "write", counted)
    monkeypatch.setattr(ModelRunner, "forward", noting)
    with drafting_engine(
        toys[method], tmp_path, "kv_producer", async_scheduling=ahead, max_num_seqs=4
    ) as llm:
        answer(llm, prompts, 4)
    assert passes == steps and len(steps) > 4
