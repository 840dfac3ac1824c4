# SPDX-License-Identifier: Apache-2.0
"""Executed lines of small kernels, against manual marks."""

import re
import sys

import mlx.core as mx
import numpy as np
import pytest
from metal_interpreter import Coverage

from tests.metal_kernels.elf import reads_elf

# At the end of a line: "yes", executed; "no", executable and missed; neither, no code.
HEADER = """\
template <int N>
inline float scaled(float x) {                 // yes
  if (N > 4) {
    x *= 2.0f;
  }
  for (int i = 0; i < N; i++) {                // yes
    x += 1.0f;                                 // yes
  }
  return x;                                    // yes
}

inline float unused(float x) {
  return x;
}

// A sum that returns early.
inline float sum(const device float* values, int count) {  // yes
  float total = 0.0f;                          // yes
  for (int i = 0; i < count; i++) {            // yes
    total += values[i];                        // no
  }
  if (count == 0) {                            // yes
    return total;                              // yes
  }
  total *= 2.0f;                               // no
  return total;                                // no
}                                              // yes
"""
BODY = """\
uint i = thread_position_in_grid.x;            // yes
threadgroup float shared[64];                  // yes
if (i > 1000) {                                // yes
  shared[i] = 5.0f;                            // no
} else {                                       // no
  shared[i] = scaled<3>(in0[i]);               // yes
}
threadgroup_barrier(mem_flags::mem_threadgroup);  // yes
if (FLAG) {
  out[i] = shared[63 - i];                     // yes
} else {
  out[i] = 7.0f;
}
out[i] += sum(in0, i > 100 ? 3 : 0) +          // yes
    simd_sum(0.0f);                            // yes
"""


def launch(coverage, body=BODY, header=HEADER, template=(("FLAG", True),), values=None):
    kernel = coverage.metal_kernel(
        "probe",
        ["in0"],
        ["out"],
        f'#line 1 "body.metal"\n{body}',
        f'#line 1 "header.metal"\n{header}',
    )
    (out,) = kernel(
        inputs=[mx.arange(64).astype(mx.float32) if values is None else values],
        template=list(template),
        grid=(64, 1, 1),
        threadgroup=(64, 1, 1),
        output_shapes=[(64,)],
        output_dtypes=[mx.float32],
    )
    return np.array(out)


def marked(text, mark):
    lines = enumerate(text.split("\n"), 1)
    return {number for number, line in lines if re.search(rf"// {mark}$", line)}


@reads_elf
def test_branches_loops_and_templates():
    coverage = Coverage()
    np.testing.assert_array_equal(launch(coverage), np.arange(64)[::-1] + 3)
    report = coverage.report()
    assert sorted(report) == ["body.metal", "header.metal"]
    for name, text in (("body.metal", BODY), ("header.metal", HEADER)):
        assert report[name].executed == marked(text, "yes")
        assert report[name].missed == sorted(marked(text, "no"))


@reads_elf
def test_instantiations_and_calls_add_up():
    coverage = Coverage()
    body = "if (N > 2) {\n  out[0] = 1.0f;\n}\nif (in0[0] > 0.0f) {\n  out[1] = 2.0f;\n}\n"
    for n, first, missed in ((1, 0.0, [5]), (3, 0.0, [5]), (3, 1.0, [])):
        launch(coverage, body, "", [("N", n)], mx.full((64,), first))
        lines = coverage.report()["body.metal"]
        assert (2 in lines.executable) == (n == 3)
        assert [line for line in lines.missed if line in (2, 5)] == missed


@reads_elf
def test_each_coverage_sees_its_own_runs_only():
    body = "if (in0[0] > 0.0f) {\n  out[0] = 1.0f;\n}\n"
    first, second = Coverage(), Coverage()
    launch(first, body, "", values=mx.ones(64))
    launch(second, body, "", values=mx.zeros(64))
    assert 2 in first.report()["body.metal"].executed
    assert second.report()["body.metal"].missed == [2]
    assert Coverage().report() == {}


@reads_elf
def test_needs_pyelftools(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="pip install pyelftools"):
        Coverage()


def test_elsewhere_it_says_where_to_run_it(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(RuntimeError, match="run it on Linux"):
        Coverage()
