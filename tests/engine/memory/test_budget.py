# SPDX-License-Identifier: Apache-2.0
"""The memory sum over machines, models and flags; its advice works."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as of_examples
from hypothesis import strategies as st

from metal_kernels.layout import stable
from vllm_metal.engine.memory.advice import BudgetError, changes, check
from vllm_metal.engine.memory.budget import (
    GIB,
    AskedPool,
    Measured,
    Most,
    Request,
    Settings,
    StepStates,
    budget_of,
    fits,
    longest,
    margin,
    most_drafts,
    pool_bytes,
    set_aside_for_states,
)

MIB = 2**20
#: An example is a dozen drawn numbers, 40 ms.
DEAR = of_examples(max_examples=20)
NEEDS = (
    *("weights", "draft_weights", "forward", "attention"),
    *("sampling", "logits", "counts", "cache", "transfers", "adapters"),
)


@st.composite
def states(draw):
    """Draws states: from a small convolution to 36 layers of 2 MiB with their inputs."""
    return StepStates(draw(st.integers(0, 72 * MIB)), draw(st.integers(0, 72 * MIB)))


@st.composite
def machines(draw):
    """Draws a Mac with 8 to 512 GB, two thirds to three quarters recommended, and a model."""
    ram = draw(st.integers(8, 512)) * GIB
    total = int(ram * draw(st.floats(0.66, 0.75)))
    held = draw(st.integers(0, total // 4))
    return Measured(
        source="working set",
        total=total,
        other_engines=held,
        in_use=held + draw(st.integers(0, total // 2)),
        weights=draw(st.integers(0, int(1.2 * total))),
        draft_weights=draw(st.integers(0, total // 8)),
        adapters=draw(st.just(0) | st.integers(0, total // 8)),
        forward=draw(st.integers(0, total // 4)),
        attention=draw(st.integers(0, total // 8)),
        sampling=draw(st.integers(0, total // 8)),
        logits=draw(st.integers(0, total // 8)),
        counts=draw(st.integers(0, total // 16)),
        cache=draw(st.integers(0, total // 64)),
        transfers=draw(st.just(0) | st.integers(0, total // 16)),
        states=draw(st.none() | states()),
    )


@st.composite
def flags(draw):
    asked = None
    if draw(st.integers(0, 3)) == 0:
        unit = draw(st.sampled_from([1, 16 * 1024, 2 * MIB]))
        count = draw(st.integers(1, 256 * GIB // unit))
        asked = AskedPool("--kv-cache-memory-bytes" if unit == 1 else "--blocks", count, unit)
    return Settings(
        utilization=draw(st.floats(0.01, 1.0)),
        max_num_batched_tokens=draw(st.integers(64, 16384)),
        max_num_seqs=draw(st.integers(1, 1024)),
        max_model_len=draw(st.integers(1, 1_000_000)),
        fitted=draw(st.booleans()),
        most=draw(st.none() | st.just(Most(4 * GIB, "on a CPU"))),
        asked=asked,
        num_drafts=draw(st.integers(0, 16)),
        request_bytes=draw(st.integers(1, 64 * MIB)),
    )


@st.composite
def requests(draw):
    """Draws blocks of 16 tokens, with vLLM's null block."""
    block = draw(st.integers(1024, 16 * MIB))
    return Request(
        lambda tokens: (-(-tokens // 16) + 1) * block,
        draw(st.none() | st.floats(0.25, 0.6)),
    )


@given(machines(), flags(), requests())
@DEAR
def test_a_pool_holds_a_request_and_leaves_the_margin_or_there_is_an_error(machine, flag, request):
    try:
        budget = check(machine, flag, request)
    except BudgetError:
        assert not fits(machine, flag, request)
        return
    pool = pool_bytes(machine, flag)
    assert pool >= request.needed(flag.least_context)
    used = machine.other_engines + machine.weights + machine.draft_weights + pool
    used += machine.transfers + machine.adapters
    if flag.asked is None:
        assert pool == budget.left == sum(budget.as_json().values())
        sampling = machine.sampling + machine.logits
        used += max(machine.forward + machine.attention, sampling) + machine.counts + machine.cache
        used += set_aside_for_states(machine, flag, pool)
        assert used - machine.other_engines <= int(machine.total * flag.utilization)
    assert used <= machine.total - margin(machine.total)


@given(st.integers(1, 1024))
def test_the_margin_is_never_less_than_half_a_gibibyte_and_costs_nothing_by_default(gigabytes):
    total = gigabytes * GIB
    assert margin(total) >= GIB // 2
    if total >= 8 * GIB:
        assert margin(total) <= total * (1 - 0.92)
        assert margin(total) >= total / 17


@given(machines(), flags(), st.data())
@DEAR
def test_the_pool_never_shrinks_where_less_is_needed_or_more_is_there(machine, flag, data):
    flag = replace(flag, asked=None)
    better = {
        "total": st.integers(machine.total, 2 * machine.total),
        "other_engines": st.integers(0, machine.other_engines),
        "in_use": st.integers(0, machine.in_use),
        **{name: st.integers(0, getattr(machine, name)) for name in NEEDS},
    }
    name = data.draw(st.sampled_from(sorted(better)))
    improved = replace(machine, **{name: data.draw(better[name])})
    if machine.states is not None and data.draw(st.booleans()):
        request, draft = machine.states.request, machine.states.draft
        fewer = StepStates(data.draw(st.integers(0, request)), data.draw(st.integers(0, draft)))
        improved = replace(improved, states=data.draw(st.none() | st.just(fewer)))
    assert pool_bytes(improved, flag) >= pool_bytes(machine, flag)
    more = replace(flag, utilization=data.draw(st.floats(flag.utilization, 1.0)))
    assert pool_bytes(machine, more) >= pool_bytes(machine, flag)


@given(machines(), flags(), requests())
@DEAR
def test_what_is_advised_makes_it_fit(machine, flag, request):
    if fits(machine, flag, request):
        return
    for change in changes(machine, flag, request):
        check(change.measured, change.settings, change.request)


@given(machines(), flags(), requests())
@DEAR
def test_the_smallest_utilization_and_the_longest_length_are_advised(machine, flag, request):
    """Follows the message as a reader would."""
    flag = replace(flag, asked=None, fitted=False)
    if fits(machine, flag, request):
        return
    with pytest.raises(BudgetError) as raised:
        check(machine, flag, request)
    message = str(raised.value)
    if found := re.search(r"--gpu-memory-utilization ([\d.]+) or more", message):
        share = float(found[1])
        assert share > flag.utilization
        assert fits(machine, replace(flag, utilization=share), request)
        lower = round(share - 0.01, 2)
        assert lower <= flag.utilization or not fits(
            machine, replace(flag, utilization=lower), request
        )
    if found := re.search(r"--max-model-len (\d+) or less", message):
        tokens = int(found[1])
        assert tokens == longest(machine, flag, request) < flag.max_model_len
        assert fits(machine, replace(flag, max_model_len=tokens), request)
        assert not fits(machine, replace(flag, max_model_len=tokens + 1), request)


EIGHT_GB_MAC = Measured(
    source="working set that Metal recommends",
    total=int(5.33 * GIB),
    in_use=0,
    weights=int(3.68 * GIB),
    forward=GIB // 2,
    sampling=GIB // 16,
    logits=GIB // 16,
    cache=85 * MIB,
)
DEFAULTS = Settings(0.92, 2048, 256, 8192)
#: Qwen3-0.6B's K/V in bfloat16: 28 layers of 8 heads of 128, blocks of 16 tokens.
QWEN = Request(lambda tokens: (-(-tokens // 16) + 1) * 16 * 28 * 2 * 8 * 128 * 2, 0.51)


def test_an_error_shows_the_sum_and_three_changes_with_numbers():
    with pytest.raises(BudgetError) as raised:
        check(EIGHT_GB_MAC, DEFAULTS, QWEN)
    head, *rest = str(raised.value).splitlines()
    assert head == (
        "one request of --max-model-len 8192 needs 0.88 GiB of KV cache, but only 0.57 are "
        "available:"
    )
    *summands, result = [float(line.split()[-2]) for line in rest if line.endswith(" GiB")]
    assert sum(summands) == pytest.approx(result, abs=0.02)
    advice = [line for line in rest if line.startswith("  * ")]
    assert rest[-4:] == ["Any one of these makes it fit:", *advice]
    assert advice[0] == "  * --max-num-batched-tokens 512 or less (an estimate)"
    assert re.fullmatch(r"  \* --max-model-len \d{4} or less", advice[1])
    assert advice[2].startswith("  * --kv-cache-dtype fp8")


def test_where_no_one_setting_is_enough_several_are_advised():
    with pytest.raises(BudgetError, match=r"no memory is left for the KV cache") as raised:
        check(replace(EIGHT_GB_MAC, weights=int(4.3 * GIB)), DEFAULTS, QWEN)
    assert "--max-num-batched-tokens 1024 --max-num-seqs 128 --max-model-len" in str(raised.value)
    assert "a model whose weights take" in str(raised.value)


def test_where_others_hold_the_memory_the_way_out_names_them():
    """Closing them is enough, alone or with a shorter length."""
    taken = replace(EIGHT_GB_MAC, weights=2 * GIB, in_use=3 * GIB)
    with pytest.raises(BudgetError, match=r"close other programs: they hold 3.00 GiB, and \d"):
        check(taken, replace(DEFAULTS, max_model_len=4096), QWEN)
    with pytest.raises(BudgetError) as raised:
        check(replace(taken, weights=int(2.4 * GIB)), replace(DEFAULTS, max_model_len=10**6), QWEN)
    pattern = r"close other programs that hold ([\d.]+) GiB, and --max-model-len (\d+), together"
    freed, tokens = re.search(pattern, str(raised.value)).groups()
    fewer = replace(taken, weights=int(2.4 * GIB), in_use=3 * GIB - int(float(freed) * GIB))
    check(fewer, replace(DEFAULTS, max_model_len=int(tokens)), QWEN)


def test_zero_lines_are_left_out_of_the_table():
    table = budget_of(EIGHT_GB_MAC, DEFAULTS).table()
    assert "draft" not in table
    assert "other" not in table
    assert table.splitlines()[-1].split()[:3] == ["=", "KV", "pool"]


def test_staging_of_transfers_has_a_line_and_leaves_less_for_all_else():
    staged = replace(EIGHT_GB_MAC, transfers=GIB // 4)
    for asked, result in (
        (None, "KV pool"),
        (AskedPool("--blocks", 1, GIB // 4), "left for steps"),
    ):
        settings = replace(DEFAULTS, asked=asked)
        budget, without = budget_of(staged, settings), budget_of(EIGHT_GB_MAC, settings)
        assert budget.left == without.left - GIB // 4
        assert budget.result == result
        assert "- staging of K/V transfers" in budget.table() and "-0.25 GiB" in budget.table()
        assert "transfers" not in without.table()


def test_more_than_there_is_cannot_be_asked_for():
    asked = replace(DEFAULTS, asked=AskedPool("--kv-cache-memory-bytes", 2 * GIB, 1))
    with pytest.raises(BudgetError, match=r"--kv-cache-memory-bytes 2147483648") as raised:
        check(EIGHT_GB_MAC, asked, replace(QWEN, needed=lambda tokens: 1024))
    largest = int(re.search(r"--kv-cache-memory-bytes (\d+) or less", str(raised.value))[1])
    assert 0 < largest == pytest.approx((5.33 - 0.5 - 3.68) * GIB, abs=MIB)


def test_a_pool_asked_for_too_small_names_the_size_that_would_do():
    small = replace(EIGHT_GB_MAC, weights=GIB)
    asked = replace(DEFAULTS, asked=AskedPool("--num-gpu-blocks-override", 10, 16 * 28 * 4096))
    with pytest.raises(BudgetError, match=r"--num-gpu-blocks-override 513 or more"):
        check(small, asked, QWEN)


def test_a_cpus_pool_is_bounded_unless_asked_for():
    linux = replace(EIGHT_GB_MAC, total=64 * GIB, weights=GIB)
    settings = replace(DEFAULTS, most=Most(4 * GIB, "on a CPU"))
    assert budget_of(linux, settings).left == 4 * GIB
    with pytest.raises(BudgetError, match=r"--kv-cache-memory-bytes \d+"):
        check(linux, replace(settings, max_model_len=100_000), QWEN)


#: As in a step of Qwen3-Next with one state per draft: 36 layers of 2.1 MiB, and a block of each
#: of 4 groups.
STATES = StepStates(request=108 * MIB, draft=78 * MIB)
HYBRID = replace(DEFAULTS, num_drafts=2, request_bytes=4 * 25 * MIB)
LARGE_MAC = replace(EIGHT_GB_MAC, total=96 * GIB, weights=45 * GIB, states=STATES)


@given(st.integers(20, 120), st.integers(0, 8), st.integers(1, 256), st.none() | st.just(8 * GIB))
def test_the_pool_leaves_room_for_the_states_of_its_requests(gigabytes, drafts, requests, most):
    """Compares with trying every number of requests, one block per group."""
    machine = replace(LARGE_MAC, total=gigabytes * GIB, weights=gigabytes * GIB // 2)
    flag = replace(HYBRID, num_drafts=drafts, max_num_seqs=requests)
    flag = replace(flag, most=None if most is None else Most(most, "for the test"))
    left = budget_of(replace(machine, states=None), replace(flag, most=None)).left
    for_drafts = max(left // 8, drafts * STATES.draft)  # of one request at least
    by_hand = []
    for count in range(1, requests + 1):
        rows = min(count * drafts, flag.max_num_batched_tokens - count)
        rows = stable(rows) if rows else 0  # as arrays of drafts' inputs have them
        pool = left - count * STATES.request - min(rows * STATES.draft, for_drafts)
        # The pool has room for so many, and for no more.
        less_than = (count + 1) * flag.request_bytes if count < requests else pool + 1
        at_least = count * flag.request_bytes if count > 1 else 1
        pool = min(pool, less_than - 1, most or pool)
        by_hand += [pool] if pool >= at_least else []
    found = pool_bytes(machine, flag)
    assert found == max(by_hand) if by_hand else found <= 0
    if drafts:
        assert most_drafts(machine, flag) == for_drafts // STATES.draft >= drafts
    else:
        assert most_drafts(machine, flag) is None


def test_states_have_a_line_with_the_requests_that_they_are_of():
    table = budget_of(LARGE_MAC, replace(HYBRID, max_num_seqs=8)).table()
    taken = 8 * (108 + 2 * 78) * MIB / GIB
    assert re.search(rf"- states and drafts of 8 requests in a step +-{taken:.2f} GiB", table)


def test_fewer_drafts_are_advised_where_each_keeps_a_state():
    machine = replace(LARGE_MAC, total=50 * GIB, weights=40 * GIB)
    flag = replace(HYBRID, num_drafts=16, max_num_seqs=1)
    request = Request(lambda tokens: 9 * GIB // 2)
    assert not fits(machine, flag, request)
    advised = [change.advice for change in changes(machine, flag, request)]
    pattern = r"num_speculative_tokens (\d+) or less in --speculative-config"
    (drafts,) = [int(found[1]) for advice in advised if (found := re.fullmatch(pattern, advice))]
    assert fits(machine, replace(flag, num_drafts=drafts), request)
    assert not fits(machine, replace(flag, num_drafts=drafts + 1), request)
