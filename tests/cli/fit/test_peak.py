# SPDX-License-Identifier: Apache-2.0
"""Peaks of small graphs, against manual counts and MLX itself."""

import mlx.core as mx
import pytest
from mlx_lm.models import activations
from peaks import least_peak

from vllm_metal.cli.fit.graph import record, recordable
from vllm_metal.cli.fit.peak import peak

MIB = 2**20


def found(function, *inputs):
    """Returns the peak of a function whose inputs already exist."""
    with recordable(metal=False):
        graph = record(lambda *arrays: [function(*arrays)], inputs)
    return peak(graph, graph.outputs, [], graph.inputs)


def array(*shape):
    return mx.zeros(shape)  # lazy, and only its shape matters


def test_results_take_the_memory_of_what_nobody_needs():
    x = array(256, 1024)  # 1 MiB
    assert found(lambda x: x + 1, x) == pytest.approx(MIB, abs=64)
    assert found(lambda x: mx.exp(mx.sin(x + 1) * 2), x) == pytest.approx(MIB, abs=64)
    # Both halves of the last sum at once.
    assert found(lambda x: mx.exp(x) + mx.sin(x), x) == pytest.approx(2 * MIB, abs=64)


def test_another_size_of_items_needs_memory_of_its_own():
    x = array(256, 1024)
    half = found(lambda x: mx.exp(x).astype(mx.float16), x)
    assert half == pytest.approx(1.5 * MIB, abs=64)


def test_a_view_keeps_the_whole_of_what_it_shows():
    x = array(256, 1024)
    # The first row of an exponential, and that doubled.
    assert found(lambda x: mx.exp(x)[:1] * 2, x) == pytest.approx(MIB + 4096, abs=64)


def test_what_is_kept_is_not_given_back_nor_taken_over():
    x = array(256, 1024)
    graph = record(lambda x: [(first := mx.exp(x)) * 2 + 1, first], [x])
    result, first = graph.outputs
    assert peak(graph, [result], [], graph.inputs) == pytest.approx(MIB, abs=64)
    assert peak(graph, [result], [first], graph.inputs) == pytest.approx(2 * MIB, abs=64)


def test_what_is_not_computed_yet_holds_what_it_follows_from():
    x = array(256, 1024)
    graph = record(lambda x: [(first := mx.exp(x)) * 2 + 1, first.sum()], [x])
    result, later = graph.outputs
    assert peak(graph, [result], [later], graph.inputs) == pytest.approx(2 * MIB, abs=64)


def test_inputs_that_are_not_there_come_when_they_are_needed():
    x, y = array(256, 1024), array(256, 1024)
    graph = record(lambda x, y: [(mx.exp(x).sum() + y)], [x, y])
    first, second = graph.inputs
    # exp(x) is gone when y comes; one that is kept is not given back nor taken over.
    assert peak(graph, graph.outputs, [], [first]) == pytest.approx(MIB, abs=64)
    assert peak(graph, graph.outputs, [second], [first]) == pytest.approx(2 * MIB, abs=64)
    assert peak(graph, graph.outputs, [first, second], []) == pytest.approx(3 * MIB, abs=64)


CASES = {
    "a compiled function": lambda x, w: activations.swiglu(x @ w, (x + 1) @ w),
    "halves": lambda x, w: activations.swiglu(*mx.split(x @ w, 2, axis=-1)),
    "rows in another order": lambda x, w: (x @ w)[mx.arange(127, -1, -1)] * 2,
    "transposed": lambda x, w: (x @ w).T.reshape(-1) + 1,
    "as another dtype": lambda x, w: (x @ w).view(mx.uint32).view(mx.uint16)[:, ::2] + 1,
    "a scatter": lambda x, w: mx.zeros((256, 512)).at[mx.arange(128)].add(x @ w) * 2,
    "attention": lambda x, w: mx.softmax((y := x @ w) @ y.T, axis=-1) @ x,
    "breadth first": lambda x, w: mx.exp(x).sum() + mx.sin(x).sum(),
    "a norm": lambda x, w: mx.fast.rms_norm(x @ w, None, 1e-5),
    "batches": lambda x, w: (x @ w).reshape(4, 32, 8, 64).swapaxes(1, 2) @ mx.ones((64, 64)),
}


@pytest.mark.parametrize("case", CASES)
def test_the_peak_is_mlxs(case):
    function = CASES[case]
    x, w = mx.random.normal((128, 256)), mx.random.normal((256, 512))
    mx.eval(x, w)
    measured = least_peak(lambda: mx.eval(function(x, w)))
    assert found(function, x, w) == pytest.approx(measured, rel=0.05)
