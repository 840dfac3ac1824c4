# SPDX-License-Identifier: Apache-2.0
"""Before anything imports MLX: its CPU device at full precision, and no network."""

import os
import signal

from cpu import use_cpu

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# xdist's workers share the cores: a BLAS that takes them all in each worker spends most of its time
# waiting for the others'. Measured on two cores: a third of the processor time with one thread each.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    threads = (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, threads)))
use_cpu()
# What a shell starts in the background ignores Ctrl-C, and so would all that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
