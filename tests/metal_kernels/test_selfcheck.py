# SPDX-License-Identifier: Apache-2.0
"""The self-check passes correct kernels, and names a wrong one."""

import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import metal_interpreter
import mlx.core as mx
import numpy as np
import pytest
from pairs import valuewise

from metal_kernels import kernel
from metal_kernels.kv_write import RotationKind
from metal_kernels.paged_attention import AttentionShape, Tiles, trials
from metal_kernels.selfcheck import (
    KERNELS,
    Case,
    Check,
    Outcome,
    StateKind,
    check_kernel,
    checks,
    usable,
    works,
)
from metal_kernels.selfcheck.__main__ import main
from metal_kernels.selfcheck.play import play
from metal_kernels.selfcheck.steps import steps
from tests.metal_kernels.doubles import Recorder
from tests.metal_kernels.selfchecks import check, in_use
from vllm_metal.settings.extras import INTERPRETER

MORE, SLOW = pytest.mark.more, pytest.mark.slow
F16, BF16, F32, FP8, INT8 = mx.float16, mx.bfloat16, mx.float32, mx.uint8, mx.int8
SMALL = AttentionShape(4, 2, 64, 64)
PLAIN = Case(SMALL, F32, F32, 16)
STEPS = 8
OF_STATES = ("convolution", "recurrence")
ROTATED = [
    Case(SMALL, F32, F32, 16, kernels=("rotation",), rotation=RotationKind(64)),
    Case(SMALL, BF16, FP8, 16, kernels=("rotation",), rotation=RotationKind(32, 0, True, True)),
    Case(
        *(AttentionShape(16, 1, 576, 512), F16, INT8, 16),
        kernels=("rotation",),
        rotation=RotationKind(64, 512, True),
    ),
]
BIASED = ("kv_write", "decode", "prefill", "reduce")
RECURRENT = replace(
    PLAIN, kernels=OF_STATES, states=StateKind((2, 32, 4, 6), delta=True, channels=96)
)


def wrapped(around):
    """Makes a compiler whose kernels run through `around(name, run, call)`."""

    def compiler(name, **text):
        run = metal_interpreter.metal_kernel(name=name, **text)
        return lambda **call: around(name, run, call)

    return compiler


@pytest.mark.parametrize(
    "case",
    [
        PLAIN,
        pytest.param(Case(SMALL, F16, F16, 32, sinks=True), marks=SLOW),
        Case(SMALL, BF16, FP8, 16, window=40, kernels=("kv_write", "kv_gather", "decode")),
        pytest.param(Case(AttentionShape(14, 2, 64, 64), BF16, FP8, 16, window=40), marks=MORE),
        pytest.param(
            Case(AttentionShape(2, 2, 80, 80), F32, INT8, 16, window=300, softcap=30.0), marks=MORE
        ),
        pytest.param(Case(AttentionShape(16, 1, 576, 512), BF16, BF16, 16), marks=MORE),
        pytest.param(Case(AttentionShape(4, 2, 64, 64), F16, F16, 16, extent=40, kernels=BIASED)),
    ],
    ids=str,
)
def test_kernels_that_are_right_pass(case):
    with kernel.using(metal_interpreter.metal_kernel):
        outcomes = check(case, STEPS)
    assert [outcome.check for outcome in outcomes] == checks(case)
    for outcome in outcomes:
        assert outcome.ok, outcome
        assert outcome.largest_error <= outcome.tolerance
    # Rounding shows: something was compared with something else.
    assert outcomes[-1].largest_error > 0


@pytest.mark.parametrize(
    "case",
    [pytest.param(ROTATED[0], marks=SLOW), ROTATED[1], pytest.param(ROTATED[2], marks=MORE)],
    ids=str,
)
def test_rotations_that_are_right_pass(case):
    with kernel.using(metal_interpreter.metal_kernel):
        (outcome,) = check(case, STEPS)
    assert outcome.ok, outcome
    assert outcome.tolerance > 0


def test_only_what_attention_of_a_shape_launches_is_checked():
    of_attention = [name for name in KERNELS if name not in (*OF_STATES, "rotation")]
    assert in_use(PLAIN) == of_attention
    assert in_use(replace(PLAIN, window=100)) == [n for n in of_attention if n != "reduce"]
    many = replace(PLAIN, shape=AttentionShape(128, 2, 64, 64))  # 64 rows to a token
    assert "decode" not in in_use(many)
    assert in_use(replace(PLAIN, kernels=("decode", "kv_write"))) == ["kv_write", "decode"]
    both = replace(PLAIN, states=RECURRENT.states, rotation=RotationKind(64))
    assert in_use(both) == list(KERNELS)
    convolution_alone = replace(PLAIN, states=StateKind(channels=8))
    assert in_use(convolution_alone) == [*of_attention, "convolution"]


def changed_template(call, **changes):
    return call | {"template": [(name, changes.get(name, v)) for name, v in call["template"]]}


#: Wrong rotations: of fewer elements, by other pairs, by other positions, of queries
#: alone or of keys alone.
WRONG_ROTATIONS = {
    "fewer": lambda run, call: run(**changed_template(call, DIMS=32)),
    "pairs": lambda run, call: run(**changed_template(call, TRADITIONAL=True)),
    "positions": lambda run, call: run(**change_inputs(call, _9=lambda places: places + 1)),
    "queries": lambda run, call: [run(**call)[0] * 1.01, run(**call)[1]],
}


@pytest.mark.parametrize(
    "wrong",
    [name if name == "positions" else pytest.param(name, marks=MORE) for name in WRONG_ROTATIONS],
)
def test_a_rotation_that_is_wrong_is_named(wrong):
    def around(name, run, call):
        return WRONG_ROTATIONS[wrong](run, call)

    with kernel.using(wrapped(around)):
        (outcome,) = check(ROTATED[0], STEPS)
    assert (outcome.kernel, outcome.ok) == ("rotation", False)
    assert outcome.largest_error > 3 * outcome.tolerance


def test_a_rotation_keeps_its_form_as_json():
    for case in ROTATED:
        assert Case.from_json(json.loads(json.dumps(case.to_json()))) == case
        assert "rotated by" in str(case)


@pytest.mark.parametrize(
    ("part", "named"), [({"window": 9}, "window 9"), ({"softcap": 2.5}, "soft cap 2.5")]
)
def test_a_case_names_what_sets_it_apart(part, named):
    assert str(replace(PLAIN, **part)) == f"{PLAIN}, {named}"


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"),
    [
        (32, 32, 128),
        pytest.param(40, 40, 128, marks=SLOW),
        pytest.param(32, 32, 64, marks=SLOW),
        pytest.param(64, 32, 64, marks=SLOW),
        pytest.param(8, 8, 256, marks=MORE),
        pytest.param(32, 8, 128, marks=SLOW),
    ],
)
def test_what_splits_contexts_is_checked_in_parts(heads, kv_heads, size):
    """Otherwise the first long context would launch unchecked kernels."""
    case, recorder = replace(PLAIN, shape=AttentionShape(heads, kv_heads, size, size)), Recorder()
    tiles = Tiles.for_layer(case.shape)
    with kernel.using(recorder.metal_kernel):
        play(case, Check("reduce"), steps(case, "reduce", 40), tiles)
    templates = [(run.kernel, dict(run.template)) for run in recorder.pipelines]
    in_parts = {
        (name, 8 * given["ROW_GROUPS"]) for name, given in templates if given.get("PARTIAL")
    }
    launched = {
        ("decode" if dispatch.decode else "prefill", dispatch.rows)
        for made in trials(case.shape, None, tiles)
        for dispatch in made.dispatches
        if dispatch.num_splits > 1
    }
    assert launched and launched <= in_parts


def change_inputs(call, **changes):
    inputs = list(call["inputs"])
    for place, change in changes.items():
        inputs[int(place[1:])] = change(inputs[int(place[1:])])
    return call | {"inputs": inputs}


WRONG_INPUTS = {
    "kv_write": {"_2": lambda slots: mx.where(slots >= 0, slots ^ 1, slots)},
    "kv_gather": {"_2": lambda table: table[::-1]},
    "kv_blocks": {"_1": lambda sources: sources[::-1]},
    "read_states": {"_2": lambda blocks: blocks[::-1]},
    "write_states": {"_2": lambda blocks: blocks[::-1]},
}
#: Kernels of a check of another name.
CHECKED_AS = {"read_states": "kv_states", "write_states": "kv_states"}
NOT_ALONE = ("graph", "gathered", "kv_states", "rotation", *OF_STATES)
ALONE = [name for name in KERNELS if name not in NOT_ALONE]


@pytest.mark.parametrize(
    "wrong",
    [
        name if name in ("decode", "kv_gather", "read_states") else pytest.param(name, marks=MORE)
        for name in (*ALONE, *CHECKED_AS)
    ],
)
def test_a_kernel_that_is_wrong_is_named(wrong):
    def around(name, run, call):
        if name != wrong:
            return run(**call)
        if name in WRONG_INPUTS:
            return run(**change_inputs(call, **WRONG_INPUTS[name]))
        out, *others = run(**call)
        out[..., 1, 63] += 0.01  # one head, one element
        return [out, *others]

    with kernel.using(wrapped(around)):
        failed = [outcome for outcome in check(PLAIN, STEPS) if not outcome.ok]
    named = CHECKED_AS.get(wrong, wrong)
    assert {outcome.kernel for outcome in failed} == {named}  # and nothing that leans on it
    assert failed[0].largest_error > failed[0].tolerance
    assert "expected" in failed[0].detail
    if wrong in ("decode", "prefill", "reduce"):
        assert "head 1, element 63" in failed[0].detail


def test_a_beginning_that_is_shared_wrongly_is_found():
    """The join's check finds it, and turns off splits and shared prefixes."""

    def exchanged(requests):  # the queries of the listed rows
        return mx.concatenate([requests[::-1, :1], requests[:, 1:]], axis=1)

    def around(name, run, call):
        listed = name == "decode" and int(call["inputs"][8][3]) == 1
        return run(**(change_inputs(call, _6=exchanged) if listed else call))

    case = replace(PLAIN, kernels=("kv_write", "decode", "reduce"))
    with kernel.using(wrapped(around)):
        outcomes = check(case, STEPS)
    assert [outcome.kernel for outcome in outcomes if not outcome.ok] == ["reduce"]
    assert not usable(case, outcomes).split


@pytest.mark.parametrize(
    "case",
    [
        RECURRENT,
        pytest.param(
            Case(  # latent attention beside it; a state of several blocks of the pool
                AttentionShape(16, 1, 576, 512),
                BF16,
                BF16,
                16,
                kernels=OF_STATES,
                states=StateKind((1, 16, 700, 1), False, "rates", BF16, channels=40),
            ),
            marks=MORE,
        ),
        pytest.param(
            Case(
                SMALL,
                F16,
                INT8,
                16,
                kernels=OF_STATES,
                states=StateKind((2, 9, 4, 5), True, "keys"),
            ),
            marks=MORE,
        ),
    ],
    ids=str,
)
def test_kernels_of_states_that_are_right_pass(case):
    with kernel.using(metal_interpreter.metal_kernel):
        outcomes = check(case, STEPS)
    assert [outcome.kernel for outcome in outcomes] == in_use(case)
    for outcome in outcomes:
        assert outcome.ok and 0 < outcome.largest_error <= outcome.tolerance, outcome
        assert Outcome.from_json(json.loads(json.dumps(outcome.to_json()))) == outcome


@valuewise(fault=["output", "state", "kept rows"], wrong=OF_STATES)
def test_a_kernel_of_states_that_is_wrong_is_named(wrong, fault):
    def around(name, run, call):
        if name != wrong:
            return run(**call)
        if fault == "state":  # written to the block before
            table = call["inputs"][0] - mx.array([0] * 7 + [1, 0], mx.int32)
            return run(**call | {"inputs": [table, *call["inputs"][1:]]})
        out, kept, *others = run(**call)
        if fault == "output":
            out[..., 1] += 0.01
        return [out, kept * (1.01 if fault == "kept rows" else 1), *others]

    with kernel.using(wrapped(around)):
        failed = [outcome for outcome in check(RECURRENT, STEPS) if not outcome.ok]
    assert [outcome.kernel for outcome in failed] == [wrong]
    assert failed[0].largest_error > failed[0].tolerance
    assert "expected" in failed[0].detail


@pytest.mark.parametrize(
    ("spoiled", "said"),
    [
        (lambda forward: forward, None),
        (lambda forward: lambda given: [array + 0.01 for array in forward(given)], "expected"),
        pytest.param(
            lambda forward: lambda given: forward([*given[:1], *given[2:], given[1]]),
            "Error",
            marks=MORE,
        ),
        pytest.param(mx.compile, "Error", marks=MORE),  # the interpreter's kernels see no values
    ],
)
def test_a_graph_that_is_wrong_costs_graphs_alone(spoiled, said, monkeypatch):
    monkeypatch.setattr(kernel, "in_graphs", lambda: True)
    monkeypatch.setattr(mx, "compile", spoiled)
    with kernel.using(metal_interpreter.metal_kernel):
        found = check(PLAIN, STEPS)
    failed = [outcome for outcome in found if not outcome.ok]
    assert [outcome.kernel for outcome in failed] == ([] if said is None else ["graph"])
    assert all(said in outcome.detail for outcome in failed)


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param("causal from the start", marks=MORE),
        "without a window",
        pytest.param("sinks", marks=MORE),
        pytest.param("NaN", marks=SLOW),
    ],
)
def test_attention_of_mlx_that_is_wrong_costs_itself(wrong, monkeypatch):
    attend = mx.fast.scaled_dot_product_attention

    def spoiled(queries, keys, values, *, mask, sinks, **options):
        if wrong == "NaN":
            values = values * mx.nan
        elif wrong == "sinks":
            sinks = None
        elif isinstance(mask, mx.array):
            mask = "causal" if wrong == "without a window" else mask
        elif wrong == "causal from the start":
            mask = mx.arange(keys.shape[2]) <= mx.arange(queries.shape[2])[:, None]
        return attend(queries, keys, values, mask=mask, sinks=sinks, **options)

    window = None if wrong == "causal from the start" else 512
    kernels = ("kv_write", "kv_gather", "gathered")
    case = replace(PLAIN, window=window, sinks=True, kernels=kernels)
    with kernel.using(metal_interpreter.metal_kernel):
        assert all(outcome.ok for outcome in check(case, STEPS))
        monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", spoiled)
        failed = [outcome for outcome in check(case, STEPS) if not outcome.ok]
    assert [outcome.kernel for outcome in failed] == ["gathered"]
    assert "expected" in failed[0].detail


def test_more_threads_than_a_pipeline_takes_cost_themselves():
    """MLX raises where Apple's compiler needs more registers than the proxy."""
    case = replace(
        PLAIN, shape=AttentionShape(4, 1, 128, 128), kernels=("kv_write", "decode", "reduce")
    )

    def around(name, run, call):
        if (threads := call["threadgroup"][0]) > 384:
            raise ValueError(f"Thread group size ({threads}) is greater than the maximum")
        return run(**call)

    with kernel.using(wrapped(around)):
        outcomes = check(case, STEPS)
    (failed,) = [outcome for outcome in outcomes if not outcome.ok]
    assert failed.check == Check("decode", 8, True)
    assert str(failed.check) == "decode of 8 rows in 512 threads"
    assert Outcome.from_json(json.loads(json.dumps(failed.to_json()))) == failed
    whole = Tiles.for_layer(case.shape)
    assert whole.wide
    assert usable(case, outcomes) == replace(whole, prefill=(), wide=False)


def test_a_tile_that_is_wrong_costs_itself():
    case = replace(PLAIN, kernels=("kv_write", "decode", "prefill", "reduce"))

    def around(name, run, call):
        out, *others = run(**call)
        if dict(call["template"]).get("ROW_GROUPS") == 2:  # of eight rows each
            out[..., 1, 63] += 0.01
        return [out, *others]

    with kernel.using(wrapped(around)):
        outcomes = check(case, STEPS)
    assert [outcome.check for outcome in outcomes if not outcome.ok] == [Check("decode", 16)]
    whole = Tiles.for_layer(case.shape)
    assert 16 in whole.decode
    kept = tuple(rows for rows in whole.decode if rows != 16)
    assert usable(case, outcomes) == Tiles(kept, whole.prefill, split=True)
    assert usable(case, []) == Tiles((), (), split=False)  # what was not checked


def test_nothing_is_checked_after_a_write_that_is_lost():
    def around(name, run, call):
        if name != "kv_write":
            return run(**call)
        return [mx.zeros(shape, mx.uint32) for shape in call["output_shapes"]]

    with kernel.using(wrapped(around)):
        (outcome,) = check(PLAIN, STEPS)
    assert (outcome.kernel, outcome.ok) == ("kv_write", False)


def test_a_read_before_the_write_it_needs_shows():
    pending = []

    def around(name, run, call):
        if name == "kv_write":
            pending.append((run, call))
            return [mx.zeros(shape, mx.uint32) for shape in call["output_shapes"]]
        result = run(**call)
        for late, its_call in pending:
            late(**its_call)
        pending.clear()
        return result

    with kernel.using(wrapped(around)):
        assert not check_kernel(PLAIN, Check("decode", 8), STEPS).ok


def test_a_write_before_the_read_it_must_wait_for_shows():
    pending, reads = [], 0

    def finish():
        for late, its_call, promised in pending:
            for target, result in zip(promised, late(**its_call), strict=True):
                np.array(target, copy=False)[:] = np.array(result)
        pending.clear()

    def around(name, run, call):
        nonlocal reads
        if name == "kv_write":
            fence = run(**call)
            finish()
            return fence
        reads += 1
        if reads == STEPS:  # nothing is written after it
            return run(**call)
        kinds = zip(call["output_shapes"], call["output_dtypes"], strict=True)
        promised = [mx.zeros(shape, dtype) for shape, dtype in kinds]
        mx.eval(promised)
        pending.append((run, call, promised))
        return promised

    with kernel.using(wrapped(around)):
        outcome = check_kernel(PLAIN, Check("decode", 8), STEPS)
    assert not outcome.ok
    assert outcome.largest_error > 100 * outcome.tolerance


def test_a_text_that_does_not_compile_gives_the_compilers_line():
    def compiler(name, source, **text):
        planted = "int planted = not_declared;\n" if name == "kv_gather" else ""
        return metal_interpreter.metal_kernel(name=name, source=planted + source, **text)

    with kernel.using(compiler):
        outcomes = {outcome.kernel: outcome for outcome in check(PLAIN, STEPS)}
    assert [name for name, outcome in outcomes.items() if not outcome.ok] == ["kv_gather"]
    assert "not_declared" in outcomes["kv_gather"].detail
    assert "\n" not in outcomes["kv_gather"].detail


def test_a_layer_that_is_not_supported_fails_with_the_reason():
    with kernel.using(metal_interpreter.metal_kernel):
        outcome = check_kernel(replace(PLAIN, block_size=48), Check("decode", 8), STEPS)
    assert not outcome.ok
    assert "48" in outcome.detail


def test_the_process_says_what_it_runs_and_how_it_went():
    cases = [replace(PLAIN, kernels=("kv_write", "kv_gather")), replace(PLAIN, block_size=32)]
    cases[1] = replace(cases[1], kernels=("kv_write",))
    command = [
        sys.executable,
        "-m",
        "metal_kernels.selfcheck",
        "--compiler",
        INTERPRETER,
        "--steps",
        "2",
    ]
    lines = subprocess.run(
        command,
        input=json.dumps({"cases": [case.to_json() for case in cases], "done": []}),
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    ).stdout.splitlines()
    messages = [json.loads(line) for line in lines]
    assert messages[::2] == [
        {"case": 0, "running": "kv_write", "rows": None, "wide": False},
        {"case": 0, "running": "kv_gather", "rows": None, "wide": False},
        {"case": 1, "running": "kv_write", "rows": None, "wide": False},
    ]
    outcomes = [Outcome.from_json(message) for message in messages[1::2]]
    assert all(outcome.ok for outcome in outcomes)
    assert [outcome.case for outcome in outcomes] == [cases[0], cases[0], cases[1]]


def test_interpreted_checks_compute_on_the_cpu(monkeypatch):
    """MLX would otherwise take a GPU."""
    chosen = []
    monkeypatch.setattr(mx, "set_default_device", chosen.append)
    monkeypatch.setattr(kernel, "use", lambda compiler: None)
    monkeypatch.setattr(sys, "argv", ["selfcheck", "--compiler", INTERPRETER])
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps({"cases": [], "done": []})))
    main()
    assert chosen == [mx.cpu]


@pytest.mark.parametrize(
    ("case", "row_bytes"),
    [(PLAIN, 64 * 4), pytest.param(Case(SMALL, F16, FP8, 16), 66, marks=MORE)],
)
def test_every_kernel_is_timed(case, row_bytes):
    """A row's bytes are its elements, and a scale where they are codes."""
    with kernel.using(metal_interpreter.metal_kernel):
        small = works(case, contexts=(64, 600))
        assert all(work.seconds() > 0 for work in small)
    assert len({work.name for work in small}) == len(small)
    decode = next(work for work in small if "decode 1 of 600" in work.name)
    assert decode.moved == 600 * 2 * 2 * row_bytes  # K and V of two heads
