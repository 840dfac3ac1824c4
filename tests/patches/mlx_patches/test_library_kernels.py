# SPDX-License-Identifier: Apache-2.0
"""mlx-lm's own kernels are compared once with MLX's operations, their replacement."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import gated_delta, rwkv7, ssm

from vllm_metal.device.record import Record
from vllm_metal.patches.mlx_patches import library_kernels
from vllm_metal.patches.mlx_patches.library_kernels import ENTRIES, Call, Verdict

pytestmark = pytest.mark.usefixtures("unfused")

MODULES = {"ssm": ssm, "gated_delta": gated_delta, "rwkv7": rwkv7}
BY_MODULE = {entry.module: entry for entry in ENTRIES}
_16, _32 = "bfloat16", "float32"
CALLS = {
    "ssm": Call(
        "ssm.ssm_update_kernel",
        (
            *(((1, 1, 4, 8), _16), ((4,), _32), ((1, 1, 2, 32), _16), ((1, 1, 2, 32), _16)),
            *(((4,), _32), ((1, 1, 4), _16), ((4,), _32), ((1, 4, 8, 32), _32), (0.001, 100.0)),
        ),
    ),
    "gated_delta": Call(
        "gated_delta.gated_delta_kernel",
        (
            *(((1, 1, 2, 32), _16), ((1, 1, 2, 32), _16), ((1, 1, 4, 16), _16)),
            *(((1, 1, 4), _32), ((1, 1, 4), _16), ((1, 4, 16, 32), _32), None),
        ),
    ),
    "rwkv7": Call("rwkv7.wkv7_kernel", (*[((1, 1, 2, 32), _16)] * 6, ((1, 2, 32, 32), _16))),
}


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch):
    """Restores what a test replaces in mlx-lm's modules."""
    for entry in ENTRIES:
        module = MODULES[entry.module]
        monkeypatch.setattr(module, entry.kernel, getattr(module, entry.kernel))


def as_kernel(name: str, wrong: float = 0.0):
    """Makes a kernel in numpy's float64 from the recurrence's formula, with a relative error."""

    def floats(*arrays):
        return [np.array(a.astype(mx.float32)).astype(np.float64) for a in arrays]

    def ssm_kernel(x, a_log, b, c, d, dt, dt_bias, state, limits):
        dtypes = x.dtype, state.dtype
        x, a_log, b, c, d, dt, dt_bias, state = floats(x, a_log, b, c, d, dt, dt_bias, state)
        dt = np.clip(np.log1p(np.exp(dt + dt_bias)), *limits)[:, 0]
        b, c = (np.repeat(part[:, 0], x.shape[2] // part.shape[2], 1) for part in (b, c))
        inner = (dt[..., None] * x[:, 0])[..., None] * b[:, :, None]
        state = np.exp(-np.exp(a_log) * dt)[..., None, None] * state + inner
        out = (state * c[:, :, None]).sum(-1) + d[:, None] * x[:, 0]
        return out[:, None], state, dtypes

    def delta_kernel(q, k, v, g, beta, state, mask):
        dtypes = q.dtype, state.dtype
        q, k, v, g, beta, state = floats(q, k, v, g, beta, state)
        q, k = (np.repeat(part, v.shape[2] // part.shape[2], 2) for part in (q, k))
        outputs = []
        for t in range(q.shape[1]):
            state = state * g[:, t, :, None, None]
            delta = (v[:, t] - np.einsum("bhvk,bhk->bhv", state, k[:, t])) * beta[:, t, :, None]
            state = state + delta[..., None] * k[:, t, :, None]
            outputs.append(np.einsum("bhvk,bhk->bhv", state, q[:, t]))
        return np.stack(outputs, 1), state, dtypes

    def wkv_kernel(r, w, k, v, a, b, state):
        dtypes = r.dtype, state.dtype
        r, w, k, v, a, b, state = floats(r, w, k, v, a, b, state)
        outputs = []
        for t in range(r.shape[1]):
            read = np.einsum("bhvk,bhk->bhv", state, a[:, t])
            state = state * w[:, t, :, None] + v[:, t, ..., None] * k[:, t, :, None]
            state = state + read[..., None] * b[:, t, :, None]
            outputs.append(np.einsum("bhvk,bhk->bhv", state, r[:, t]))
        return np.stack(outputs, 1), state, dtypes

    formula = {"ssm": ssm_kernel, "gated_delta": delta_kernel, "rwkv7": wkv_kernel}[name]

    def kernel(*arguments):
        *results, dtypes = formula(*arguments)
        results[1] = results[1] * (1 + wrong)
        return tuple(
            mx.array(result.astype(np.float32)).astype(dtype)
            for result, dtype in zip(results, dtypes, strict=True)
        )

    return kernel


@pytest.mark.parametrize("name", CALLS)
def test_a_right_kernel_passes_and_a_wrong_one_does_not(monkeypatch, name):
    entry, call = BY_MODULE[name], CALLS[name]
    monkeypatch.setattr(MODULES[name], entry.kernel, as_kernel(name))
    assert library_kernels.check(call) == Verdict(call, True)
    monkeypatch.setattr(MODULES[name], entry.kernel, as_kernel(name, wrong=0.05))
    verdict = library_kernels.check(call)
    assert not verdict.ok and "state of" in verdict.detail and "expected" in verdict.detail


def test_calls_are_noted_with_their_shapes_and_survive_json():
    entry = BY_MODULE["gated_delta"]
    rows = [
        mx.zeros(shape, getattr(mx, dtype)) for shape, dtype in CALLS["gated_delta"].arguments[:3]
    ]
    gates = [mx.zeros((1, 1, 4), mx.bfloat16)] * 2
    before = getattr(gated_delta, entry.counterpart)
    with library_kernels.noted() as calls:
        for _ in range(2):
            gated_delta.gated_delta_update(*rows, *gates, mx.zeros(4), mx.zeros(4))
        x, a_log, b, c, d, dt, bias, _ = (
            mx.zeros(shape, getattr(mx, dtype)) for shape, dtype in CALLS["ssm"].arguments[:8]
        )
        ssm.ssm_update(x, a_log, b, c, d, dt, bias, None, (0.001, 100.0))
    assert calls == [CALLS["gated_delta"], CALLS["ssm"]]
    assert getattr(gated_delta, entry.counterpart) is before
    for call in calls:
        assert Call.from_json(json.loads(json.dumps(asdict(call)))) == call


def process(tmp_path: Path, *lines: str):
    """A checking process, and its number of runs."""
    runs = tmp_path / "runs"
    runs.touch()
    text = "import json, os, sys, time\ncall = json.load(sys.stdin)\n"
    note = f"open({str(runs)!r}, 'a').write('x')\n"
    return [sys.executable, "-c", "".join([text, note, *lines])], lambda: len(runs.read_text())


SAYS = "print(json.dumps({'call': call, 'ok': %s, 'detail': %r}))\n"


def test_a_kernel_that_passes_stays_and_is_checked_once(tmp_path: Path):
    command, runs = process(tmp_path, SAYS % (True, ""))
    kernel = gated_delta.gated_delta_kernel
    for _ in range(2):
        calls = [CALLS["gated_delta"]] * 2
        assert library_kernels.replace_wrong(calls, command, record=Record(tmp_path)) == []
    assert runs() == 1 and gated_delta.gated_delta_kernel is kernel


@pytest.mark.parametrize(
    ("lines", "limit", "said"),
    [
        (SAYS % (False, "is 1, expected 2"), 120.0, "is 1, expected 2"),
        ("os.abort()\n", 120.0, "signal 6"),
        ("sys.exit('no such kernel')\n", 120.0, "status 1: no such kernel"),
        ("print('nothing')\n", 120.0, "status 0: nothing"),
        ("time.sleep(600)\n", 0.5, "did not end within 0.5 s"),
    ],
    ids=["wrong", "crash", "error", "silent", "hang"],
)
def test_operations_take_the_place_of_a_kernel_that_fails(
    tmp_path: Path, lines: str, limit: float, said: str
):
    command, runs = process(tmp_path, lines)
    for _ in range(2):
        gated_delta.gated_delta_kernel = None
        calls = [CALLS["gated_delta"]]
        (verdict,) = library_kernels.replace_wrong(calls, command, limit, Record(tmp_path))
        assert said in verdict.detail
        assert gated_delta.gated_delta_kernel is gated_delta.gated_delta_ops
    assert runs() == 1 or (limit < 1 and not runs())  # too short a time to begin


@pytest.mark.parametrize("name", CALLS)
def test_what_takes_a_kernels_place_computes_the_same(name):
    entry, call = BY_MODULE[name], CALLS[name]
    library_kernels.use_operations(entry)
    arguments = [
        0.1 * mx.random.normal(described[0], key=mx.random.key(index))
        if index < entry.state + 1
        else described
        for index, described in enumerate(call.arguments)
    ]
    found = getattr(MODULES[name], entry.kernel)(*arguments)
    for ours, formula in zip(found, as_kernel(name)(*arguments), strict=True):
        np.testing.assert_allclose(np.array(ours), np.array(formula), rtol=1e-3, atol=1e-4)
