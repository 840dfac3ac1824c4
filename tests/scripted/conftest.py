# SPDX-License-Identifier: Apache-2.0
"""In-process engines with readable counters."""

import os

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
