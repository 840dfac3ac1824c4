# SPDX-License-Identifier: Apache-2.0
"""The recurrence of a step, against a token-by-token one in float64, and mlx-lm's."""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.gated_delta import gated_delta_ops
from mlx_lm.models.ssm import ssm_attn

from metal_kernels.plan_arrays import all_else, with_arrays
from metal_kernels.recurrence import reference
from metal_kernels.sequence_groups import plan
from metal_kernels.sequences import RecurrenceInputs
from tests.metal_kernels.sequence_traffic import (
    Request,
    Step,
    Traffic,
    Turn,
    play,
    random_turns,
    settled_requests,
    verification,
)

HK, GROUP, DV, DK = 2, 2, 6, 16
HV = HK * GROUP


@dataclass(frozen=True)
class Rule:
    """A kind of recurrence."""

    delta: bool
    decays: str  # "head", "key" or "rate"
    log_rates: np.ndarray | None = None
    num_values: int = DV

    def zero(self):
        return np.zeros((HV, self.num_values, DK))

    def apply(self, state, row):
        query, key, value, rate, decay = row
        query, key = np.repeat(query, GROUP, 0), np.repeat(key, GROUP, 0)
        if self.log_rates is not None:
            decay = np.exp(rate[:, None] * self.log_rates)
        state = state * (decay[:, None, None] if decay.ndim == 1 else decay[:, None])
        if self.delta:
            value = value - np.einsum("hvk,hk->hv", state, key)
        state = state + (rate[:, None] * value)[..., None] * key[:, None]
        return state, np.einsum("hvk,hk->hv", state, query)


def of_rate(delta: bool, num_values: int) -> Rule:
    log_rates = -np.random.default_rng(0).uniform(0.1, 8, (HV, DK)).astype(np.float32)
    return Rule(delta, "rate", log_rates, num_values)


RULES = {
    "delta": Rule(True, "head"),
    "delta of keys": Rule(True, "key"),
    "space": Rule(False, "head"),
    "space of keys": Rule(False, "key"),
    "scan": of_rate(False, 1),
    "scan of many values": of_rate(False, 3),
    "delta of rates": of_rate(True, 3),
}


def random_rows(rng: np.random.Generator, rule: Rule, number: int) -> list[np.ndarray]:
    """Draws queries, keys of norm 1, values, rates in [0, 2], and decays, many 0, 1 or tiny."""
    queries, keys = rng.normal(size=(2, number, HK, DK))
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    if number and rng.random() < 0.3:
        keys[:] = keys[0]  # a token said again and again
    shape = (number, HV, DK) if rule.decays == "key" else (number, HV)
    decays = rng.uniform(0.3, 1, shape)
    decays = np.where(rng.random(shape) < 0.4, 1, decays)
    decays = np.where(
        rng.random(shape) < 0.03, 0, np.where(rng.random(shape) < 0.03, 1e-30, decays)
    )
    rates = rng.uniform(0, 2 if rule.delta else 1, (number, HV))
    values = rng.normal(size=(number, HV, rule.num_values))
    return [array.astype(np.float32) for array in (queries, keys, values, rates, decays)]


def run(planned, rule: Rule, rows, kept, states, dtype=mx.float32):
    queries, keys, values, rates, decays = map(mx.array, rows)
    inputs = RecurrenceInputs(
        keys.astype(dtype), values.astype(dtype), rates, None if rule.decays == "rate" else decays
    )
    log_rates = None if rule.log_rates is None else mx.array(rule.log_rates)
    return reference.run(
        planned, queries.astype(dtype), inputs, kept, mx.array(states), rule.delta, log_rates
    )


def per_row(rows) -> list:
    doubles = [array.astype(np.float64) for array in rows]
    return [tuple(array[index] for array in doubles) for index in range(len(rows[0]))]


def close(found, expected) -> bool:
    found, expected = np.array(found), np.asarray(expected)
    return np.abs(found - expected).max() <= 1e-5 * max(np.abs(expected).max(), 1)


@pytest.mark.parametrize("name", RULES)
def test_steps_equal_a_play_from_token_to_token(name):
    rule, rng = RULES[name], np.random.default_rng(1)
    traffic, pool, kept = Traffic(rng, block_size=7), {}, None
    requests = [Request() for _ in range(6)]
    garbage = np.full((HV, rule.num_values, DK), np.nan, np.float32)
    for number in range(12):
        if number % 3 == 2:
            requests[number % 6] = Request()
        turns = random_turns(rng, requests, 90)
        if number == 7:
            turns = [Turn(0, 0, request.drafts) for request in requests]
        step = traffic.step(requests, turns)
        rows = random_rows(rng, rule, step.num_rows)
        states = np.stack([pool.get(request.block, garbage) for request in requests])
        planned = plan(*step.arguments)
        out, ended, kept = run(planned, rule, rows, kept, states)
        outputs, ends = play(step, rule, per_row(rows))
        assert out.shape == rows[2].shape
        if step.num_rows:
            assert close(out, np.stack(outputs))
        assert sorted(planned.ends_blocks_np.tolist()) == sorted(ends)
        for block, state in zip(planned.ends_blocks_np.tolist(), np.array(ended), strict=True):
            assert close(state, ends[block])
            pool[block] = state
        assert len(kept.keys) == len(kept.values) == len(kept.rates) == step.num_kept


def whole_text(length: int) -> Step:
    return Traffic(np.random.default_rng(0), 1000).step([Request()], [Turn(length)])


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("name", ["delta", "delta of keys"])
def test_a_whole_text_equals_mlx_lms_delta_rule(name, dtype, length=75):
    rule = RULES[name]
    rows = random_rows(np.random.default_rng(3), rule, length)
    out, ended, _ = run(
        plan(*whole_text(length).arguments), rule, rows, None, rule.zero()[None], dtype
    )
    queries, keys, values = (mx.array(row).astype(dtype)[None] for row in rows[:3])
    rates, decays = (mx.array(row)[None] for row in rows[3:])
    expected, state = gated_delta_ops(
        *(array.astype(mx.float32) for array in (queries, keys, values)), decays, rates
    )
    assert out.dtype == dtype
    tolerance = 1e-5 if dtype == mx.float32 else 1e-2
    assert mx.allclose(out, expected[0], atol=tolerance, rtol=tolerance)
    assert close(ended, state)


def test_a_whole_text_equals_mlx_lms_state_space_model(length=300):
    rng, rule = np.random.default_rng(4), RULES["space"]
    rows = random_rows(rng, rule, length)
    steps = rng.uniform(0.01, 3, (length, HV)).astype(np.float32)
    log = rng.normal(size=HV).astype(np.float32)
    rows[3], rows[4] = steps, np.exp(-steps * np.exp(log))
    out, ended, _ = run(plan(*whole_text(length).arguments), rule, rows, None, rule.zero()[None])
    inverse_softplus = np.log(np.expm1(steps))
    expected, state = ssm_attn(
        mx.array(rows[2])[None], mx.array(log), mx.array(rows[1])[None], mx.array(rows[0])[None],
        mx.zeros(HV), mx.array(inverse_softplus)[None], mx.zeros(HV), None,
    )  # fmt: skip
    assert close(out, expected[0])
    assert close(ended, state)


@pytest.mark.parametrize(
    "name",
    [
        "delta",
        pytest.param("space of keys", marks=pytest.mark.more),
        pytest.param("scan", marks=pytest.mark.more),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in RULES
            if name not in ("delta", "space of keys", "scan")
        ),
    ],
)
def test_a_compiled_step_takes_other_accepted_counts(name):
    rule, rng = RULES[name], np.random.default_rng(6)
    plans = []
    for accepted in ([0, 1, 2, 3, 0, 1, 2, 3], [3, 3, 0, 2, 1, 0, 0, 1]):
        traffic = Traffic(rng, 1000)
        traffic.num_kept = 24
        plans.append(plan(*verification(traffic, settled_requests(), accepted).arguments))
    kept_rows = [mx.array(row) for row in random_rows(rng, rule, 24)]
    kept = RecurrenceInputs(*kept_rows[1:4], None if rule.decays == "rate" else kept_rows[4])
    rows = random_rows(rng, rule, 32)
    states = rng.normal(size=(8, HV, rule.num_values, DK)).astype(np.float32)

    def forward(arrays):
        out, ended, drafts = run(with_arrays(plans[0], iter(arrays)), rule, rows, kept, states)
        return out, ended, drafts.keys

    compiled = mx.compile(forward)
    for planned in plans:
        arrays: list[mx.array] = []
        all_else(planned, arrays)
        for found, expected in zip(compiled(arrays), forward(arrays), strict=True):
            assert close(found, np.array(expected))


@pytest.mark.parametrize("name", RULES)
def test_rejected_drafts_that_are_no_numbers_change_nothing(name):
    rule, rng = RULES[name], np.random.default_rng(8)
    drafts = random_rows(rng, rule, 3)
    for array in drafts:
        array[1:] = np.nan
    keys, values, rates, decays = map(mx.array, drafts[1:])
    kept = RecurrenceInputs(keys, values, rates, None if rule.decays == "rate" else decays)
    traffic = Traffic(rng, 1000)
    traffic.num_kept = 3
    step = traffic.step([Request(settled=1, drafts=3)], [Turn(1, 1, accepted=1)])
    rows, state = random_rows(rng, rule, 2), rng.normal(size=rule.zero().shape)
    out, ended, _ = run(plan(*step.arguments), rule, rows, kept, state[None].astype(np.float32))
    state, _ = rule.apply(state, per_row(drafts)[0])
    state, output = rule.apply(state, per_row(rows)[0])
    assert close(ended[0], state)
    assert close(out[0], output)


def test_long_texts_of_one_length_go_together():
    together = Traffic(np.random.default_rng(0), 1000).step([Request(), Request()], [Turn(70)] * 2)
    rule, rows = RULES["delta"], random_rows(np.random.default_rng(9), RULES["delta"], 140)
    planned = plan(*together.arguments)
    assert len(planned.groups) == 1
    out, ended, _ = run(planned, rule, rows, None, np.stack([rule.zero()] * 2))
    for index in range(2):
        own = [array[70 * index : 70 * index + 70] for array in rows]
        alone = run(plan(*whole_text(70).arguments), rule, own, None, rule.zero()[None])
        assert close(out[70 * index : 70 * index + 70], alone[0])
        assert close(ended[index], alone[1][0])


def test_what_is_missing_is_an_error():
    rule, rng = RULES["scan"], np.random.default_rng(7)
    traffic = Traffic(rng, 1000)
    planned = plan(*verification(traffic, settled_requests(), [1] * 8).arguments)
    rows = random_rows(rng, rule, 32)
    states = np.zeros((8, HV, 1, DK), np.float32)
    with pytest.raises(ValueError, match="kept rows"):
        run(planned, rule, rows, None, states)
    with pytest.raises(ValueError, match="log_rates"):
        run(plan(*whole_text(32).arguments), Rule(False, "rate"), rows, None, states[:1])
