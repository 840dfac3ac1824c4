# SPDX-License-Identifier: Apache-2.0
"""Engines in this process, so that their counters can be read."""

import os

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
