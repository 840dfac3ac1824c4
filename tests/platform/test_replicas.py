# SPDX-License-Identifier: Apache-2.0
"""Data parallel: each rank is a whole engine with its share of the machine."""

import json
import multiprocessing
import pickle
from argparse import Namespace

import pytest
from patches.vllm_patches.doubles import MODEL
from vllm.engine.arg_utils import EngineArgs

from vllm_metal.engine.memory.share import Share
from vllm_metal.patches.vllm_patches import memory_shares, replicas

EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
BOTH = pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])


@pytest.fixture
def configure(tmp_path):
    def configured(experts=False, headless=False, **options):
        config = MODEL | EXPERTS if experts else MODEL
        (tmp_path / "config.json").write_text(json.dumps(config))
        made = EngineArgs(
            model=str(tmp_path), skip_tokenizer_init=True, max_model_len=256, **options
        )
        return made.create_engine_config(headless=headless)

    return configured


def in_the_engine(config, rank, local_rank):
    """Returns the configuration in a rank's process, as vLLM changes it there."""
    config = pickle.loads(pickle.dumps(config))
    parallel = config.parallel_config
    parallel.assigned_physical_gpu_ids = [local_rank]
    parallel.data_parallel_rank_local, parallel.data_parallel_index = local_rank, rank
    parallel.reconfigure_for_independent_dp_rank()
    process = multiprocessing.current_process()
    name, process.name = process.name, f"EngineCore_DP{rank}"
    try:
        config.__post_init__()
    finally:
        process.name = name
    return config


@BOTH
def test_no_launcher_sees_lock_step(configure, experts):
    assert configure(experts).model_config.is_moe == experts
    front = configure(experts, data_parallel_size=2, data_parallel_size_local=1)
    headless = configure(
        experts,
        headless=True,
        data_parallel_size=2,
        data_parallel_size_local=1,
        data_parallel_start_rank=1,
    )
    for config in (front, headless, in_the_engine(headless, 1, 0)):
        assert not config.model_config.is_moe
        assert not config.parallel_config.is_moe_model
        assert config.parallel_config.distributed_executor_backend == "uni"
    assert front.needs_dp_coordinator  # which tells the server how long the queues are


def test_ranks_of_one_machine_share_its_memory(configure):
    config = configure(data_parallel_size=3, data_parallel_size_local=2)
    for rank in (0, 1):
        share = memory_shares.given(in_the_engine(config, rank, rank).parallel_config)
        assert isinstance(share, Share) and share.workers == 2 and share.in_use > 0
    alone = configure(data_parallel_size=2, data_parallel_size_local=1)
    assert memory_shares.given(in_the_engine(alone, 0, 0).parallel_config) is None
    assert replicas.is_rank(in_the_engine(alone, 0, 0).parallel_config)
    assert not replicas.is_rank(configure().parallel_config)


@pytest.mark.parametrize(("machines", "here"), [(1, 4), (2, 2), (4, 1)])
def test_ranks_of_one_model_share_the_memory_of_their_machine(configure, machines, here):
    config = configure(
        pipeline_parallel_size=2,
        tensor_parallel_size=2,
        nnodes=machines,
        distributed_executor_backend="mp",
    )
    share = memory_shares.given(pickle.loads(pickle.dumps(config)).parallel_config)
    assert here == (1 if share is None else share.workers)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (
            {"data_parallel_size_local": 1, "data_parallel_hybrid_lb": True},
            "--data-parallel-hybrid-lb with --data-parallel-size-local 1 .*independent servers",
        ),
        ({"experts": True, "data_parallel_rank": 1}, "--data-parallel-rank.*independent servers"),
        ({"data_parallel_rank": 1}, "launch independent vLLM instances"),  # vLLM's own words
        ({"distributed_executor_backend": "mp"}, "--distributed-executor-backend mp"),
        (
            {
                "kv_transfer_config": {
                    "kv_connector": "MetalKVConnector",
                    "kv_role": "kv_both",
                    "kv_connector_extra_config": {"listen": "127.0.0.1:9100"},
                }
            },
            "'listen' with --data-parallel-size-local 2 .*port of its own",
        ),
        ({"experts": True, "enable_mfu_metrics": True}, "--enable-mfu-metrics with --data"),
    ],
)
def test_what_ranks_cannot_do_is_named(configure, options, named):
    from vllm.config import KVTransferConfig

    if "kv_transfer_config" in options:
        options = {"kv_transfer_config": KVTransferConfig(**options["kv_transfer_config"])}
    with pytest.raises(ValueError, match=named):
        configure(data_parallel_size=2, **options)


def test_peers_of_one_rank_a_machine_may_be_asked(configure):
    from vllm.config import KVTransferConfig

    transfer = KVTransferConfig(
        kv_connector="MetalKVConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"listen": "127.0.0.1:9100"},
    )
    ranks = {"data_parallel_size": 2, "data_parallel_size_local": 1}
    configure(kv_transfer_config=transfer, **ranks)


def test_ranks_that_share_a_collective_are_named(configure, monkeypatch):
    """vLLM's offline ranks: one process each, with some of the prompts, in step."""
    monkeypatch.setenv("VLLM_DP_SIZE", "2")
    with pytest.raises(ValueError, match=r"VLLM_DP_SIZE \(.*split the prompts"):
        configure(experts=True)


def test_devices_that_a_user_names_are_still_refused(configure):
    with pytest.raises(ValueError, match="--device-ids"):
        configure(data_parallel_size=2, device_ids=[0, 1])
    with pytest.raises(ValueError, match="--device-ids"):
        configure(device_ids=[0])


@pytest.mark.parametrize(
    ("given", "headless", "count"), [(None, False, 1), (3, False, 3), (None, True, None)]
)
def test_one_front_end_answers_unless_its_user_wants_more(given, headless, count):
    args = Namespace(api_server_count=given, headless=headless)
    replicas.answer_with_one_front_end(args)
    assert args.api_server_count == count
