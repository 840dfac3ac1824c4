# SPDX-License-Identifier: Apache-2.0
"""Makes Ray start the ranks with environment variables that they read on import."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import ParallelConfig


def carry(parallel: ParallelConfig, names: Iterable[str]) -> None:
    """Passes environment variables to the ranks; call it before the executor is created."""
    from ray.runtime_env import RuntimeEnv

    # vLLM's executor sends all variables, but after the ranks have imported modules; a platform
    # reads its own earlier.
    given = dict(parallel.ray_runtime_env or {})
    mine = {name: os.environ[name] for name in names if name in os.environ}
    given["env_vars"] = (given.get("env_vars") or {}) | mine
    parallel.ray_runtime_env = RuntimeEnv(**given)
