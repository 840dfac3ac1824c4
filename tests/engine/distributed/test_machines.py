# SPDX-License-Identifier: Apache-2.0
"""Ranks that share a machine, as assigned by vLLM or Ray."""

import os
import sys
from types import SimpleNamespace

import pytest
from vllm.config import ParallelConfig

from vllm_metal.engine.distributed import groups, machines


def found(monkeypatch, parallel, rank, others, init_method):
    """Returns the result of `rank`, given the others' values."""

    def share(mine):
        return [mine if each is None else each for each in others]

    monkeypatch.setattr(groups, "share", share)
    return machines.find(parallel, rank, init_method)


@pytest.mark.parametrize(("rank", "here"), [(0, {0: 0, 1: 41}), (3, {2: 42, 3: 0})])
def test_nodes_have_as_many_ranks_each(monkeypatch, rank, here):
    nodes = {"nnodes": 2, "master_addr": "10.0.0.1", "distributed_executor_backend": "mp"}
    parallel = ParallelConfig(pipeline_parallel_size=4, **nodes)
    others = [("0", 40), ("0", 41), ("1", 42), ("1", 43)]
    others[rank] = None
    machine = found(monkeypatch, parallel, rank, others, "file:///nowhere")
    assert machine.pids == here | {rank: os.getpid()}
    assert machine.host_of_first == "10.0.0.1"


def test_ranks_of_one_machine_meet_there(monkeypatch):
    parallel = ParallelConfig(pipeline_parallel_size=2, distributed_executor_backend="mp")
    machine = found(monkeypatch, parallel, 1, [("0", 40), None], "file:///nowhere")
    assert machine == machines.Machine("127.0.0.1", {0: 40, 1: os.getpid()})


def test_ray_says_where_a_rank_is_and_vllm_where_the_first_one_listens(monkeypatch):
    context = SimpleNamespace(get_node_id=lambda: "second")
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get_runtime_context=lambda: context))
    parallel = ParallelConfig(pipeline_parallel_size=3, distributed_executor_backend="mp")
    parallel.distributed_executor_backend = "ray"
    others = [("first", 40), None, ("second", 42)]
    machine = found(monkeypatch, parallel, 1, others, "tcp://10.0.0.1:2900")
    assert machine == machines.Machine("10.0.0.1", {1: os.getpid(), 2: 42})
