# SPDX-License-Identifier: Apache-2.0
"""A single rank joins no group; several ranks wait a bounded time."""

import pytest
from vllm.config import ParallelConfig

from vllm_metal.engine.distributed import groups


def test_a_rank_that_is_all_joins_nothing(monkeypatch):
    monkeypatch.setattr("torch.distributed.init_process_group", pytest.fail)
    groups.join(ParallelConfig(), 0, 0, "file:///nowhere")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (groups.TIMEOUT_S, groups.TIMEOUT_S)),
        ({"distributed_timeout_seconds": 7}, (7, 7)),
        ({"cpu_distributed_timeout_seconds": 9}, (groups.TIMEOUT_S, 9)),
    ],
)
def test_timeouts_are_the_users_or_minutes(given, expected):
    parallel = ParallelConfig(pipeline_parallel_size=2, **given)
    groups.set_timeouts(parallel)
    assert (
        parallel.distributed_timeout_seconds,
        parallel.cpu_distributed_timeout_seconds,
    ) == expected
