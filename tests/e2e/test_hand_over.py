# SPDX-License-Identifier: Apache-2.0
"""The host gives the device each step once, and waits for nothing that it has not given it."""

import io

import mlx.core as mx
from e2e.harness import engine
from vllm import SamplingParams


def unknown_operations(arrays) -> int:
    """How many operations the device was not given yet."""
    drawn = io.StringIO()
    mx.export_to_dot(drawn, *arrays)
    return drawn.getvalue().count("shape=rectangle")


def test_one_hand_over_a_step(tiny, monkeypatch):
    given = []

    def noting(evaluate):
        def run(*arrays):
            # A step has hundreds; `device.errors` gives one, to be told of errors.
            if unknown_operations(arrays[0] if isinstance(arrays[0], list) else arrays) > 1:
                given.append(evaluate.__name__)
            return evaluate(*arrays)

        return run

    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
    with engine(tiny, skip_tokenizer_init=True, async_scheduling=True, max_model_len=256) as llm:
        core = llm.llm_engine
        for number in range(3):
            core.add_request(f"{number}", {"prompt_token_ids": [5 + number] * 20}, params)
        for _ in range(4):  # prompts
            core.step()
        monkeypatch.setattr(mx, "async_eval", noting(mx.async_eval))
        monkeypatch.setattr(mx, "eval", noting(mx.eval))
        for _ in range(20):
            core.step()
        monkeypatch.undo()
        while core.has_unfinished_requests():
            core.step()
    assert given == ["async_eval"] * 20
