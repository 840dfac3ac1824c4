# SPDX-License-Identifier: Apache-2.0
"""The time bound of steps, in vLLM's scheduler on the test's clock."""

import json
from types import SimpleNamespace

import pytest
from patches.vllm_patches import doubles
from vllm import SamplingParams
from vllm.multimodal.inputs import (
    MultiModalFeatureSpec,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_metal.patches.vllm_patches import step_budget
from vllm_metal.patches.vllm_patches.step_result import StepResult

STEP_S, TOKEN_S = 0.01, 0.001  # 11 ms where one request decodes, so that 49 tokens fit into 60
MOST = 128


class Engine:
    """Plans and ends steps one at a time, with durations by their tokens."""

    def __init__(self, folder, monkeypatch, additional_config=None, **limits):
        arguments = doubles.arguments(
            folder,
            max_num_batched_tokens=MOST,
            enable_prefix_caching=False,
            additional_config=additional_config or {"max_step_ms": 60},
            **limits,
        )
        self.scheduler = doubles.make_scheduler(arguments.create_engine_config(), num_blocks=64)
        self.now = 0.0
        clock = SimpleNamespace(perf_counter=lambda: self.now)
        monkeypatch.setattr(step_budget, "time", clock)

    def add(self, name, length, kind=RequestOutputKind.DELTA, images=()):
        """Adds a request; `images`: first row and number of rows of bidirectional images."""
        params = SamplingParams(max_tokens=150, ignore_eos=True, output_kind=kind)
        params.update_from_generation_config({}, eos_token_id=None)
        prompt = [sum(map(ord, name)) % 90, *range(length - 1)]
        features = [
            MultiModalFeatureSpec(
                MultiModalKwargsItem(), "image", f"{name} {at}", PlaceholderRange(at, count)
            )
            for at, count in images
        ]
        if features:
            self.scheduler.scheduler_config.disable_chunked_mm_input = True
        request = Request(name, prompt, params, None, mm_features=features or None)
        self.scheduler.add_request(request)

    def step(self, result=StepResult, idle=0.0):
        """Plans, computes and finishes a step; returns its tokens by request."""
        output = self.scheduler.schedule()
        assert self.scheduler.max_num_scheduled_tokens == MOST
        planned = output.num_scheduled_tokens
        self.now += STEP_S + TOKEN_S * sum(planned.values())
        names = list(planned)
        sampled = [[] if self.scheduler.requests[name].is_prefill_chunk else [5] for name in names]
        places = {name: place for place, name in enumerate(names)}
        self.scheduler.update_from_output(output, result(names, places, sampled))
        self.now += idle
        return planned

    def steps(self, count, **options):
        return [self.step(**options) for _ in range(count)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("model")
    (made / "config.json").write_text(json.dumps(doubles.MODEL))
    return str(made)


@pytest.fixture
def start(folder, monkeypatch):
    def begin(**options):
        return Engine(folder, monkeypatch, **options)

    return begin


def chunks(steps, name):
    return [step[name] for step in steps if step.get(name, 0) > 1]


def warm(engine):
    """Runs a stream and a prompt, from which the engine learns costs."""
    engine.add("stream", 30)
    engine.steps(6)
    engine.add("first", 240)
    engine.steps(20)
    engine.scheduler.finish_requests("first", RequestStatus.FINISHED_ABORTED)
    engine.steps(3)


def test_a_chunk_fits_into_the_time(start):
    engine = start()
    warm(engine)
    engine.add("long", 240)
    steps = engine.steps(8)
    assert all(step["stream"] == 1 for step in steps)
    assert sum(chunks(steps, "long")) == 240
    assert all(44 <= chunk <= 52 for chunk in chunks(steps, "long")[:-1])


def test_without_a_bound_a_chunk_fills_the_step(start):
    engine = start(additional_config={"max_step_ms": None})
    warm(engine)
    engine.add("long", 240)
    assert chunks(engine.steps(4), "long") == [MOST - 1, 240 - MOST + 1]


def test_a_text_that_is_wanted_at_its_end_does_not_bound_steps(start):
    engine = start()
    engine.add("whole", 30, RequestOutputKind.FINAL_ONLY)
    engine.steps(6)
    engine.add("long", 240)
    assert chunks(engine.steps(4), "long") == [MOST - 1, 240 - MOST + 1]


def test_results_of_other_workers_tell_nothing(start):
    engine = start()
    engine.add("stream", 30)
    engine.steps(6, result=ModelRunnerOutput)
    engine.add("long", 240)
    steps = engine.steps(4, result=ModelRunnerOutput)
    assert chunks(steps, "long") == [MOST - 1, 240 - MOST + 1]


def test_time_in_which_nothing_ran_is_not_a_step_s(start):
    engine = start()
    engine.add("stream", 30)
    engine.steps(6, idle=3.0)
    engine.add("first", 240)
    engine.steps(20, idle=3.0)
    engine.add("long", 240)
    steps = engine.steps(8, idle=3.0)
    assert all(44 <= chunk <= 52 for chunk in chunks(steps, "long")[:-1])


def test_a_stream_behind_a_prompt_gets_its_row(start):
    """Others decode behind a prompt that may take only a part of a step."""
    engine = start(long_prefill_token_threshold=40)
    warm(engine)
    engine.add("long", 240)
    engine.add("short", 8)
    steps = engine.steps(8)
    behind = [step for step in steps if step.get("short") == 1]
    assert any("long" in step and step["long"] > 1 for step in behind)
    first = next(number for number, step in enumerate(steps) if "short" in step)
    assert all(step.get("short") == step["stream"] == 1 for step in steps[first + 1 :])


def test_two_prompts_share_what_fits(start):
    engine = start()
    warm(engine)
    for name in ("a", "b"):
        engine.add(name, 120)
    steps = engine.steps(10)
    prefill = [sum(n for n in step.values() if n > 1) for step in steps]
    assert all(44 <= tokens <= 52 for tokens in prefill[:4])
    assert sum(prefill) == 240


def test_a_scheduler_that_is_paused_schedules_nothing(start):
    engine = start()
    warm(engine)
    engine.add("long", 240)
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert engine.scheduler.schedule().num_scheduled_tokens == {}
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert engine.step()["stream"] == 1


def test_a_prompt_alone_fills_steps(start):
    engine = start()
    warm(engine)
    engine.scheduler.finish_requests("stream", RequestStatus.FINISHED_ABORTED)
    engine.add("long", 240)
    assert chunks(engine.steps(3), "long") == [MOST, 240 - MOST]


@pytest.fixture
def images(start):
    """An engine whose encoder cache has room for images."""
    engine = start()
    scheduler = engine.scheduler
    scheduler.max_num_encoder_input_tokens = 4 * MOST
    scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=4 * MOST)
    return engine


def computed(engine, name, most_steps=60):
    """Returns the ends of a prompt's chunks."""
    ends, end = [], 0
    for _ in range(most_steps):
        end += engine.step().get(name, 0)
        ends.append(end)
        if end >= engine.scheduler.requests[name].num_prompt_tokens:
            return ends
    raise AssertionError(f"it stays at {end}")


def is_whole(ends, at, count):
    return not any(at < end < at + count for end in ends)


def test_an_image_that_a_chunk_begins_with_is_not_cut(images):
    """Of two prompts, the second's image starts where the rest of a step ends."""
    whole, name = RequestOutputKind.FINAL_ONLY, "shown"
    images.add("text", 100, whole)
    images.add(name, 70, whole, images=[(0, 63)])
    assert is_whole(computed(images, name), 0, 63)


@pytest.mark.parametrize("at", [0, 5, 40])
def test_an_image_is_not_cut_beside_a_stream(images, at):
    """It takes longer than max_step_ms, but is not deferred for ever either."""
    images.add("stream", 3)
    images.steps(6)
    images.add("shown", at + 110, images=[(at, 100)])
    assert is_whole(computed(images, "shown"), at, 100)
