# SPDX-License-Identifier: Apache-2.0
"""Speculation on the kernels, interpreted: steps laid out before the last one's outcome is read."""

from contextlib import contextmanager

import pytest
from e2e.drafting import (
    FEW,
    METHODS,
    STATELESS,
    answer,
    draft_counts,
    drafting_engine,
    watching,
    write_toys,
)
from e2e.harness import Dense, counters

from vllm_metal.worker.model_runner import ModelRunner

BESIDE = [
    pytest.param(name, marks=[] if name in ("draft_model", "windowed") else pytest.mark.more)
    for name in (*METHODS, *STATELESS, "windowed")
]


@pytest.fixture(scope="module")
def toys(tmp_path_factory):
    return write_toys(tmp_path_factory.mktemp("toys"), for_kernels=True)


@pytest.fixture
def serve(toys, monkeypatch):
    """Starts an engine on the kernels; with `waits`, each of its steps waits for the one before.

    Gives the engine, its runner, and what it drafts.
    """
    monkeypatch.setenv("VLLM_METAL_KERNELS", "interpret")

    @contextmanager
    def start(name, waits=False, **options):
        made, init = [], ModelRunner.__init__

        def noting(self, *arguments, **keywords):
            init(self, *arguments, **keywords)
            made.append(self)

        with monkeypatch.context() as patch, watching(patch) as drafted:
            patch.setattr(ModelRunner, "__init__", noting)
            if waits:
                patch.setattr(ModelRunner, "_needs_outcome", lambda *_: True)
            settings = {"async_scheduling": True, "max_model_len": 128} | options
            with drafting_engine(toys[name], None, **settings) as llm:
                yield llm, made[0], drafted

    return start


def prompts(*lengths, seed=0):
    return [[(7 * i * i + 3 * n + i // 5 + seed) % FEW for i in range(n)] for n in lengths]


@pytest.mark.parametrize("name", BESIDE)
def test_no_step_waits_and_drafts_are_those_of_an_engine_that_waits(toys, serve, name):
    asked, found = prompts(5, 33, 50), {}
    for waits in (True, False):
        with serve(name, waits) as (llm, runner, drafted):
            found[waits] = (answer(llm, asked, 24), draft_counts(llm), drafted.take())
            assert (runner.num_waits > 20) if waits else (runner.num_waits == 0)
    assert found[True] == found[False]
    tokens, (num_drafts, num_accepted), _ = found[False]
    assert 0 < num_accepted < num_drafts
    dense = Dense(toys[name].model)
    for prompt, generated in zip(asked, tokens, strict=True):
        dense.check(prompt, generated)
