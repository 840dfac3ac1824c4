# SPDX-License-Identifier: Apache-2.0
"""Calls wake an idle engine, on every route."""

import asyncio
import os
import subprocess
import sys
from contextlib import asynccontextmanager

import pytest
from vllm.v1.engine.async_llm import AsyncLLM

from vllm_metal.patches.vllm_patches import engine_sleep


class Core:
    """The engine's side of vLLM's client: answers requests while awake."""

    def __init__(self):
        self.asleep, self.asked = True, []

    def __getattr__(self, name):
        async def answer(*args):
            assert not self.asleep, f"{name} while the weights are not there"
            self.asked.append(name)
            return set()

        return answer


class SleepManager:
    """Wakes the engine for every call."""

    def __init__(self, core):
        self.core, self.num_inside = core, 0

    def begin(self):
        pass

    @asynccontextmanager
    async def request(self):
        self.core.asleep = False
        self.num_inside += 1
        yield
        self.num_inside -= 1


@pytest.mark.parametrize(
    ("call", "args"),
    [
        ("add_lora", ["adapter"]),
        ("remove_lora", [1]),
        ("list_loras", []),
        ("pin_lora", [1]),
        ("collective_rpc", ["check_health"]),
        ("reset_prefix_cache", []),
        ("reset_encoder_cache", []),
        ("compute_weight_checksums", []),
        ("resume_generation", []),
    ],
)
def test_a_call_wakes_an_idle_engine(call, args):
    engine_sleep.manage(lambda config, engine: None, lambda config: None)
    engine = AsyncLLM.__new__(AsyncLLM)
    engine.engine_core = Core()
    engine.profiler = None
    engine.vllm_metal_keeper = SleepManager(engine.engine_core)
    asyncio.run(getattr(engine, call)(*args))
    assert engine.engine_core.asked and not engine.vllm_metal_keeper.num_inside
    engine.shutdown = lambda: None  # which `AsyncLLM.__del__` calls


#: An engine that is still there when the names in modules of vLLM and ours are gone.
EXITS = """
from vllm.v1.engine.async_llm import AsyncLLM
from vllm_metal.patches.vllm_patches import engine_sleep

engine_sleep.manage(lambda config, engine: None, lambda config: None)
engine_sleep.last = AsyncLLM.__new__(AsyncLLM)  # goes with the names of its module
"""


def test_an_engine_that_lives_until_the_interpreter_exits_ends_in_silence():
    done = subprocess.run(
        [sys.executable, "-c", EXITS], env=os.environ.copy(), capture_output=True, text=True
    )
    assert (done.returncode, "Exception ignored" in done.stderr) == (0, False), done.stderr
