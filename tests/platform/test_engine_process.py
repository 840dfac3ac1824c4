# SPDX-License-Identifier: Apache-2.0
"""Configuration in an engine's own process, which vLLM completes again."""

import dataclasses
import json
import os
import pickle
import subprocess
import sys

import pytest
from engine.models import recurrent
from patches.vllm_patches import doubles
from vllm.engine.arg_utils import EngineArgs

from vllm_metal.patches.vllm_patches import memory_shares

#: vLLM's EngineCoreProc does this to its parent's configuration before it makes an
#: executor and a scheduler; it checks the configuration afterwards.
ENGINE = """
import multiprocessing, pickle, sys
from vllm import SamplingParams
from vllm.plugins import load_general_plugins
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.request import Request
from patches.vllm_patches import doubles

config, ranks = pickle.load(sys.stdin.buffer)

def salt_of_a_step():
    scheduler = doubles.make_scheduler(config, num_blocks=8)
    scheduler.add_request(Request("a", [1, 2], SamplingParams(), None, cache_salt="pepper"))
    (sent,) = scheduler.schedule().scheduled_new_reqs
    return vars(sent).get("cache_salt")

print("SALTS", salt_of_a_step(), end=" ")
multiprocessing.current_process().name = "EngineCore_0"
load_general_plugins()
print(salt_of_a_step(), "vllm_metal.engine.worker.worker" in sys.modules)
ranks.__post_init__()
"""


@pytest.mark.more
def test_a_scheduler_is_changed_without_a_worker_in_its_process(tmp_path):
    """A model that vLLM cannot pipeline is checked again."""
    (tmp_path / "config.json").write_text(json.dumps(doubles.MODEL))
    config = doubles.folder_config(str(tmp_path))
    folder = recurrent.write_model(recurrent.FAMILIES["mamba2"], tmp_path / "model")
    ranks = EngineArgs(folder, skip_tokenizer_init=True, pipeline_parallel_size=2)
    done = subprocess.run(
        [sys.executable, "-c", ENGINE],
        input=pickle.dumps((config, ranks.create_engine_config())),
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().splitlines()[-1] == "SALTS None pepper False"


#: Configurations, by model and by the options that the platform completes.
CONFIGURATIONS = {
    "a plain model": (doubles.MODEL, {}),
    "drafts": (
        doubles.MODEL,
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
    ),
    "a disk": (doubles.MODEL, {"additional_config": {"prefix_cache_dir": "kv"}}),
    "a producer that drafts nothing": (
        doubles.MODEL,
        {
            "speculative_config": {"method": "suffix", "num_speculative_tokens": 2},
            "kv_transfer_config": {
                "kv_connector": "MetalKVConnector",
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {"listen": "127.0.0.1:1", "outbox_bytes": 1 << 20},
            },
        },
    ),
    "ranks": (doubles.MODEL, {"pipeline_parallel_size": 2}),
    "adapters": (doubles.MODEL, {"enable_lora": True}),
    "quantized K/V": (doubles.MODEL, {"kv_cache_dtype": "fp8"}),
    "states": ("falcon_h1", {}),
    "states, a block size": ("falcon_h1", {"block_size": 32}),
    "states, no prefixes": ("falcon_h1", {"enable_prefix_caching": False}),
    "states alone": ("mamba2", {}),
}


def settled(config):
    """Returns all configuration fields except those that vLLM randomizes."""
    parts = {name: getattr(config, name) for name in config.__dataclass_fields__}
    found = {
        f"{name}.{field.name}": repr(getattr(part, field.name, None))
        for name, part in parts.items()
        if dataclasses.is_dataclass(part) and name != "compilation_config"
        for field in dataclasses.fields(part)
    }
    # vLLM derives it from `enable_prefix_caching`; only the start of an engine reads it.
    found.pop("cache_config.mamba_cache_mode")
    found["share"] = repr(memory_shares.given(config.parallel_config))
    return found


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_second_check_changes_nothing_that_was_decided(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, options = CONFIGURATIONS[name]
    if isinstance(model, str):
        folder = recurrent.write_model(recurrent.FAMILIES[model], tmp_path / "model")
    else:
        folder = str(tmp_path)
        (tmp_path / "config.json").write_text(json.dumps(model))
    made = EngineArgs(model=folder, skip_tokenizer_init=True, **options)
    config = pickle.loads(pickle.dumps(made.create_engine_config()))
    # A worker's and vLLM's decisions on the pool, where the memory holds a shorter context.
    cache = config.cache_config
    if isinstance(model, str):
        cache.block_size = 48
        cache.mamba_block_size = 48 if cache.enable_prefix_caching else cache.mamba_block_size
    config.model_config.max_model_len //= 2
    cache.num_gpu_blocks = 100
    before = settled(config)
    for _ in range(2):
        config.__post_init__()
        assert settled(config) == before
