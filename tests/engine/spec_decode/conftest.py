# SPDX-License-Identifier: Apache-2.0
"""Engines in this process: one that is forked after MLX was used here would never answer."""

import os

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from engine.models.unfused import unfused  # noqa: F401 - pytest finds it here
