# SPDX-License-Identifier: Apache-2.0
"""Makes the next engine step of a server under test fail once a file exists.

Python imports a module of this name at startup if its folder is on the path. The file is
named by VLLM_METAL_TEST_FAIL; the code that makes the step fail removes it.
"""

import os
import sys
import threading
import time


def _watch(path: str) -> None:
    while True:
        time.sleep(0.1)
        if "vllm_metal.engine.worker.worker" in sys.modules and os.path.exists(path):
            os.remove(path)
            _fail_once()


def _fail_once() -> None:
    mx = sys.modules["mlx.core"]
    async_eval = mx.async_eval

    def fail(*arguments):
        mx.async_eval = async_eval
        raise RuntimeError("a test has this step fail")

    mx.async_eval = fail


def _start() -> None:
    path = os.environ.get("VLLM_METAL_TEST_FAIL")
    if path:
        threading.Thread(target=_watch, args=(path,), daemon=True).start()


_start()
os.register_at_fork(after_in_child=_start)  # a child has none of its parent's threads
