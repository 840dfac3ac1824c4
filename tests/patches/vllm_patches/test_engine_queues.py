# SPDX-License-Identifier: Apache-2.0
"""Remote readers of a queue detect its shutdown, and receive messages."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

from vllm_metal.patches.vllm_patches import engine_queues


@pytest.fixture
def queue():
    """Both ends of a queue over TCP."""
    engine_queues.notice_queue_shutdown()
    writer = MessageQueue(1, 0, connect_ip="127.0.0.1")
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    ready = threading.Thread(target=writer.wait_until_ready)
    ready.start()
    reader.wait_until_ready()
    ready.join()
    return writer, reader


def test_a_reader_that_waits_hears_of_the_end(queue):
    _, reader = queue
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(reader.dequeue)
        reader.shutdown()
        with pytest.raises(RuntimeError, match="cancelled"):
            waiting.result(60)


def test_what_is_sent_late_is_read(queue):
    writer, reader = queue
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(reader.dequeue)
        time.sleep(2 * engine_queues.POLL_INTERVAL_S)
        writer.enqueue("late")
        assert waiting.result(60) == "late"


def test_a_time_limit_holds(queue):
    with pytest.raises(TimeoutError):
        queue[1].dequeue(timeout=engine_queues.POLL_INTERVAL_S / 10)
