# SPDX-License-Identifier: Apache-2.0
"""The platform's answers to vLLM, and its configuration changes."""

import json
import os
import subprocess
import sys

import pytest
import torch
from engine.models import recurrent
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_metal.patches.vllm_patches import request_sizes

LOOKUP = {"method": "ngram", "num_speculative_tokens": 2}


def config(model, **options):
    return EngineArgs(model=model, max_model_len=256, **options).create_engine_config()


@pytest.fixture(scope="module")
def model():
    from vllm_metal.engine.models.embedded import embedded_model_path

    return str(embedded_model_path(dequantize=True))


def test_an_engine_drops_compilations_that_nobody_waits_for(model, monkeypatch):
    called = []
    monkeypatch.setattr(request_sizes, "drop_compilations", lambda: called.append(True))
    config(model)
    assert called


#: Imports a part of vLLM that needs the platform before it exists.
PROCESS = """
import json, sys
import vllm.distributed
from vllm.model_executor.models import ModelRegistry
from vllm.platforms import current_platform
from vllm.utils.system_utils import get_mp_context

current_platform.pre_register_and_update()
names = ("LlamaForCausalLM", "Qwen3_5ForCausalLM", "EagleLlamaForCausalLM")
generates = [ModelRegistry._try_inspect_model_cls(name).is_text_generation_model for name in names]
apart = {"interfaces", "interfaces_base", "registry"}
classes = [name for name in sys.modules if name.startswith("vllm.model_executor.models.")]
print(json.dumps({
    "platform": type(current_platform).__name__,
    "generates": generates,
    "imported": [name for name in classes if name.rsplit(".")[-1] not in apart],
    "starts": get_mp_context().get_start_method(),
}))
"""


@pytest.mark.more
def test_a_process_has_the_platform_and_no_more_than_it_asks_for():
    """No model class is imported, and Linux's own choice is kept."""
    kept = {k: v for k, v in os.environ.items() if k != "VLLM_WORKER_MULTIPROC_METHOD"}
    command = [sys.executable, "-c", PROCESS]
    done = subprocess.run(command, env=kept, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "platform": "MetalPlatform",
        "generates": [True] * 3,
        "imported": [],
        "starts": "spawn" if sys.platform == "darwin" else "fork",
    }


def test_vllm_has_picked_this_platform():
    assert type(current_platform).__name__ == "MetalPlatform"
    assert current_platform.is_out_of_tree()


def test_defaults_of_the_cpu_device(model):
    found = config(model)
    assert found.model_config.dtype == torch.float32
    assert found.cache_config.block_size == 16
    assert found.scheduler_config.async_scheduling
    assert found.scheduler_config.max_num_batched_tokens == 512
    assert found.cache_config.enable_prefix_caching
    assert found.parallel_config.worker_cls == "vllm_metal.engine.worker.worker.MetalWorker"


@pytest.mark.parametrize(("asked", "found"), [(None, True), (False, False)])
def test_prefixes_of_states_are_cached_too_unless_the_user_says_no(tmp_path, asked, found):
    model = recurrent.write_model(recurrent.FAMILIES["mamba2"], tmp_path / "mamba2")
    made = config(model, skip_tokenizer_init=True, enable_prefix_caching=asked)
    assert made.model_config.is_attention_free
    assert made.cache_config.enable_prefix_caching is found


def test_explicit_settings_win_over_the_defaults(model):
    found = config(model, max_num_batched_tokens=1024, max_num_seqs=7, async_scheduling=False)
    assert found.scheduler_config.max_num_batched_tokens == 1024
    assert found.scheduler_config.max_num_seqs == 7
    assert not found.scheduler_config.async_scheduling


def test_a_block_size_that_the_kernels_are_not_written_for_is_named(model):
    with pytest.raises(ValueError, match=r"--block-size 8 is not supported: choose one of"):
        config(model, block_size=8)


@pytest.mark.parametrize("method", ["ngram", "ngram_gpu"])
def test_speculation_leaves_async_scheduling_on(model, method):
    found = config(model, speculative_config=LOOKUP | {"method": method})
    assert found.scheduler_config.async_scheduling
    found.__post_init__()  # as the engine's own process does
    assert found.scheduler_config.async_scheduling
    off = config(model, speculative_config=LOOKUP | {"method": method}, async_scheduling=False)
    assert not off.scheduler_config.async_scheduling


def test_a_request_parameter_that_cannot_be_honored_is_named():
    with pytest.raises(VLLMValidationError, match="thinking_token_budget"):
        current_platform.validate_request({}, SamplingParams(thinking_token_budget=5))
    current_platform.validate_request({}, SamplingParams(temperature=0.5, top_k=3, logprobs=2))


@pytest.mark.parametrize(
    ("options", "settled"),
    [
        ({}, "auto"),
        ({"kv_cache_dtype": "fp8"}, "fp8_per_token_head"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "fp8_per_token_head"),
        ({"kv_cache_dtype": "int8"}, "int8_per_token_head"),
        ({"kv_cache_dtype": "int8_per_token_head"}, "int8_per_token_head"),
        ({"kv_cache_dtype": "float16", "dtype": "float16"}, "float16"),
        ({"kv_cache_dtype": "fp8", "speculative_config": LOOKUP}, "fp8_per_token_head"),
    ],
)
def test_kv_cache_dtypes_are_settled_by_vllms_own_names(model, options, settled):
    found = config(model, **options)
    found.__post_init__()  # as the engine's own process does
    assert found.cache_config.cache_dtype == settled


def test_the_command_line_takes_int8_where_it_takes_fp8():
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    for name in ("fp8", "int8", "auto"):
        assert parser.parse_args(["--kv-cache-dtype", name]).kv_cache_dtype == name
