# SPDX-License-Identifier: Apache-2.0
"""MLX's CPU backend with the error behavior of MLX's Metal backend.

From MLX's source (mlx/error.h, mlx/array.cpp, mlx/backend/metal/device.cpp): if a command buffer
fails, its outputs are undefined. The error is recorded when it ends, and thrown
once: by submitting work to the device, which begins a command buffer; by waiting for an unfinished
one; or by synchronizing. Reading an array whose command buffer has ended throws nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from vllm_metal.engine.batch.outputs import StepOutput
from vllm_metal.engine.worker.model_runner import ModelRunner
from vllm_metal.kv_transfer import batch_writer

MESSAGE = "[METAL] Command buffer execution failed: Caused GPU Timeout Error"
#: When the command buffers of a failing step end.
ENDS = (
    "before the next step",  # the next step's submission throws
    "behind the next hand-over",  # the tokens can be read without an error
    "when waited for",  # the first reader throws
    "noted once read",  # the tokens can be read; the next check throws
)


class FailingDevice:
    """Makes chosen steps fail.

    taken: the callers that got an error, by names of the call and of the thread.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.taken: list[tuple[str, str]] = []
        self.num_steps = 0  # steps submitted so far
        self._fails: Callable[[int], bool] = lambda step: False
        self._ends = ENDS[0]
        self._lock = threading.Lock()
        self._in_flight = self._ended = False  # of a failing command buffer
        self._failing: StepOutput | None = None  # the step of that command buffer
        self._by_graph = self._spoiling = False
        self._evaluate = mx.eval
        submit, synchronize, make_graph = mx.async_eval, mx.synchronize, mx.compile
        sample, read, make_rows = ModelRunner.submit, StepOutput.token_ids, batch_writer.page_rows

        def async_eval(*arrays: Any) -> None:
            self._ask("async_eval")
            submit(*arrays)
            if self._spoiling:
                self._spoil(arrays)

        def evaluate(*arrays: Any) -> None:
            self._wait("eval")
            self._evaluate(*arrays)

        def synchronized(*arguments: Any) -> None:
            synchronize(*arguments)
            self._ended |= self._in_flight
            self._ask("synchronize")

        def compiled(function: Any, *arguments: Any, **options: Any) -> Any:
            graph = make_graph(function, *arguments, **options)

            # Also for functions in mlx-lm modules that are imported in the meantime and stay.
            def build(*arrays: Any, **others: Any) -> Any:
                self._by_graph = True
                return graph(*arrays, **others)

            return build

        def hand_over_step(runner: ModelRunner, grammar_output: Any) -> StepOutput:
            self._spoiling = self._fails(self.num_steps)
            self.num_steps += 1
            before = self._in_flight
            try:
                output = sample(runner, grammar_output)
                if self._spoiling:
                    self._spoil(runner.layers.pool_arrays())
                    self._in_flight, self._failing = True, output
                    self._ended = self._ends == ENDS[0]
                self._ended |= before and self._ends == ENDS[1]
                return output
            finally:
                self._spoiling = self._by_graph = False

        def token_ids(output: StepOutput) -> list[list[int]]:
            if self._ends == ENDS[3]:
                found = read(output)
                self._ended |= self._in_flight and output is self._failing
                return found
            if not output.is_read and not self._ended:
                self._ended = self._in_flight
                self._ask("token_ids")
            return read(output)

        def page_rows(arrays: Any, *arguments: Any) -> np.ndarray:
            if any(isinstance(array, mx.array) for array in arrays):
                self._wait("page_rows")
            return make_rows(arrays, *arguments)

        for name, call in {
            "async_eval": async_eval,
            "eval": evaluate,
            "synchronize": synchronized,
            "compile": compiled,
        }.items():
            monkeypatch.setattr(mx, name, call)
        monkeypatch.setattr(ModelRunner, "submit", hand_over_step)
        monkeypatch.setattr(StepOutput, "token_ids", token_ids)
        monkeypatch.setattr(batch_writer, "page_rows", page_rows)

    def fail_step(self, number: int, ends: str = ENDS[0]) -> None:
        """Makes the step after `number` more submissions fail."""
        first = self.num_steps + number
        self.fail_steps(lambda step: step == first, ends)

    def fail_steps(self, which: Callable[[int], bool], ends: str = ENDS[0]) -> None:
        """Makes all steps fail for whose number, counted from the first one, `which` is true."""
        self._fails, self._ends = which, ends

    def fail_graphs(self, ends: str = ENDS[0]) -> None:
        """Makes every step fail that uses a compiled graph."""
        self.fail_steps(lambda step: self._by_graph, ends)

    def _spoil(self, arrays: Any) -> None:
        """Overwrites arrays given to the device with wrong values."""
        flat: list[mx.array] = []
        for each in arrays:
            flat += each if isinstance(each, (list, tuple)) else [each]
        self._evaluate(flat)
        spoiled: set[int] = set()  # addresses, because arrays may be views of others
        for array in flat:
            if array.dtype not in (mx.int32, mx.float32):
                continue
            values = np.asarray(array)
            if values.ctypes.data in spoiled:
                continue
            spoiled.add(values.ctypes.data)
            if array.dtype == mx.int32:
                values[...] ^= 1
            else:
                values *= -0.5
                values += 0.25

    def _wait(self, what: str) -> None:
        if self._ends == ENDS[2]:
            self._ended |= self._in_flight
            self._ask(what)

    def _ask(self, what: str) -> None:
        with self._lock:
            if not self._ended:
                return
            self._in_flight = self._ended = False
        self.taken.append((what, threading.current_thread().name))
        raise RuntimeError(MESSAGE)
