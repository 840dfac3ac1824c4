# SPDX-License-Identifier: Apache-2.0
"""Random steps on states in blocks equal a token-by-token recurrence."""

import metal_interpreter
import mlx.core as mx
import numpy as np
import pytest
from pairs import valuewise

from metal_kernels import kernel
from vllm_metal.engine.kv_cache.kernels import KERNELS
from vllm_metal.engine.kv_cache.layer_cache import KVShape
from vllm_metal.engine.kv_cache.layer_state import StepLayout
from vllm_metal.engine.kv_cache.scatter import SCATTER
from vllm_metal.engine.recurrent.recurrent_state import StateFormat
from vllm_metal.engine.recurrent.run_plan import RunPlan
from vllm_metal.engine.recurrent.run_state import RunState

BLOCK, NUM_BLOCKS, NUM_REQS = 8, 64, 5
MODULUS = 8191.0  # so that float32 has all numbers
FORM = StateFormat(((3, 5), (2,)), (mx.float32, mx.bfloat16))
MEMORIES = {
    "alone": lambda of: of.allocate_states(NUM_BLOCKS, FORM.nbytes),
    "float32": lambda of: of.allocate(NUM_BLOCKS, 16, KVShape(2, 8, 8), mx.float32),
    "bfloat16": lambda of: of.allocate(NUM_BLOCKS, 48, KVShape(1, 16, 16), mx.bfloat16),
    "float16, in K and V": lambda of: of.allocate(NUM_BLOCKS, 16, KVShape(1, 2, 2), mx.float16),
    "codes": lambda of: of.allocate(NUM_BLOCKS, 16, KVShape(2, 16, 16), mx.int8),
}


@pytest.fixture(autouse=True)
def interpreted():
    with kernel.using(metal_interpreter.metal_kernel):
        yield


@pytest.fixture(params=[SCATTER, KERNELS])
def pool(request):
    """A pool class."""
    return request.param


def following(states, x):
    """Returns the state parts after [n] numbers."""
    number, count = states
    return [(number * 3 + x[:, None, None]) % MODULUS, (count + 1) % 128]


def compute_on(values):
    """A token-by-token layer over [T] numbers; returns the state after each."""

    def compute(rows, states):
        out = []
        for column in range(rows.shape[1]):
            states = following(states, values[rows[:, column]])
            out.append(states[0][:, 0, 0])
        return [mx.stack(out, axis=1)[..., None]], states

    return compute


class Text:
    """A request, and its token-by-token recurrence."""

    def __init__(self, rng):
        self.rng, self.tokens, self.computed = rng, rng.integers(0, 100, 3000).tolist(), 0

    def expected(self, start, values):
        """Computes with integers that are exact in float32."""
        number, out = 0, []
        for value in [*self.tokens[:start], *values]:
            number = (number * 3 + value) % int(MODULUS)
            out.append(float(number))
        return out[start:]


@valuewise(memory=list(MEMORIES), backend=[KERNELS, SCATTER])
def test_random_steps_with_drafts_equal_the_recurrence(memory, backend):
    rng = np.random.default_rng(3)
    state = RunState(MEMORIES[memory](backend), FORM)
    texts = [Text(rng) for _ in range(NUM_REQS)]
    tables = np.zeros((NUM_REQS, 40), np.int32)
    free = rng.permutation(np.arange(1, NUM_BLOCKS)).tolist()
    for step in range(30):
        who = np.flatnonzero(rng.integers(0, 2, NUM_REQS))
        if not len(who):
            continue
        drafts = rng.integers(0, 4, len(who)) if step % 2 else np.zeros(len(who), int)
        counts = 1 + drafts + rng.integers(0, 9, len(who)) * rng.integers(0, 2, len(who))
        begins = np.array([texts[index].computed for index in who])
        if (begins + counts).max() > 40 * BLOCK:
            break
        right = [int(rng.integers(0, n + 1)) for n in drafts]
        values = []
        for index, begin, count, n, accepted in zip(
            who, begins, counts, drafts, right, strict=True
        ):
            text = texts[index]
            of_request = text.tokens[begin : begin + count]
            of_request[count - n + accepted :] = [
                value + 1 for value in of_request[count - n + accepted :]
            ]
            values.append(of_request)
            for block in range(begin // BLOCK, (begin + count - 1) // BLOCK + 1):
                if not tables[index, block]:
                    tables[index, block] = free.pop()
            for block in range(max(begin - 1, 0) // BLOCK):  # no longer needed: for others
                if tables[index, block]:
                    free.insert(0, int(tables[index, block]))
                    tables[index, block] = 0
        bounds = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        layout = StepLayout(
            bounds,
            (begins + counts).astype(np.int32),
            tables[who],
            np.zeros(bounds[-1], np.int32),
            BLOCK,
            num_drafts_np=drafts.astype(np.int32),
        )
        state.begin_step()
        rows = mx.array(np.concatenate(values).astype(np.float32))
        (found,) = state.run(RunPlan.from_layout(layout), compute_on(rows))
        found = np.array(found)[:, 0, 0]
        for place, (index, begin) in enumerate(zip(who, begins, strict=True)):
            expected = texts[index].expected(begin, values[place])
            assert found[bounds[place] : bounds[place + 1]].tolist() == expected
            texts[index].computed += counts[place] - drafts[place] + right[place]
        state.restore(bounds[1:] - 1 - drafts + right)
    assert max(text.computed for text in texts) > 4 * BLOCK


def test_bits_come_back_whatever_they_stand_for():
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 2**32, (4, 15), np.uint32)
    parts = [
        mx.array(codes).view(mx.float32).reshape(4, 3, 5),  # NaN among them
        mx.array(rng.integers(0, 2**16, (4, 2), np.uint16)).view(mx.bfloat16),
    ]
    for size in (1, 2, 4):
        number, count = FORM.from_bits(FORM.to_bits(parts, size))
        assert number.reshape(4, -1).view(mx.uint32).tolist() == codes.tolist()
        assert count.view(mx.uint16).tolist() == parts[1].view(mx.uint16).tolist()


def test_numbers_of_a_span():
    assert FORM.nbytes == 80
    assert FORM.numbers(0, 80) == ((mx.float32, 64), (mx.bfloat16, 16))
    assert FORM.numbers(0, 32) == ((mx.float32, 32),)
    assert FORM.numbers(32, 48) == ((mx.float32, 32), (mx.bfloat16, 16))


def test_a_block_without_room_is_refused():
    with pytest.raises(ValueError, match="32 bytes has no room for a state of 80"):
        RunState(SCATTER.allocate(4, 16, KVShape(1, 1, 1), mx.int8), FORM)


def test_a_block_of_states_is_a_page_of_their_numbers():
    shape = KVShape(1, 4, 4)
    host = SCATTER.allocate(NUM_BLOCKS, 16, shape, mx.float16)  # 128 bytes of K: V is not used
    state = RunState(host, FORM)
    assert [array is host.keys.elements for array in state.page_arrays] == [True]
    assert state.page_numbers == [((mx.float32, 64), (mx.bfloat16, 16))]
    assert state.storage is host  # which looks after them with K and V


@pytest.mark.parametrize("memory", ["alone", "float32"])
def test_whole_blocks_are_the_storage_s_to_look_after(memory, pool):
    state = RunState(MEMORIES[memory](pool), FORM)
    array = state.page_arrays[0]
    array[0, 3] = 5.0
    mx.eval(array)
    state.storage.copy_blocks(np.array([3]), np.array([4]))
    state.storage.clear_blocks(np.array([3]))
    state.wait_for_device()
    assert np.array(state.page_arrays[0])[0, 2:5, 0, 0].tolist() == [0.0, 0.0, 5.0]


def test_a_long_prompt_leaves_its_state_and_nothing_else(pool):
    """Also where the module slices the state from all its inputs, like a convolution."""
    length, width = 4096, 64
    form = StateFormat(((3, width),), (mx.float32,))
    state = RunState(pool.allocate_states(8, form.nbytes), form)
    inputs = mx.array(np.random.default_rng(1).normal(size=(length, width)).astype(np.float32))
    mx.eval(inputs, state.page_arrays)

    def convolve(rows, states):
        padded = mx.concatenate([states[0], inputs[rows]], axis=1)
        return [padded[:, 3:].sum(-1, keepdims=True)], [padded[:, -3:]]

    table = np.zeros((1, length // 16), np.int32)
    table[0, -1] = 5
    bounds = np.array([0, length], np.int32)
    layout = StepLayout(bounds, bounds[1:], table, np.zeros(length, np.int32), 16)
    mx.synchronize()
    before = mx.get_active_memory()
    (found,) = state.run(RunPlan.from_layout(layout), convolve)
    mx.eval(found)
    mx.synchronize()
    assert mx.get_active_memory() - before < found.nbytes + inputs.nbytes / 4
    state.wait_for_device()
    (last,) = StateFormat.from_bits(form, state.page_arrays[0][0, 5].view(mx.uint32))
    np.testing.assert_array_equal(np.array(last)[0], np.array(inputs)[-3:])
