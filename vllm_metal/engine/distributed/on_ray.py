# SPDX-License-Identifier: Apache-2.0
"""Has Ray start the ranks of an engine with what they read of their environment at once."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import ParallelConfig


def carry(parallel: ParallelConfig, names: Iterable[str]) -> None:
    """Adds variables of this process to those of the ranks, where it has them.

    vLLM's executor tells its ranks all variables, but after they have imported what is there; a
    platform reads its own earlier.

    Args:
        parallel: of an engine that Ray starts, before its executor is made.
        names: of variables.
    """
    from ray.runtime_env import RuntimeEnv

    given = dict(parallel.ray_runtime_env or {})
    mine = {name: os.environ[name] for name in names if name in os.environ}
    given["env_vars"] = (given.get("env_vars") or {}) | mine
    parallel.ray_runtime_env = RuntimeEnv(**given)
