# SPDX-License-Identifier: Apache-2.0
"""In-process engines, because a process forked after MLX was used would hang."""

import os

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from engine.models.unfused import unfused  # noqa: F401 - pytest finds it here
