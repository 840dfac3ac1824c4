# SPDX-License-Identifier: Apache-2.0
import gc

import mlx.core as mx
import numpy as np
import pytest
from engine.models.cases import cases
from peaks import least_peak
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from metal_kernels.layout import PositionLag, RaggedRows
from vllm_metal.engine.sample import DraftSpans, GrammarMask, Sampler, SamplerOutput

V = 64
NUM_DRAWS = 8_000
LOGITS = np.random.default_rng(7).normal(scale=1.5, size=V).astype(np.float32)
TOP = np.argsort(-LOGITS).tolist()
PROMPT = [TOP[0], TOP[3], TOP[3], TOP[10]]
OUTPUT = [TOP[1], TOP[2], TOP[1], TOP[40], TOP[5]]


def bitmask(allowed: list[int], vocab_size: int = V) -> np.ndarray:
    """Makes int32 [ceil(V/32)] bit by bit."""
    words = [0] * -(-vocab_size // 32)
    for token in allowed:
        words[token // 32] |= 1 << (token % 32)
    return np.array(words, dtype=np.uint32).view(np.int32)


def rows(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def draw_many(params: SamplingParams, allowed: list[int] | None = None) -> np.ndarray:
    """int [V], how often each token comes in NUM_DRAWS, every one of a request of its own with the
    same history."""
    sampler = Sampler(V, NUM_DRAWS // 2, seed=20)
    draws = []
    for _ in range(2):
        req_indices = np.arange(NUM_DRAWS // 2, dtype=np.int32)
        for req_idx in req_indices.tolist():
            sampler.add_request(req_idx, params, PROMPT, list(OUTPUT))
        grammar = None
        if allowed is not None:
            grammar = GrammarMask(req_indices, np.tile(bitmask(allowed), (len(req_indices), 1)))
        logits = mx.broadcast_to(mx.array(LOGITS), (len(req_indices), V))
        out = sampler.sample(logits, req_indices, np.full_like(req_indices, len(OUTPUT)), grammar)
        draws.append(np.array(out.token_ids))
        for req_idx in req_indices.tolist():
            sampler.remove_request(req_idx)
    return np.bincount(np.concatenate(draws), minlength=V)


STOPS = [TOP[0], TOP[4]]
SETTINGS = {
    "plain": {},
    "temperature 0.7": {"temperature": 0.7},
    "temperature 1.3": {"temperature": 1.3},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "top_k top_p": {"top_k": 12, "top_p": 0.7},
    "top_k top_p min_p": {"top_k": 12, "top_p": 0.9, "min_p": 0.05, "temperature": 1.2},
    "repetition_penalty": {"repetition_penalty": 1.8},
    "frequency_penalty": {"frequency_penalty": 0.9},
    "presence_penalty": {"presence_penalty": -1.1},
    "all penalties": {
        "repetition_penalty": 0.7,
        "frequency_penalty": 0.4,
        "presence_penalty": 0.8,
        "temperature": 0.8,
    },
    "logit_bias": {"logit_bias": {TOP[0]: -2.0, TOP[30]: 4.0}},
    "allowed_token_ids": {"allowed_token_ids": TOP[2:40:3]},
    "bad_words": {
        "_bad_words_token_ids": [
            [TOP[0]],  # always
            [TOP[5], TOP[1]],  # completes the output's end
            [TOP[40], TOP[5], TOP[2]],  # likewise, longer
            [TOP[1], TOP[3]],  # prefix is in the output, not at its end
            [TOP[0], *OUTPUT, TOP[6]],  # longer than the output
        ]
    },
    "min_tokens": {"min_tokens": 6, "stop_token_ids": STOPS},
    "min_tokens reached": {"min_tokens": 5, "stop_token_ids": STOPS},
    "everything": {
        "temperature": 0.9,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.02,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.1,
        "logit_bias": {TOP[7]: 2.0},
        "_bad_words_token_ids": [[TOP[5], TOP[2]]],
        "allowed_token_ids": TOP[:50],
        "min_tokens": 9,
        "stop_token_ids": STOPS,
    },
}


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())
def test_draws_follow_the_defined_distribution(setting, distribution, assert_follows):
    params = SamplingParams(**setting)
    assert_follows(draw_many(params), distribution(LOGITS, params, PROMPT, OUTPUT))


@pytest.mark.parametrize("newcomer", [{"temperature": 0}, {"temperature": 1}])
@pytest.mark.parametrize(
    "setting",
    [*SETTINGS.values(), {"seed": 1}, {"logprob_token_ids": [2, 3]}],
    ids=[*SETTINGS, "seed", "logprob_token_ids"],
)
def test_a_request_inherits_nothing_from_the_one_before_it(setting, newcomer):
    """Of the request that had its req_idx. Another request still asks for the same, so everything
    that served the one that left runs for both rows."""
    sampler = Sampler(V, 2, logprobs_mode="processed_logits")
    logits = mx.array(np.stack([LOGITS] * 2))
    for req_idx in (0, 1):
        sampler.add_request(req_idx, SamplingParams(**setting), PROMPT, list(OUTPUT))
    sampler.sample(logits, rows(0, 1), rows(5, 5))
    sampler.remove_request(0)
    sampler.add_request(0, SamplingParams(**newcomer, logprobs=-1), PROMPT, list(OUTPUT))
    lists = sampler.sample(logits, rows(0, 1), rows(5, 6)).logprobs.to_lists()
    assert lists.logprob_token_ids[0, 1:].tolist() == TOP
    assert lists.logprobs[0, 1:].tolist() == LOGITS[TOP].tolist()


def test_draws_under_a_grammar_follow_the_defined_distribution(distribution, assert_follows):
    allowed = [0, 1, 31, 32, 33, 63]
    params = SamplingParams()
    expected = distribution(LOGITS, params, grammar=allowed)
    assert_follows(draw_many(params, allowed), expected)


def generate(
    sampler: Sampler, logits: np.ndarray, req_indices: np.ndarray, num_steps: int
) -> np.ndarray:
    """[num_steps, N] tokens of requests already added. logits: [num_steps, N, V]. No token is
    fetched until all steps have been described."""
    tokens = [
        sampler.sample(mx.array(logits[i]), req_indices, np.full_like(req_indices, i)).token_ids
        for i in range(num_steps)
    ]
    return np.array(mx.stack(tokens))


def test_seeded_request_draws_the_same_alone_and_in_a_batch():
    rng = np.random.default_rng(0)
    num_steps, wide = 8, 300
    seeded = SamplingParams(seed=1234, temperature=1.1, presence_penalty=0.4, top_k=200)
    own = rng.normal(size=(num_steps, wide)).astype(np.float32)

    alone = Sampler(wide, 1, seed=1)
    alone.add_request(0, seeded, [1, 2], [])
    expected = generate(alone, own[:, None], rows(0), num_steps)[:, 0]
    assert len(set(expected.tolist())) > num_steps // 2

    others = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.5, top_p=0.7),
        SamplingParams(seed=1235),
        SamplingParams(top_k=3, min_p=0.2),
        SamplingParams(seed=4, repetition_penalty=1.3, logprobs=3),
    ]
    batch = Sampler(wide, 16, seed=99)
    req_indices = rng.permutation(16).astype(np.int32)
    for row, req_idx in enumerate(req_indices.tolist()):
        batch.add_request(req_idx, seeded if row == 11 else others[row % 5], [1, 2], [])
    logits = rng.normal(size=(num_steps, 16, wide)).astype(np.float32)
    logits[:, 11] = own
    assert generate(batch, logits, req_indices, num_steps)[:, 11].tolist() == expected.tolist()


def test_resumed_seeded_request_goes_on_with_the_same_tokens():
    rng = np.random.default_rng(1)
    params = SamplingParams(
        seed=-5, frequency_penalty=1.0, _bad_words_token_ids=[[1], [2, 3], [4, 5, 6]]
    )
    logits = rng.normal(size=(10, 1, 12)).astype(np.float32)
    sampler = Sampler(12, 2)
    sampler.add_request(0, params, [3], [])
    expected = generate(sampler, logits, rows(0), 10)[:, 0].tolist()

    sampler.remove_request(0)
    sampler.add_request(1, params, [3], expected[:4])
    resumed = [
        sampler.sample(mx.array(logits[i]), rows(1), rows(i)).token_ids.item() for i in range(4, 10)
    ]
    assert resumed == expected[4:]


def test_engine_seed_decides_unseeded_draws():
    def draws(seed: int) -> list[int]:
        sampler = Sampler(V, 1, seed=seed)
        sampler.add_request(0, SamplingParams(), [], [])
        return generate(sampler, np.zeros((20, 1, V), np.float32), rows(0), 20)[:, 0].tolist()

    assert draws(3) == draws(3)
    assert draws(3) != draws(4)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_greedy_rows_take_the_argmax_beside_random_ones(dtype):
    logits = mx.random.normal((6, V), key=mx.random.key(0)).astype(dtype)
    sampler = Sampler(V, 6)
    for req_idx in range(6):
        greedy = req_idx % 2 == 0
        sampler.add_request(
            req_idx, SamplingParams(temperature=0 if greedy else 2.0, top_p=0.99), [], []
        )
    req_indices = np.arange(6, dtype=np.int32)
    best = np.array(mx.argmax(logits, axis=-1))
    varied = set()
    for step in range(20):
        out = sampler.sample(logits, req_indices, np.full_like(req_indices, step))
        assert out.token_ids.dtype == mx.int32
        tokens = np.array(out.token_ids)
        assert (tokens[::2] == best[::2]).all()
        varied.update(tokens[1::2].tolist())
    assert len(varied) > 10


def test_rows_follow_their_request_indices_not_their_position():
    sampler = Sampler(V, 8)
    sampler.add_request(5, SamplingParams(temperature=0, logit_bias={9: 100}), [], [])
    sampler.add_request(2, SamplingParams(temperature=0, allowed_token_ids=[4]), [], [])
    sampler.add_request(7, SamplingParams(temperature=0, _bad_words_token_ids=[[TOP[0]]]), [], [])
    logits = mx.array(np.stack([LOGITS] * 3))
    for order, expected in [((5, 2, 7), [9, 4, TOP[1]]), ((7, 5, 2), [TOP[1], 9, 4])]:
        out = sampler.sample(logits, rows(*order), rows(0, 0, 0))
        assert out.token_ids.tolist() == expected


def test_min_tokens_gives_way_when_a_grammar_leaves_only_stop_tokens():
    grammar = StructuredOutputsParams(regex="a")
    params = SamplingParams(
        temperature=0, min_tokens=3, stop_token_ids=[8, 9], structured_outputs=grammar
    )
    sampler = Sampler(V, 2)
    sampler.add_request(0, params, [], [])
    sampler.add_request(1, params, [], [])
    mask = np.stack([bitmask([8]), bitmask([8, 20])])
    out = sampler.sample(mx.zeros((2, V)), rows(0, 1), rows(0, 0), GrammarMask(rows(0, 1), mask))
    assert out.token_ids.tolist() == [8, 20]


@pytest.mark.parametrize("span", [1, 3])
def test_counts_that_only_the_device_knows(span):
    """Seeds and min_tokens use a request's real length, not the host's count."""
    stops = {"min_tokens": 8, "stop_token_ids": TOP[:20]}
    params = [
        SamplingParams(seed=3),
        SamplingParams(seed=3, **stops),
        SamplingParams(temperature=0, **stops),
        SamplingParams(temperature=0),
    ]
    sampler = Sampler(V, 16)
    for req_idx in range(16):
        sampler.add_request(req_idx, params[req_idx % 4], PROMPT, [])
    rng, (req_indices, in_span) = np.random.default_rng(0), np.divmod(rows(*range(16 * span)), span)
    spans = None
    if span > 1:
        lens, none = np.full(16, span, np.int32), mx.full(16 * span, -1, mx.int32)
        spans = DraftSpans(RaggedRows.of(lens), none)
    exact = rng.integers(4, 10, 16, np.int32)[req_indices] + in_span
    most = rng.integers(0, 4, 16, np.int32)
    most[0] = 3
    counts = np.minimum(rng.integers(0, 4, 16, np.int32), most)[req_indices]
    logits = mx.array(rng.normal(size=(16 * span, V)).astype(np.float32) + LOGITS)
    wanted = sampler.sample(logits, req_indices, exact, None, spans)
    lag = PositionLag(mx.array(counts), most[req_indices])
    found = sampler.sample(logits, req_indices, exact + counts, None, spans, lag)
    assert found.token_ids.tolist() == wanted.token_ids.tolist()
    wrong = sampler.sample(logits, req_indices, exact + counts, None, spans)
    assert wrong.token_ids.tolist() != wanted.token_ids.tolist()


def test_token_ids_outside_the_vocabulary_change_nothing():
    params = SamplingParams(
        temperature=0,
        logit_bias={V: 50.0, 10**6: 5.0, 3: 0.5},
        allowed_token_ids=[3, TOP[0], V + 5],
        stop_token_ids=[V + 1],
        min_tokens=4,
        repetition_penalty=1.5,
        _bad_words_token_ids=[[V + 2], [10**6, TOP[0]]],
    )
    sampler = Sampler(V, 1)
    sampler.add_request(0, params, [V + 7, 10**9], [])
    out = sampler.sample(mx.array(LOGITS)[None], rows(0), rows(0))
    assert out.token_ids.item() == TOP[0]


@pytest.mark.parametrize("span", [1, pytest.param(2, marks=pytest.mark.slow), 4])
def test_a_step_with_everything_on_evaluates_nothing(span):
    """Builds logits of 8 MB; memory shows that none are allocated."""
    num_rows, wide = 8, 2**18
    params = SamplingParams(**SETTINGS["everything"], logprobs=3, seed=1)
    sampler = Sampler(wide, num_rows)
    lens = np.full(num_rows // span, span, dtype=np.int32)
    req_indices = np.repeat(np.arange(len(lens), dtype=np.int32), lens)
    before = 5 + np.arange(num_rows, dtype=np.int32) % span
    for req_idx in range(len(lens)):
        sampler.add_request(req_idx, params, PROMPT, list(OUTPUT))
    mask = GrammarMask(rows(0, 1), np.full((2, wide // 32), -1, dtype=np.int32))

    def sample(logits: mx.array, draft_ids: mx.array) -> SamplerOutput:
        draft_spans = None if span == 1 else DraftSpans(RaggedRows.of(lens), draft_ids)
        return sampler.sample(logits, req_indices, before, mask, draft_spans)

    out = sample(mx.zeros((num_rows, wide)), mx.zeros((num_rows,), dtype=mx.int32))
    mx.eval(out.token_ids)  # brings the prompts' token counts to the device

    gc.collect()  # what other tests left
    mx.reset_peak_memory()
    at_rest = mx.get_active_memory()
    for _ in range(2):
        before += 1
        out = sample(mx.zeros((num_rows, wide)) + out.token_ids[:, None], out.token_ids)
    logits_bytes = num_rows * wide * 4
    assert mx.get_peak_memory() - at_rest < logits_bytes / 2
    mx.eval(out.token_ids, out.logprobs.arrays())
    assert mx.get_peak_memory() - at_rest > logits_bytes


WIDE = 16_384


def peak(params: SamplingParams) -> float:
    """Returns the peak memory of a step, in multiples of the logits."""
    num_rows = 16
    logits = mx.zeros((num_rows, WIDE))
    mx.eval(logits)
    req_indices = np.arange(num_rows, dtype=np.int32)

    def sample() -> None:
        sampler = Sampler(WIDE, num_rows)
        for req_idx in range(num_rows):
            sampler.add_request(req_idx, params, PROMPT, list(OUTPUT))
        out = sampler.sample(logits, req_indices, np.full_like(req_indices, len(OUTPUT)))
        mx.eval(list(out.arrays()))

    return least_peak(sample) / logits.nbytes


@pytest.fixture(scope="module")
def heaviest() -> float:
    return peak(SamplingParams(**Sampler(WIDE, 1).heaviest(), logprobs=3))


@pytest.mark.more
def test_the_heaviest_parameters_need_much_memory(heaviest):
    assert heaviest > 2 * peak(SamplingParams(logprobs=3))


@pytest.mark.parametrize("name", cases(SETTINGS, more=["everything", "all penalties"]))
def test_no_parameter_needs_more_memory_than_the_heaviest(name, heaviest):
    """The memory profile relies on the peak of `heaviest`.

    A tenth is left for the order in which MLX evaluates a smaller graph: it may hold one array for
    longer (6.5 of penalties alone, 6.0 of the heaviest).
    """
    assert peak(SamplingParams(**SETTINGS[name], logprobs=3)) <= 1.1 * heaviest


def test_empty_step():
    sampler = Sampler(V, 1)
    out = sampler.sample(mx.zeros((0, V)), rows(), rows())
    assert out.token_ids.shape == (0,)
    assert out.logprobs is None


def test_contract_errors_name_the_cause():
    with pytest.raises(ValueError, match="logprobs_mode is 'raw'"):
        Sampler(V, 1, logprobs_mode="raw")
    sampler = Sampler(V, 1)
    sampler.add_request(0, SamplingParams(), [], [])
    with pytest.raises(ValueError, match="req_idx 0 already"):
        sampler.add_request(0, SamplingParams(), [], [])
    with pytest.raises(ValueError, match="logits have shape"):
        sampler.sample(mx.zeros((1, V + 1)), rows(0), rows(0))
