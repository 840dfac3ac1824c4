# SPDX-License-Identifier: Apache-2.0
"""Random steps with drafts on states equal a token-by-token recurrence."""

from dataclasses import dataclass, field

import metal_interpreter
import mlx.core as mx
import numpy as np
import pytest

from metal_kernels import kernel
from metal_kernels.layout import PositionLag
from metal_kernels.sequences import RecurrenceInputs
from vllm_metal.engine.attention.recurrent_ops import Convolution, Recurrence, RecurrentOps
from vllm_metal.engine.kv_cache.kernels import KERNELS, KernelBackend
from vllm_metal.engine.kv_cache.layer_cache import KVShape
from vllm_metal.engine.kv_cache.layer_state import StepLayout
from vllm_metal.engine.kv_cache.scatter import SCATTER
from vllm_metal.engine.recurrent.recurrent_state import StateFormat
from vllm_metal.engine.recurrent.sequence_plan import SequenceScope
from vllm_metal.engine.recurrent.sequence_state import SequenceState

BLOCK, NUM_BLOCKS, NUM_REQS, WIDTH = 8, 90, 6, 40
TAPS, CHANNELS, HEADS, VALUE, KEY = 3, 16, 2, 4, 8
FORM = StateFormat(((TAPS - 1, CHANNELS), (HEADS, VALUE, KEY)), (mx.float32, mx.float32))
OPS = RecurrentOps(
    (Convolution(CHANNELS, TAPS, mx.float32, mx.float32, None),),
    Recurrence((1, KEY, HEADS, VALUE), mx.float32, mx.float32, decays=2, delta=True),
)
MEMORIES = {
    "alone": lambda of: of.allocate_states(NUM_BLOCKS, FORM.nbytes),
    "bfloat16": lambda of: of.allocate(NUM_BLOCKS, 48, KVShape(1, 16, 16), mx.bfloat16),
}
#: Daily cases are those that K and V share.
IN_MEMORIES = pytest.mark.parametrize(
    "memory", [pytest.param("alone", marks=pytest.mark.more), "bfloat16"]
)


class Weights:
    """Weights of a convolution that feeds keys and values of a gated delta rule."""

    def __init__(self, rng):
        self.taps = rng.normal(size=(CHANNELS, TAPS)).astype(np.float32)

    def module(self, inputs, call):
        """Maps [T] numbers of the rows to [T, HV * DV] results."""
        given = mx.array(np.stack([features(x) for x in inputs]).astype(np.float32))
        mixed = call.convolve(given, mx.array(self.taps), None)
        keys, values = mx.split(mixed, 2, axis=1)
        keys = keys / mx.linalg.norm(keys, axis=1, keepdims=True)
        rates = mx.array(np.stack([rate(x) for x in inputs]).astype(np.float32))
        found = RecurrenceInputs(
            keys[:, None], values.reshape(-1, HEADS, VALUE), rates, 1 - rates / 8
        )
        return call.recur(keys[:, None], found, delta=True).flatten(1)

    def play(self, text, begin, values):
        """The same of a text in float64, token by token: the results of its next numbers.

        The text keeps the state after each; of those that were wrong till it goes on from before.
        """
        before, state = text.states[begin]
        out = []
        for place, x in enumerate(values, begin + 1):
            window = np.concatenate([before, features(x)[None]])
            mixed, before = (window * self.taps.T).sum(0), window[1:]
            key, value = mixed[: CHANNELS // 2], mixed[CHANNELS // 2 :].reshape(HEADS, VALUE)
            key = key / np.linalg.norm(key)
            r = rate(x)[:, None]
            state = state * (1 - r / 8)[..., None]
            state = state + (r * (value - state @ key))[..., None] * key
            out.append((state @ key).ravel())
            text.states[place] = before, state
        return np.stack(out)


def features(x):
    return np.sin(x * np.arange(1, CHANNELS + 1) * 0.7 + np.arange(CHANNELS))


def rate(x):
    return 1 / (1 + np.exp(-np.cos(x * np.array([1.3, 2.1]))))


EMPTY = np.zeros((TAPS - 1, CHANNELS)), np.zeros((HEADS, VALUE, KEY))


@dataclass
class Text:
    """A request: its numbers, the computed count, and their expected states."""

    values: list[float]
    computed: int = 0
    #: The convolution's kept numbers and the state, by the count of numbers before.
    states: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=lambda: {0: EMPTY})


class Play:
    """Requests over one layer; blocks are assigned as in vLLM's "align" mode."""

    def __init__(self, memory, pool, lagging):
        self.rng = rng = np.random.default_rng(3)
        self.weights, self.lagging = Weights(rng), lagging
        self.state = SequenceState(MEMORIES[memory](pool), FORM, OPS.repeat)
        self.scope = SequenceScope(self.state.by_kernels, TAPS, self.state.long_prompt)
        self.texts = [self.text() for _ in range(NUM_REQS)]
        self.tables = np.zeros((NUM_REQS, WIDTH), np.int32)
        self.free = rng.permutation(np.arange(1, NUM_BLOCKS)).tolist()
        # Drafts that the newest step rejected, which the host has not read where it lags.
        self.rejected = np.zeros(NUM_REQS, np.int32)
        self.unread = None  # its rows, and of each request the last one that was accepted

    def text(self):
        return Text(self.rng.normal(size=3000).tolist())

    def leave(self, who):
        self.scope.kept.remove_request(who)
        self.free += [block for block in self.tables[who].tolist() if block]
        self.tables[who] = 0
        self.texts[who] = self.text()
        self.rejected[who] = 0

    def step(self, who, drafts, rows):
        """Runs a step and judges its drafts; the host hears of it at once, or one step later.

        Args:
            who: [R] requests.
            drafts: [R] drafts of each.
            rows: [R] rows of each that are no drafts.
        """
        rng, counts = self.rng, rows + drafts
        begins = np.array([self.texts[index].computed for index in who])
        accepted = np.array([int(rng.integers(0, n + 1)) for n in drafts])
        numbers = []
        for index, begin, count, n, right in zip(
            who, begins, counts, drafts, accepted, strict=True
        ):
            given = list(self.texts[index].values[begin : begin + count])
            given[count - n + right :] = [value + 1 for value in given[count - n + right :]]
            numbers.append(given)
            # Blocks wholly before the newest computed token are no longer the request's.
            for block in range(max(begin - 1, 0) // BLOCK):
                if self.tables[index, block]:
                    self.free.insert(0, int(self.tables[index, block]))
                    self.tables[index, block] = 0
        for index, begin, count in zip(who, begins, counts, strict=True):
            for block in range(begin // BLOCK, (begin + count - 1) // BLOCK + 1):
                if not self.tables[index, block]:
                    self.tables[index, block] = self.free.pop(0)
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        late = self.rejected[who] if self.lagging else np.zeros(len(who), np.int32)
        lag = None
        if late.any():
            lag = PositionLag(mx.array(late), late)
        layout = StepLayout(
            starts,
            (begins + late + counts).astype(np.int32),
            self.tables[who],
            np.zeros(starts[-1], np.int32),
            BLOCK,
            req_indices_np=np.array(who, np.int32),
            num_drafts_np=drafts.astype(np.int32) if drafts.any() else None,
            lag=lag,
        )
        self.state.begin_step()
        plan = self.scope.plan_of(layout)
        flat = np.concatenate(numbers)
        found, _ = self.state.call(plan, lambda call: self.weights.module(flat, call))
        found = np.array(found)
        for place, index in enumerate(who):
            text = self.texts[index]
            expected = self.weights.play(text, int(begins[place]), numbers[place])
            np.testing.assert_allclose(
                found[starts[place] : starts[place + 1]], expected, atol=2e-5
            )
            text.computed += counts[place] - drafts[place] + accepted[place]
        outcome = starts, starts[1:] - 1 - drafts + accepted
        if self.lagging and self.unread is not None:
            self.scope.kept.record_accepted(*self.unread)
        self.unread = outcome
        if not self.lagging:
            self.scope.kept.record_accepted(*outcome)
        self.rejected[:] = 0
        self.rejected[who] = drafts - accepted

    def flush(self, who=None):
        """Flushes the states of requests into their blocks."""
        if self.lagging and self.unread is not None:
            self.scope.kept.record_accepted(*self.unread)
            self.rejected[:] = 0
        plan = self.scope.flush_plan(who)
        if plan is not None:
            self.state.begin_step()
            self.state.flush(plan)

    def check_blocks(self):
        """Asserts that states are in the same blocks as without drafts."""
        self.state.begin_step()
        self.state.wait_for_device()
        for index, text in enumerate(self.texts):
            if not text.computed:
                continue
            block = int(self.tables[index, (text.computed - 1) // BLOCK])
            (_, found) = self.state.read(None, mx.array([block], mx.int32))
            _, expected = text.states[int(text.computed)]
            np.testing.assert_allclose(np.array(found)[0], expected, atol=2e-5)


IN_CHUNKS = KernelBackend(long_prompt=9)
#: Classes of memories, and whether the host knows of a step's outcome one step later.
POOLS = {
    "ops": (SCATTER, False),  # which wait for it
    "kernels": (KERNELS, False),
    "kernels, late": (KERNELS, True),
    "chunks": (IN_CHUNKS, True),
}


@pytest.fixture(
    params=["ops", pytest.param("kernels", marks=pytest.mark.more), "kernels, late", "chunks"]
)
def pool(request):
    """One of POOLS."""
    with kernel.using(metal_interpreter.Checker("random:1").metal_kernel):
        yield POOLS[request.param]


@IN_MEMORIES
def test_random_steps_with_drafts_equal_the_recurrence(memory, pool):
    play = Play(memory, *pool)
    rng = play.rng
    for step in range(36):
        who = np.flatnonzero(rng.integers(0, 3, NUM_REQS))
        if not len(who):
            continue
        drafts = rng.integers(0, 5, len(who)) if step % 3 else np.zeros(len(who), int)
        rows = 1 + rng.integers(0, 20, len(who)) * (rng.integers(0, 4, len(who)) == 0)
        play.step(who, drafts, rows)
        if step % 7 == 6:
            play.leave(int(rng.integers(NUM_REQS)))
        if step % 11 == 10:
            play.flush(np.array([0, 2]) if step % 2 else None)
    play.flush()
    play.check_blocks()
    assert max(text.computed for text in play.texts) > 4 * BLOCK


def test_nothing_of_its_last_owner_stays_in_a_block(pool):
    """A prompt fills two blocks and starts a third, where one more row follows."""
    state = SequenceState(MEMORIES["bfloat16"](pool[0]), FORM, OPS.repeat)
    state.storage.arrays = [mx.ones(array.shape, array.dtype) for array in state.storage.arrays]
    scope, weights = SequenceScope(state.by_kernels, TAPS), Weights(np.random.default_rng(0))
    for begin, rows in ((0, 2 * BLOCK + 3), (2 * BLOCK + 3, 1)):
        starts, lens = np.array([0, rows], np.int32), np.array([begin + rows], np.int32)
        table = np.array([[3, 7, 5]], np.int32)
        layout = StepLayout(
            *(starts, lens, table, np.zeros(rows, np.int32), BLOCK),
            req_indices_np=np.zeros(1, np.int32),
        )
        state.begin_step()
        given = np.arange(begin, begin + rows) / 7
        state.call(scope.plan_of(layout), lambda call, given=given: weights.module(given, call))
    state.wait_for_device()
    (memory,) = state.page_arrays
    blocks = np.array(memory.reshape(NUM_BLOCKS, -1).view(mx.uint8))
    assert blocks.shape[1] == 48 * 16 * 2
    assert not blocks[[3, 7, 5], FORM.nbytes :].any()
    assert np.array(memory.reshape(NUM_BLOCKS, -1)[4] == 1).all()


@IN_MEMORIES
def test_long_prompts_give_what_the_kernel_gives(memory):
    """Compares results and all blocks' states: within a text, at its end, at a block's end."""
    found = []
    for kind in (KERNELS, IN_CHUNKS):
        with kernel.using(metal_interpreter.metal_kernel):
            play = Play(memory, kind, lagging=False)
            for rows in ([20, 9, 3], [1, 8, 11], [16, 1, 12], [9, 30, 10]):
                drafts = np.array([0, 0, 2 if rows[2] == 3 else 0])
                play.step(np.arange(3), drafts, np.array(rows))
                assert (play.scope.kept.num_rows > 0) == bool(drafts.any())
            play.state.wait_for_device()
            everything = mx.arange(1, NUM_BLOCKS, dtype=mx.int32)
            found.append([np.array(part) for part in play.state.read(None, everything)])
    for ours, chunked in zip(*found, strict=True):
        np.testing.assert_allclose(chunked, ours, atol=1e-4)
        assert ours.any()
