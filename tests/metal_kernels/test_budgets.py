# SPDX-License-Identifier: Apache-2.0
"""Kernels keep to their budgets by the proxy, MLX's have the registers it was calibrated with, and
faults that cost speed alone are found."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import mlx.core as mx
import pytest
from metal_interpreter import proxy

from metal_kernels import kernel
from tests.metal_kernels import mlx_attention, proxy_page
from tests.metal_kernels.budgets import HELD, decode_budget, keys_of, measured
from tests.metal_kernels.proxy_figures import changed
from tests.metal_kernels.proxy_uses import uses

USES = list(uses())
#: One of each kernel by day, one of each kind in CI's second step, and all at night.
IN_THE_DAY = (
    *("decode, 8 heads", "prompt", "parts joined", "K/V written, rotated", "contexts gathered"),
    *("blocks copied, cleared", "states read", "states written", "convolution", "delta rule"),
)
OF_EACH_KIND = [
    pytest.param(use, id=str(use), marks=() if what in IN_THE_DAY else pytest.mark.more)
    for what, use in {use.what: use for use in USES}.items()
] + [
    pytest.param(use, id=str(use), marks=pytest.mark.more)
    for use in USES
    if (use.what, use.size) == ("decode, 8 heads", "128")
]
CODES = mx.uint8
#: The loads of decode.
_LOADS = ("Keys::load(row", "Values::load(value_pool")
_ELEMENTS = {
    "key": "Of::cut(keys[s][h], m % Of::COUNT)",
    "value": "Of::cut(raw, m % Of::COUNT)",
}
_LOADER = "const ulong row = slot + metal::min(k, end - 1 - base);"


def few_rows(rows: int) -> proxy.Call:
    """Returns a call of few_rows.metal."""
    made = kernel.load(
        Path(__file__).with_name("few_rows.metal"),
        ("queries", "key_pool", "value_pool", "key_scales", "value_scales", "tables", "lengths"),
        ("out",),
        ("numeric.metal", "attention.metal"),
    )
    dtypes = (mx.float16, CODES, CODES, mx.bfloat16, mx.bfloat16, mx.int32, mx.int32)
    recorder = proxy.Recorder()
    with kernel.using(recorder.metal_kernel):
        made(
            inputs=[mx.zeros(8, dtype) for dtype in dtypes],
            template=[("ROWS", rows)],
            grid=(256, 1, 1),
            threadgroup=(256, 1, 1),
            output_shapes=[(8,)],
            output_dtypes=[mx.float32],
        )
    return recorder.calls[0]


@dataclass(frozen=True)
class Fault:
    """A change that keeps a kernel correct but makes it slow."""

    found_by: str  # what is beyond its bound
    edits: tuple[tuple[str, str], ...] = ()  # text, which is there once, and what takes its place
    template: tuple[tuple[str, int], ...] = ()

    def planted(self, call: proxy.Call) -> proxy.Call:
        call = changed(call, template=dict(self.template))
        for old, new in self.edits:
            assert (call.header + call.source).count(old) == 1, old
            call = dataclasses.replace(
                call, header=call.header.replace(old, new), source=call.source.replace(old, new)
            )
        return call


def decode(use="decode, 8 heads, 128, 8 bit"):
    """Returns the call of a decode kernel."""
    return {str(use): use for use in USES}[use].calls(1)[0]


#: Code in which a fault is planted, as it is without the fault.
FAULTS = {
    "branches around decode's loads": (
        decode,
        Fault(
            "waits",
            tuple((load, f"if (base + s * 8 + place.row < end) {load}") for load in _LOADS),
        ),
    ),
    "decode's tiles of 16 rows for 8": (
        decode,
        Fault("slots", template=(("ROW_GROUPS", 2),)),
    ),
    "decode's scales on every element": (
        decode,
        Fault(
            "slots",
            tuple(
                (element, f"half2(float2({element}) * {of}_scale[s])")
                for of, element in _ELEMENTS.items()
            ),
        ),
    ),
    "a branch around loads": (
        partial(few_rows, 1),
        Fault("waits", ((_LOADER, "if (base + k >= end) continue; const ulong row = slot + k;"),)),
    ),
    "rows rounded up to a power of two": (
        partial(few_rows, 3),
        Fault("slots", template=(("ROWS", 4),)),
    ),
    "a scale on every element": (
        partial(few_rows, 1),
        Fault(
            "slots",
            (
                ("q[r][i] * float(keys[k][i])", "q[r][i] * (float(keys[k][i]) * key_scale[k])"),
                ("metal::simd_sum(score) * key_scale[k]", "metal::simd_sum(score)"),
                (
                    "weight * value_scale[k] * float(values[k][i])",
                    "weight * (value_scale[k] * float(values[k][i]))",
                ),
            ),
        ),
    ),
}


def beyond(call, budget, bits=8):
    """Returns a call's exceeded limits."""
    return budget.exceeded(measured(call), keys_of(call), bits)


@pytest.mark.parametrize("rows", [1, pytest.param(3, marks=pytest.mark.more)])
def test_a_kernel_without_such_faults_keeps_to_the_budget_of_decode(rows):
    assert beyond(few_rows(rows), decode_budget("128", 8)) == []


@pytest.mark.parametrize(
    "name",
    [name if "decode" in name else pytest.param(name, marks=pytest.mark.more) for name in FAULTS],
)
def test_a_planted_fault_is_beyond_the_figures_without_it(name):
    make, fault = FAULTS[name]
    sound = make()
    budget = proxy_page.Row.of("", "128", 8, [sound]).budget
    assert beyond(sound, budget) == []
    over = beyond(fault.planted(sound), budget)
    assert any(text.startswith(fault.found_by) for text in over), over


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("a branch around loads", marks=pytest.mark.more),
        pytest.param("rows rounded up to a power of two", marks=pytest.mark.more),
        "decode's tiles of 16 rows for 8",
    ],
)
def test_a_planted_fault_is_beyond_the_budget_of_decode(name):
    make, fault = FAULTS[name]
    over = beyond(fault.planted(make()), decode_budget("128", 8))
    assert any(text.startswith(fault.found_by) for text in over), over


def test_registers_scratch_and_bytes_in_flight_have_bounds():
    figures = measured(few_rows(1))
    short = dataclasses.replace(
        decode_budget("64", 16), loop_registers=1, registers=2, in_flight=1 << 20
    )
    assert short.exceeded(dataclasses.replace(figures, scratch=8), None, 16) == [
        f"registers in the loop: {figures.loop_registers} of 1",
        f"registers: {figures.registers} of 2",
        "bytes of scratch: 8 of 0",
        f"bytes in flight: {figures.in_flight} of 1048576",
    ]


@pytest.mark.parametrize(
    "attention",
    [
        pytest.param(
            call, id=f"{call.kernel}-{call.size}", marks=() if place in (0, 5) else pytest.mark.more
        )
        for place, call in enumerate(mlx_attention.CALLS)
    ],
)
def test_mlx_s_kernels_have_the_registers_that_the_proxy_was_calibrated_with(attention):
    assert abs(measured(attention.call()).registers - attention.registers) <= 5


def beyond_of(use, budget, most=None):
    """Returns the exceeded limits of a use's calls."""
    return [
        f"{call.template}: {text}"
        for call in use.calls(most)
        for text in beyond(call, budget, use.bits)
    ]


def test_the_table_has_a_row_of_each_use():
    assert list(proxy_page.written()) == list(map(str, USES))


@pytest.mark.parametrize("use", OF_EACH_KIND)
def test_a_kernel_takes_no_more_than_the_table_says(use):
    assert beyond_of(use, proxy_page.written()[str(use)].budget, most=1) == []


@pytest.mark.slow
def test_the_tables_are_what_kernels_take_now():
    page = proxy_page.PAGE.read_text(encoding="utf-8")
    assert proxy_page.rewritten(page) == page, f"run python -m {proxy_page.__name__}"


@pytest.mark.slow
def test_kernels_that_decode_keep_to_the_budget_of_decode_where_they_are_held_to_it():
    over = defaultdict(list)
    for use in USES:
        if use.what.startswith("decode"):
            (call,) = use.calls(1)
            budget = decode_budget(use.size, use.bits, 8 * call.template["ROW_GROUPS"])
            over[call.kernel] += beyond_of(use, budget)
    for name, found in over.items():
        if name in HELD:
            assert found == []
        else:
            assert found, f"{name} keeps to the budget: name it in HELD"
