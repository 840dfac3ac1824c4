# SPDX-License-Identifier: Apache-2.0
"""Warm-up compiles everything that decoding needs, and leaves no traces."""

from collections import Counter

import mlx.core as mx
import numpy as np
import pytest
from e2e.drafting import FEW, drafting_engine
from e2e.failing_device import ENDS, MESSAGE, FailingDevice
from e2e.fuzz.models import VOCAB
from e2e.harness import Dense, counters, engine, free_blocks, generate, greedy
from e2e.peers import worker_of
from vllm.v1.sample.logits_processor import LogitsProcessor

from vllm_metal.engine.models.executor import ModelExecutor
from vllm_metal.engine.sample import Sampler
from vllm_metal.engine.worker.model_runner import ModelRunner
from vllm_metal.identity.model_files import ModelLoadError


@pytest.fixture
def traced(monkeypatch):
    """Number of functions that MLX was asked to trace, by module."""
    found, compile = Counter(), mx.compile

    def counting(function, *arguments, **options):
        if hasattr(function, "__module__"):
            found[function.__module__.partition(".")[0]] += 1
        return compile(function, *arguments, **options)

    monkeypatch.setattr(mx, "compile", counting)
    return found


@pytest.fixture
def steps(monkeypatch):
    """Number of rows in each step."""
    found, forward = [], ModelRunner.forward

    def noting(self, scheduler_output):
        found.append(scheduler_output.total_num_scheduled_tokens)
        return forward(self, scheduler_output)

    monkeypatch.setattr(ModelRunner, "forward", noting)
    return found


def holds_nothing(llm):
    """Returns whether no request is known, and all blocks are free and zero."""
    worker = worker_of(llm)
    pool = worker.runner.runner.layers.pool_arrays()
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    num_blocks = scheduler.kv_cache_manager.block_pool.num_gpu_blocks
    return (
        worker.num_requests == 0
        and free_blocks(llm) == num_blocks - 1  # of vLLM's null block
        and all(not np.asarray(array.view(mx.uint8)).any() for array in pool)
    )


@pytest.mark.parametrize(
    ("name", "async_scheduling"),
    [
        ("full", True),
        ("hybrid", True),
        pytest.param("windowed", True, marks=pytest.mark.slow),
        pytest.param("hybrid", False, marks=pytest.mark.more),
    ],
)
def test_a_first_request_traces_nothing(name, async_scheduling, tiny_models, traced, steps):
    path = str(tiny_models / name)
    dense = Dense(path)
    with engine(path, async_scheduling=async_scheduling, max_model_len=256) as llm:
        assert steps == [5, 3, 1, 1]
        assert traced.pop("vllm_metal") > 0
        assert holds_nothing(llm)
        told = counters(llm)
        assert told["vllm:prompt_tokens"] == told["vllm:generation_tokens"] == 0
        prompt = np.random.default_rng(1).integers(2, VOCAB, 4).tolist()
        (tokens,) = generate(llm, [prompt], greedy(8))
    assert not traced["vllm_metal"]
    dense.check(prompt, tokens)


@pytest.mark.parametrize(
    "method",
    [
        "draft_model",
        pytest.param("mtp", marks=pytest.mark.more),
        pytest.param("eagle3", marks=pytest.mark.slow),
    ],
)
def test_nor_does_a_draft_network(method, toys, traced, steps):
    with drafting_engine(toys[method], None) as llm:
        assert steps[:2] == [5, 3] and set(steps[2:]) == {4}
        # Passes of a draft model are graphs, too; those of heads are not.
        assert traced.pop("vllm_metal") >= 1 + (method == "draft_model")
        assert holds_nothing(llm)
        prompt = np.random.default_rng(1).integers(2, FEW, 4).tolist()
        generate(llm, [prompt], greedy(6, detokenize=False))
        assert counters(llm)["vllm:spec_decode_num_draft_tokens"] > 0
    assert not traced["vllm_metal"]


def test_without_room_for_decoding_there_is_less(tiny, steps):
    with engine(tiny, max_model_len=3) as llm:
        assert steps == [3]
        assert holds_nothing(llm)
        assert len(generate(llm, [[5]], greedy(2))[0]) == 2


@pytest.mark.parametrize("factor", [pytest.param(1.0, marks=pytest.mark.slow), 1.01])
@pytest.mark.parametrize(
    "name",
    [
        "full",
        pytest.param("hybrid", marks=pytest.mark.more),
        pytest.param("windowed", marks=pytest.mark.slow),
    ],
)
def test_a_model_that_computes_something_else_is_refused(name, factor, tiny_models, monkeypatch):
    """Its hidden states are 1 % larger on the paged path."""
    forward = ModelExecutor.forward_hidden
    monkeypatch.setattr(
        ModelExecutor, "forward_hidden", lambda *arguments: forward(*arguments) * factor
    )
    path, settings = str(tiny_models / name), {"max_model_len": 256}
    if factor == 1.0:
        with engine(path, **settings):
            return
    with pytest.raises(ModelLoadError, match="gives wrong results"), engine(path, **settings):
        pass
    with engine(path, **settings, additional_config={"dense_check": False}):
        pass


def test_what_the_model_asks_of_sampling_is_what_is_sampled(tiny, monkeypatch):
    asked, add = [], Sampler.add_request

    def noting(self, req_idx, params, *others):
        asked.append((params.temperature, params.top_p))
        return add(self, req_idx, params, *others)

    monkeypatch.setattr(Sampler, "add_request", noting)
    defaults = {"temperature": 0.6, "top_p": 0.9}
    with engine(tiny, max_model_len=256, override_generation_config=defaults):
        assert asked == [(0.6, 0.9)]


class Choosy(LogitsProcessor):
    """A user's processor that fails for internal requests."""

    added = 0

    def __init__(self, *arguments):
        pass

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        for _, params, *_ in batch_update.added if batch_update else ():
            assert params.extra_args["mine"]
            Choosy.added += 1

    def apply(self, logits):
        return logits


def test_users_logits_processors_do_not_see_it(tiny):
    with engine(tiny, max_model_len=256, logits_processors=[Choosy]) as llm:
        assert not Choosy.added
        generate(llm, [[5, 6]], greedy(2, extra_args={"mine": True}))
    assert Choosy.added == 1


@pytest.mark.parametrize("ends", [ENDS[0], pytest.param(ENDS[2], marks=pytest.mark.more)])
def test_a_graph_that_fails_is_forgone_before_there_are_requests(ends, tiny, monkeypatch):
    device = FailingDevice(monkeypatch)
    device.fail_graphs(ends)
    dense = Dense(tiny)
    with engine(tiny, max_model_len=256) as llm:
        assert len(device.taken) == 1
        assert holds_nothing(llm)
        (tokens,) = generate(llm, [[5, 6, 7]], greedy(6))
        assert len(device.taken) == 1
    dense.check([5, 6, 7], tokens)


def test_a_device_that_computes_nothing_ends_the_start(tiny, monkeypatch):
    device = FailingDevice(monkeypatch)
    device.fail_steps(lambda step: True)
    with pytest.raises(RuntimeError) as failed, engine(tiny, max_model_len=256):
        pass
    assert MESSAGE in str(failed.value)
    assert len(device.taken) == 2
