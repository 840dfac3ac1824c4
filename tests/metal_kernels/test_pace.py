# SPDX-License-Identifier: Apache-2.0
"""The work between ends of command buffers, counted in the queue."""

import mlx.core as mx
import numpy as np
import pytest

from metal_kernels import kernel
from metal_kernels.pace import MOST_WORK, Pace, pace_of
from metal_kernels.paged_attention import AttentionShape
from tests.metal_kernels.doubles import Recorder
from vllm_metal.engine.kv_cache.kernels import KERNELS
from vllm_metal.engine.kv_cache.layer_cache import AttentionKind, KVShape
from vllm_metal.engine.kv_cache.layer_state import StepLayout
from vllm_metal.patches.mlx_patches.seam import Scoring

SHAPE = AttentionShape(32, 8, 128, 128)
LAYERS = 6


class Queue:
    """Counts layers and FLOPs per command buffer, and buffers in flight."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.buffers: list[dict[str, float]] = [{"layers": 0, "work": 0}]
        self.in_flight = self.most_in_flight = 0
        start, wait = mx.async_eval, mx.eval
        ended: dict[int, int] = {}  # by array, how many buffers had ended with it
        self.reads: list[mx.array] = []  # fences of dispatches that no evaluation was asked for
        self.writes: list[mx.array] = []  # fences that come after all reads before them

        def async_eval(*arrays: mx.array) -> None:
            start(*arrays)
            if not any(arrays[0] is fence for fence in self.writes):
                asked = {id(array) for array in arrays}
                assert all(id(fence) in asked for fence in self.reads)
            self.reads.clear()
            ended[id(arrays[0])] = len(self.buffers)
            self.buffers.append({"layers": 0, "work": 0})
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)

        def evaluate(*arrays: mx.array) -> None:
            wait(*arrays)
            if id(arrays[0]) in ended:
                self.in_flight = len(self.buffers) - 1 - ended[id(arrays[0])]

        monkeypatch.setattr(mx, "async_eval", async_eval)
        monkeypatch.setattr(mx, "eval", evaluate)


def serve(queue: Queue, requests: list[tuple[int, int]]) -> list[dict[str, float]]:
    """Returns the buffers of a step over LAYERS layers, of (positions before, rows) per request."""
    counts = np.array([rows for _, rows in requests], np.int32)
    seq_lens = counts + np.array([before for before, _ in requests], np.int32)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    width = -(-int(seq_lens.max()) // 16)
    layout = StepLayout(
        starts,
        seq_lens,
        np.zeros((len(requests), width), np.int32),
        np.arange(starts[-1], dtype=np.int32) % 16,
        16,
        pace=Pace(),
    )
    recorder = Recorder()

    def counting(name, **text):
        run = recorder.metal_kernel(name, **text)

        def call(**call):
            if name in ("decode", "prefill"):
                template, tiles = dict(call["template"]), np.array(call["inputs"][7])
                rows = template.get("ROWS") or 8 * template["ROW_GROUPS"]
                keys = int((tiles[:, 4] - tiles[:, 3]).clip(0).sum())
                queue.buffers[-1]["work"] += max(rows, 16) * keys * 8 * 4 * 128
            elif name == "kv_write":
                queue.buffers[-1]["layers"] += 1
            outputs = run(**call)
            if name in ("decode", "prefill"):
                queue.reads.append(outputs[-1])
            elif name == "kv_write":
                queue.writes.append(outputs[-1])
            return outputs

        return call

    with kernel.using(counting):
        plan = KERNELS.plan(layout, AttentionKind(SHAPE, None))
        for _ in range(LAYERS):
            kv_cache = KERNELS.allocate(1, 16, KVShape(8, 128, 128), mx.float16)
            rows = mx.zeros((starts[-1], 8, 128), mx.float16)
            queries = mx.zeros((starts[-1], 32, 128), mx.float16)
            kv_cache.write(plan, rows, rows)
            out = kv_cache.attend(plan, queries, Scoring(1.0))
        mx.eval(out)
    return queue.buffers


@pytest.mark.parametrize(
    "requests",
    [
        [(131072 - 2048, 2048)],
        [(0, 2048)],
        [(0, 16384)],
        [(100_000, 300)] + [(60_000, 1)] * 40,
        [(131071, 1)] * 100,
    ],
    ids=["128k", "prompt", "long prompt", "chunk and decodes", "decodes of 128k"],
)
def test_no_command_buffer_holds_more_than_a_layer_and_the_bound(monkeypatch, requests):
    queue = Queue(monkeypatch)
    buffers = serve(queue, requests)
    assert all(buffer["layers"] <= 1 for buffer in buffers)
    assert all(buffer["work"] <= MOST_WORK for buffer in buffers)
    assert queue.most_in_flight <= 3


@pytest.mark.parametrize(
    "requests", [[(3000, 1)] * 64, [(31_000, 1)] * 3, [(200, 5)] * 40], ids=str
)
def test_a_step_of_little_work_is_left_to_mlx(monkeypatch, requests):
    buffers = serve(Queue(monkeypatch), requests)
    (buffer,) = buffers
    assert buffer["layers"] == LAYERS
    # 50 dispatches hold three layers at most: products, norms and so on are twelve and more.
    assert 3 * buffer["work"] / LAYERS <= MOST_WORK


def test_the_bound_of_work_that_is_left_to_mlx():
    pace = Pace()
    assert pace_of(pace, 256, MOST_WORK // 4) is None  # vLLM's default of decodes at once
    assert pace_of(pace, 1, MOST_WORK // 4 + 1) is pace
    assert pace_of(pace, 512, 0) is pace


def test_layers_of_all_kinds_keep_one_pace():
    """Otherwise each kind would have its own command buffers in flight."""
    rows = np.arange(2048, dtype=np.int32)
    starts, seq_lens = np.array([0, 2048], np.int32), np.array([2048], np.int32)
    layout = StepLayout(starts, seq_lens, rows[None, :128], rows, 16, pace=Pace())
    with kernel.using(Recorder().metal_kernel):
        plans = [KERNELS.plan(layout, AttentionKind(SHAPE, window)) for window in (None, 512)]
    assert plans[0].pace is plans[1].pace is layout.pace is not None


def test_pace_needs_no_more_memory():
    """Layers with large temporary arrays hold fewer of them, if anything."""

    def peak(pace):
        mx.synchronize()
        mx.clear_cache()
        mx.reset_peak_memory()
        states = mx.ones((256, 1024))
        weights = mx.ones((1024, 1024)) * 1e-3
        for _ in range(20):
            states = mx.tanh(states @ weights) + states
            if pace is not None:
                pace.end(states.sum())
        mx.eval(states)
        return mx.get_peak_memory()

    # How far MLX runs ahead in either run is chance.
    assert any(peak(Pace()) <= 1.05 * peak(None) for _ in range(5))
