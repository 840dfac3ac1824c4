# SPDX-License-Identifier: Apache-2.0
"""Ranks use the memory that `vllm-metal fit` estimates, and share a machine's memory."""

import json
import sys
from functools import partial

import pytest
from cli.fit.models import write
from e2e.harness import engine
from peaks import least_peak

from vllm_metal.cli.main import main
from vllm_metal.engine.kv_cache.scatter import SCATTER
from vllm_metal.engine.memory import profile
from vllm_metal.engine.models.loader import weight_bytes
from vllm_metal.patches.vllm_patches import memory_shares

pytestmark = pytest.mark.slow

POOL = 16 << 20  # bytes of each rank
ROWS, REQUESTS, LONGEST = 4096, 8, 512
ROUNDED = 16 << 20  # up to a whole number of these is a peak rounded


def found_by(worker):
    """Returns a rank's measurements; called in its process."""
    networks, config = worker.networks, worker.vllm_config
    run = partial(profile.profile_step, networks.target, networks.layers, config, SCATTER)
    run()  # what only a first one takes
    specs = worker.get_kv_cache_spec().values()
    share = memory_shares.given(worker.parallel_config)
    return {
        "weights": weight_bytes(worker.get_model()),
        "token_bytes": sum(spec.page_size_bytes // spec.block_size for spec in specs),
        "step": least_peak(run),
        "share": None if share is None else (share.workers, share.in_use > 0),
    }


def said_of(model, capsys, *shape):
    """Returns `fit`'s estimates of each rank on this machine."""
    line = ["fit", model, "--json", "--context", str(LONGEST), "--max-num-seqs", str(REQUESTS)]
    line += ["--max-num-batched-tokens", str(ROWS)]
    main([*line, *shape, "--nnodes", "1"])
    return json.loads(capsys.readouterr().out)["ranks"]


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are those of the CPU device")
@pytest.mark.parametrize(
    ("layers", "heads", "partition"), [(2, 1, None), (2, 1, "1,2"), (3, 1, None), (2, 2, None)]
)
def test_each_rank(tiny, tmp_path, capsys, monkeypatch, layers, heads, partition):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    if partition is not None:
        monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", partition)
    # One with windows; one whose heads are shared.
    model = tiny if heads > 1 else str(write(tmp_path, "gemma3, windows"))
    shape = ("--pipeline-parallel-size", str(layers), "--tensor-parallel-size", str(heads))
    told = said_of(model, capsys, *shape)
    options = {"max_model_len": LONGEST, "max_num_batched_tokens": ROWS, "max_num_seqs": REQUESTS}
    sizes = {"pipeline_parallel_size": layers, "tensor_parallel_size": heads}
    options |= {"kv_cache_memory_bytes": POOL, "skip_tokenizer_init": True}
    with engine(model, **options, **sizes) as llm:
        found = llm.collective_rpc(found_by)
        blocks = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
    assert len(found) == len(told) == layers * heads
    room = []
    for of_rank, rank in zip(found, told, strict=True):
        cache = rank["kv_cache"]["auto"]
        assert of_rank["weights"] == rank["weights"]
        assert of_rank["token_bytes"] == cache["token_bytes"]
        assert 0.85 * of_rank["step"] <= cache["step_peak"] <= 1.15 * of_rank["step"] + ROUNDED
        assert of_rank["share"] == (layers * heads, True)
        room.append(POOL // (cache["block_bytes"]))
    # The least of them is what all have.
    assert blocks == min(room)
