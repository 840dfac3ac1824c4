# SPDX-License-Identifier: Apache-2.0
"""The host submits each step once, and waits for nothing that was not submitted."""

import io

import mlx.core as mx
import pytest
from e2e.harness import engine
from vllm import SamplingParams

from vllm_metal.engine.batch.outputs import StepOutput
from vllm_metal.engine.worker.early_reads import EarlyReads
from vllm_metal.engine.worker.results import LateOutput


def unknown_operations(arrays) -> int:
    """Counts operations that were not submitted yet."""
    drawn = io.StringIO()
    mx.export_to_dot(drawn, *arrays)
    return drawn.getvalue().count("shape=rectangle")


PARAMS = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)


def begin(core) -> None:
    """Starts three requests, and steps until all decode."""
    for number in range(3):
        core.add_request(f"{number}", {"prompt_token_ids": [5 + number] * 20}, PARAMS)
    for _ in range(4):  # prompts
        core.step()


def test_one_hand_over_a_step(tiny, monkeypatch):
    given = []

    def noting(evaluate):
        def run(*arrays):
            # A step has hundreds; `device.errors` gives one, to be told of errors.
            if unknown_operations(arrays[0] if isinstance(arrays[0], list) else arrays) > 1:
                given.append(evaluate.__name__)
            return evaluate(*arrays)

        return run

    with engine(tiny, skip_tokenizer_init=True, async_scheduling=True, max_model_len=256) as llm:
        core = llm.llm_engine
        begin(core)
        monkeypatch.setattr(mx, "async_eval", noting(mx.async_eval))
        monkeypatch.setattr(mx, "eval", noting(mx.eval))
        for _ in range(20):
            core.step()
        monkeypatch.undo()
        while core.has_unfinished_requests():
            core.step()
    assert given == ["async_eval"] * 20


class Order:
    """Records evaluations, and reads and results of steps by number, in order."""

    def __init__(self, monkeypatch):
        self.noted, self._outputs, self._results = [], [], []
        evaluate, read, answer = mx.async_eval, StepOutput.token_ids, LateOutput.get_output

        def async_eval(*arrays):
            evaluate(*arrays)  # one that raises counts for nothing
            self.noted.append(("evaluated", None))

        def token_ids(output):
            found = read(output)
            if output not in self._outputs:
                self.noted.append(("read", len(self._outputs)))
                self._outputs.append(output)
            return found

        def get_output(output):
            found = answer(output)
            if not any(found is told for told in self._results):  # the worker wraps it
                self.noted.append(("told", len(self._results)))
                self._results.append(found)
            return found

        monkeypatch.setattr(mx, "async_eval", async_eval)
        monkeypatch.setattr(StepOutput, "token_ids", token_ids)
        monkeypatch.setattr(LateOutput, "get_output", get_output)

    def checked(self, step):
        """Returns whether an evaluation began and succeeded between a step's read and result."""
        read, told = (self.noted.index((what, step)) for what in ("read", "told"))
        return ("evaluated", None) in self.noted[read:told]


@pytest.mark.parametrize(
    ("early", "async_scheduling", "evaluations"),
    [(True, True, 1), (False, True, 2), (True, False, 2)],
)
def test_no_fewer_checks_than_steps_that_are_told(
    tiny, monkeypatch, early, async_scheduling, evaluations
):
    """Where tokens were read before the next hand-over, that hand-over is the check."""
    if not early:
        monkeypatch.setattr(EarlyReads, "before_submit", lambda *_, **__: None)
    settings = {"skip_tokenizer_init": True, "max_model_len": 256}
    with engine(tiny, async_scheduling=async_scheduling, **settings) as llm:
        core = llm.llm_engine
        begin(core)
        order = Order(monkeypatch)
        for _ in range(20):
            core.step()
        assert order.noted.count(("evaluated", None)) == 20 * evaluations
        while core.has_unfinished_requests():
            core.step()
    told = [step for what, step in order.noted if what == "told"]
    assert len(told) > 30 and all(map(order.checked, told))
