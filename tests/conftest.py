# SPDX-License-Identifier: Apache-2.0
"""Before anything imports MLX: its CPU device at full precision, and no network."""

import os
import signal

from cpu import use_cpu

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
use_cpu()
# What a shell starts in the background ignores Ctrl-C, and so would all that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
