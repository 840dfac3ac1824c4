# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.v1.outputs import LogprobsLists

from metal_kernels.layout import RaggedRows
from vllm_metal.engine.sample import DraftSpans, GrammarMask, Sampler, SamplerOutput, num_accepted

V = 11


def spans_of(drafts: list[list[int]]) -> DraftSpans:
    """Returns one span per list of drafts."""
    lens = np.array([len(d) + 1 for d in drafts], dtype=np.int32)
    flat = [token for d in drafts for token in [*d, -1]]
    return DraftSpans(RaggedRows.of(lens), mx.array(flat, dtype=mx.int32))


@given(
    rows=st.lists(
        st.lists(st.tuples(st.integers(0, 2), st.integers(-1, 2)), min_size=1, max_size=6),
        min_size=1,
        max_size=8,
    )
)
def test_leading_matches_are_accepted(rows):
    """rows: draft_spans of (sampled, draft); the last row has no draft."""
    draft_spans = spans_of([[draft for _, draft in span[:-1]] for span in rows])
    sampled = mx.array([token for span in rows for token, _ in span], dtype=mx.int32)
    expected = []
    for span in rows:
        right = [token == draft for token, draft in span[:-1]]
        expected.append([*right, False].index(False))
    accepted = num_accepted(sampled, draft_spans)
    assert accepted.dtype == mx.int32
    assert accepted.tolist() == expected
    places = [
        place <= e for span, e in zip(rows, expected, strict=True) for place in range(len(span))
    ]
    assert draft_spans.is_output(accepted).tolist() == places


@dataclass
class Scene:
    """Requests with fixed logits per number of generated tokens."""

    params: list[SamplingParams]
    prompts: list[list[int]]
    resumed: list[list[int]]  # tokens of an earlier life
    logits: np.ndarray  # float32 [R, T, V]
    masks: np.ndarray  # int32 [R, T, 1]
    masked: list[bool]  # which requests follow a grammar

    def sampler(self, mode: str) -> Sampler:
        sampler = Sampler(V, len(self.params), logprobs_mode=mode)
        for req_idx, params in enumerate(self.params):
            sampler.add_request(req_idx, params, self.prompts[req_idx], list(self.resumed[req_idx]))
        return sampler

    def sample(
        self, sampler: Sampler, rows: list[tuple[int, int]], draft_spans: DraftSpans | None = None
    ) -> SamplerOutput:
        """rows: (request, tokens generated since it started)."""
        req_indices = np.array([request for request, _ in rows], dtype=np.int32)
        done = np.array([tokens for _, tokens in rows], dtype=np.int32)
        before = np.array([len(r) for r in self.resumed], dtype=np.int32)[req_indices] + done
        under = np.flatnonzero(np.array(self.masked)[req_indices]).astype(np.int32)
        grammar = (
            GrammarMask(under, self.masks[req_indices[under], done[under]]) if len(under) else None
        )
        logits = mx.array(self.logits[req_indices, done])
        return sampler.sample(logits, req_indices, before, grammar, draft_spans)


tokens = st.integers(0, V - 1)
optional = {
    "top_k": st.integers(1, V),
    "top_p": st.floats(0.3, 0.99),
    "min_p": st.floats(0.01, 0.3),
    "repetition_penalty": st.floats(0.5, 2.0),
    "frequency_penalty": st.floats(-1.0, 2.0),
    "presence_penalty": st.floats(-1.0, 2.0),
    "logit_bias": st.dictionaries(tokens, st.floats(-3, 3), min_size=1, max_size=3),
    "min_tokens": st.integers(1, 12),
    "_bad_words_token_ids": st.lists(
        st.lists(tokens, min_size=1, max_size=4), min_size=1, max_size=8
    ),
    "allowed_token_ids": st.lists(tokens, min_size=3, max_size=V),
    "logprobs": st.integers(0, 4),
    "logprob_token_ids": st.lists(tokens, min_size=1, max_size=4),
}


@st.composite
def sampling_params(draw) -> SamplingParams:
    """Draws greedy or seeded parameters, with any others."""
    greedy = draw(st.booleans())
    fixed = {"temperature": 0.0} if greedy else {"temperature": draw(st.floats(0.3, 1.5))}
    fixed["seed"] = draw(st.integers(-(2**63), 2**63 - 1))
    chosen = draw(st.fixed_dictionaries({}, optional=optional))
    if "logprob_token_ids" in chosen:
        chosen.pop("logprobs", None)
    stops = draw(st.lists(tokens, min_size=1, max_size=2))
    return SamplingParams(**fixed, **chosen, stop_token_ids=stops)


def scene(rng: np.random.Generator, params: list[SamplingParams], num_tokens: int) -> Scene:
    shape = (len(params), num_tokens)
    bits = rng.random((*shape, V)) < 0.7
    return Scene(
        params,
        prompts=[rng.integers(0, V, 3).tolist() for _ in params],
        resumed=[rng.integers(0, V, rng.integers(4)).tolist() for _ in params],
        logits=rng.normal(scale=1.5, size=(*shape, V)).astype(np.float32),
        masks=(bits << np.arange(V)).sum(axis=-1, keepdims=True).astype(np.int32),
        masked=(rng.random(len(params)) < 0.3).tolist(),
    )


def one_by_one(scene: Scene, sampler: Sampler, num_tokens: int):
    """Returns int32 [R, T] tokens, and per step the logprobs of all requests or None."""
    steps = [
        scene.sample(sampler, [(request, done) for request in range(len(scene.params))])
        for done in range(num_tokens)
    ]
    assert all(step.num_accepted is None for step in steps)
    assert all(step.last_token_ids is step.token_ids for step in steps)
    logprobs = [step.logprobs.to_lists() if step.logprobs else None for step in steps]
    return np.array(mx.stack([step.token_ids for step in steps], axis=1)), logprobs


def same_logprobs(got: LogprobsLists, row: int, expected: LogprobsLists, request: int) -> None:
    """The widest request of a step decides how many are reported, so the first ones are compared;
    tokens that cannot come are in no particular order."""
    width = min(got.logprobs.shape[1], expected.logprobs.shape[1])
    assert got.sampled_token_ranks[row] == expected.sampled_token_ranks[request]
    ours, theirs = got.logprobs[row, :width], expected.logprobs[request, :width]
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    possible = theirs > -np.inf
    ids, wanted = got.logprob_token_ids[row, :width], expected.logprob_token_ids[request, :width]
    assert ids[possible].tolist() == wanted[possible].tolist()


@pytest.mark.parametrize("rows_at_once", [1000, 2])
def test_draft_spans_sample_what_single_rows_sample(rows_at_once):
    """Against the same sampler without drafts, over many requests with all parameters mixed; drafts
    are right with probability 0.7. The last tokens are again sampled without drafts. All the same
    where a step is sampled chunk by chunk."""
    shares = []

    @settings(max_examples=20)
    @given(
        params=st.lists(sampling_params(), min_size=1, max_size=4),
        mode=st.sampled_from(["raw_logprobs", "processed_logprobs", "processed_logits"]),
        seed=st.integers(0, 2**32 - 1),
    )
    def check(params, mode, seed):
        rng = np.random.default_rng(seed)
        num_tokens, plain_tokens, most_drafts = 14, 3, 4
        fixed = scene(rng, params, num_tokens)
        expected, logprobs = one_by_one(fixed, fixed.sampler(mode), num_tokens)
        sampler = fixed.sampler(mode)
        sampler.rows_at_once = rows_at_once
        done = np.zeros(len(params), dtype=np.int64)
        offered = accepted = 0
        while (left := num_tokens - plain_tokens - done).any():
            here = [r for r in rng.permutation(len(params)).tolist() if left[r]]
            here = here[: rng.integers(1, len(here) + 1)]
            drafts = []
            for r in here:
                count = rng.integers(0, min(most_drafts, left[r] - 1) + 1)
                guess = expected[r, done[r] : done[r] + count]
                wrong = rng.random(count) > 0.7
                drafts.append(np.where(wrong, rng.integers(0, V, count), guess).tolist())
            draft_spans = spans_of(drafts)
            rows = [
                (r, done[r] + j)
                for r, own in zip(here, drafts, strict=True)
                for j in range(len(own) + 1)
            ]
            out = fixed.sample(sampler, rows, draft_spans)
            got, counts, last = (
                np.array(out.token_ids),
                out.num_accepted.tolist(),
                out.last_token_ids.tolist(),
            )
            lists = out.logprobs.to_lists() if out.logprobs else None
            for r, own, start, count, newest in zip(
                here, drafts, draft_spans.starts_np.tolist(), counts, last, strict=True
            ):
                right = expected[r, done[r] : done[r] + len(own)] == own
                assert count == [*right, False].index(False)
                for j in range(count + 1):
                    assert got[start + j] == expected[r, done[r]]
                    if lists is not None:
                        same_logprobs(lists, start + j, logprobs[done[r]], r)
                    done[r] += 1
                assert newest == got[start + count]
                offered, accepted = offered + len(own), accepted + count
        for place in range(num_tokens - plain_tokens, num_tokens):
            out = fixed.sample(sampler, [(r, place) for r in range(len(params))])
            assert out.token_ids.tolist() == expected[:, place].tolist()
        if offered:
            shares.append(accepted / offered)

    check()
    assert np.mean(np.array(shares) > 0) > 0.8
    assert 0.2 < np.mean(shares) < 0.9


NUM_DRAWS = 12_000
NUM_GREEDY = 400


def test_drafts_do_not_change_the_law_of_unseeded_draws(distribution, assert_follows):
    """Joint law of three tokens, where each one's logits depend on the token before, under
    temperature, top-p and penalties. Drafts are anything; greedy requests sit in between."""
    rng = np.random.default_rng(12)
    size, length = 5, 3
    logits = rng.normal(scale=1.2, size=(size, size)).astype(np.float32)  # by previous token
    prompt = [3, 1]
    random = SamplingParams(
        temperature=0.7,
        top_p=0.93,
        repetition_penalty=1.2,
        frequency_penalty=0.5,
        presence_penalty=-0.3,
    )
    greedy = SamplingParams(temperature=0.0, frequency_penalty=0.8)
    num_reqs = NUM_DRAWS + NUM_GREEDY
    is_greedy = rng.permutation(num_reqs) < NUM_GREEDY
    sampler = Sampler(size, num_reqs, seed=5)
    for req_idx in range(num_reqs):
        sampler.add_request(req_idx, greedy if is_greedy[req_idx] else random, prompt, [])
    output = continue_with_drafts(sampler, logits, num_reqs, length, prompt[-1], rng)

    def joint(params: SamplingParams) -> np.ndarray:
        law = np.zeros((size,) * length)
        for so_far in np.ndindex(*law.shape):
            law[so_far] = 1.0
            for i, token in enumerate(so_far):
                row = logits[so_far[i - 1] if i else prompt[-1]]
                law[so_far] *= distribution(row, params, prompt, so_far[:i])[token]
        return law.reshape(-1)

    codes = np.ravel_multi_index(tuple(output.T), (size,) * length)
    counts = np.bincount(codes[~is_greedy], minlength=size**length)
    assert_follows(counts, joint(random))
    assert (codes[is_greedy] == joint(greedy).argmax()).all()


def continue_with_drafts(
    sampler: Sampler,
    logits: np.ndarray,
    num_reqs: int,
    length: int,
    first: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """int [num_reqs, length] sampled after `first`: spans of random lengths until all are full.
    A draft is the likeliest successor of the draft before, or half the time any token."""
    text = np.full((num_reqs, 1 + length), first, dtype=np.int32)
    done = np.zeros(num_reqs, dtype=np.int32)
    num_accepted = num_drafts = 0
    while (left := length - done).any():
        req_indices = np.flatnonzero(left).astype(np.int32)
        lens = rng.integers(1, left[req_indices] + 1).astype(np.int32)
        starts = (np.cumsum(lens) - lens).astype(np.int32)
        span = np.repeat(np.arange(len(req_indices)), lens)
        offsets = np.arange(len(span), dtype=np.int32) - starts[span]
        chain = rng.integers(0, len(logits), (len(req_indices), 1 + length), dtype=np.int32)
        chain[:, 0] = text[req_indices, done[req_indices]]
        likeliest = rng.random(chain.shape) < 0.5
        for j in range(length):
            successor = logits[chain[:, j]].argmax(axis=-1)
            chain[:, j + 1] = np.where(likeliest[:, j], successor, chain[:, j + 1])
        drafts = np.where(offsets < lens[span] - 1, chain[span, offsets + 1], -1)
        places = done[req_indices][span] + offsets
        draft_spans = DraftSpans(RaggedRows.of(lens), mx.array(drafts))
        out = sampler.sample(
            mx.array(logits[chain[span, offsets]]),
            req_indices[span],
            places,
            draft_spans=draft_spans,
        )
        accepted = np.array(out.num_accepted)
        kept = offsets <= accepted[span]
        text[req_indices[span][kept], 1 + places[kept]] = np.array(out.token_ids)[kept]
        done[req_indices] += accepted + 1
        num_accepted, num_drafts = num_accepted + accepted.sum(), num_drafts + (lens - 1).sum()
    assert 0.2 < num_accepted / num_drafts < 0.8
    return text[:, 1:]


def test_a_draft_outside_the_vocabulary_is_refused_and_leaves_no_trace():
    params = SamplingParams(
        temperature=0, frequency_penalty=1.0, _bad_words_token_ids=[[1, 2], [3, 4, 5]]
    )
    sampler, alone = Sampler(V, 2), Sampler(V, 2)
    for req_idx in (0, 1):
        sampler.add_request(req_idx, params, [], [])
        alone.add_request(req_idx, params, [], [])
    rng = np.random.default_rng(0)
    logits = mx.array(rng.normal(size=(4, V)).astype(np.float32))
    req_indices = np.array([0, 0, 0, 1], dtype=np.int32)
    before = np.array([0, 1, 2, 0], dtype=np.int32)
    logits[3, 0] = logits[3].max() + 0.5  # would lose if V at row 2 were taken for 0 at row 3
    for impossible in (V, -1, V + 3):
        draft_spans = spans_of([[impossible, 2], []])
        out = sampler.sample(logits, req_indices, before, draft_spans=draft_spans)
        expected = alone.sample(logits[mx.array([0, 3])], req_indices[[0, 3]], before[[0, 3]])
        assert out.num_accepted.tolist() == [0, 0]
        assert out.last_token_ids.tolist() == expected.token_ids.tolist()
        before += 1


def test_an_empty_step_has_no_draft_spans():
    none = np.zeros(0, dtype=np.int32)
    draft_spans = DraftSpans(RaggedRows.of(none), mx.zeros((0,), dtype=mx.int32))
    out = Sampler(V, 1).sample(mx.zeros((0, V)), none, none, draft_spans=draft_spans)
    assert out.num_accepted.shape == out.last_token_ids.shape == (0,)


def test_contract_errors_name_the_cause():
    lens = np.array([2, 1], dtype=np.int32)
    with pytest.raises(ValueError, match="at least one row"):
        DraftSpans(RaggedRows.of(lens * [1, 0]), mx.zeros((2,), dtype=mx.int32))
    with pytest.raises(ValueError, match=r"draft_ids has shape \(2,\); draft_spans: 3 rows"):
        DraftSpans(RaggedRows.of(lens), mx.zeros((2,), dtype=mx.int32))
    sampler = Sampler(V, 1)
    sampler.add_request(0, SamplingParams(), [], [])
    one = np.zeros(1, dtype=np.int32)
    with pytest.raises(ValueError, match="draft_spans have 2 rows; expected 1"):
        sampler.sample(mx.zeros((1, V)), one, one, draft_spans=spans_of([[4]]))
