# SPDX-License-Identifier: Apache-2.0
"""An idle engine's loop makes a step when its connector asks for one."""

import queue
import threading
from contextlib import suppress
from types import SimpleNamespace

from vllm.v1.engine import core

from vllm_metal.patches.vllm_patches.engine_wake import let_connectors_wake


class Connector:
    """Has work once, brought by another thread."""

    def wake_by(self, wake):
        self.wake = wake


class Engine(core.EngineCoreProc):
    """Runs vLLM's loop over an idle scheduler."""

    def __init__(self):
        self.connector, self.steps = Connector(), []
        self.scheduler = SimpleNamespace(
            connector=self.connector, has_requests=lambda: len(self.steps) < self.wanted
        )
        self.input_queue, self.aborts_queue = queue.Queue(), queue.Queue()
        self.engines_running, self.batch_queue, self.publish_dp_lb_stats = False, None, False
        self.process_input_queue_block, self._idle_state_callbacks = True, []
        self.shutdown_state = core.EngineShutdownState.RUNNING
        self.wanted, self.stepped = 0, threading.Event()

    def _handle_shutdown(self):
        return self.wanted < 2

    def _process_engine_step(self):
        self.steps.append(None)
        self.stepped.set()


def test_an_idle_engine_makes_a_step_when_its_connector_has_work():
    let_connectors_wake()
    engine = Engine()

    def run():
        with suppress(SystemExit):
            engine.run_busy_loop()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while not hasattr(engine.connector, "wake"):
        assert not engine.stepped.wait(0.01)
    assert engine.connector.wake()
    assert not engine.stepped.wait(0.2)  # it has looked, and there was nothing
    engine.wanted = 2
    assert engine.connector.wake()
    assert engine.stepped.wait(120)
    engine.shutdown_state = core.EngineShutdownState.SHUTTING_DOWN
    assert not engine.connector.wake()
