# SPDX-License-Identifier: Apache-2.0
"""Ranks started by Ray get the variables that are read at import."""

import sys
from types import SimpleNamespace

import pytest
from vllm.config import ParallelConfig

from vllm_metal.engine.distributed import on_ray


@pytest.fixture
def parallel(monkeypatch):
    """Parallel configuration of an engine, with mappings as worker environments."""
    monkeypatch.setitem(sys.modules, "ray.runtime_env", SimpleNamespace(RuntimeEnv=dict))
    monkeypatch.setenv("SET_HERE", "1")
    monkeypatch.delenv("NOT_SET", raising=False)
    return ParallelConfig(pipeline_parallel_size=2, distributed_executor_backend="mp")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, {"env_vars": {"SET_HERE": "1"}}),
        ({"pip": ["a"]}, {"pip": ["a"], "env_vars": {"SET_HERE": "1"}}),
        ({"env_vars": {"OWN": "2"}}, {"env_vars": {"OWN": "2", "SET_HERE": "1"}}),
    ],
)
def test_variables_that_are_set_are_added(parallel, given, expected):
    parallel.ray_runtime_env = given
    for _ in range(2):  # vLLM checks a configuration in each of its processes
        on_ray.carry(parallel, ["SET_HERE", "NOT_SET"])
    assert parallel.ray_runtime_env == expected
