# SPDX-License-Identifier: Apache-2.0
"""A request's cache_salt reaches the worker, and nothing of the caller's is written to."""

import json
from copy import deepcopy

import pytest
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.engine.input_processor import InputProcessor
from vllm_patches import unpatched

from vllm_metal.batch.requests import BlockTables, Requests


@pytest.fixture(scope="module")
def processor(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(unpatched.MODEL))
    args = EngineArgs(model=str(folder), skip_tokenizer_init=True, max_model_len=256)
    return InputProcessor(args.create_engine_config())


def salt_at_the_worker(processor, params, salt):
    prompt = {"type": "token", "prompt_token_ids": [1, 2]}
    if salt is not None:
        prompt["cache_salt"] = salt
    request = processor.process_inputs("a", prompt, params, ("generate",))
    data = NewRequestData(
        req_id="a",
        prompt_token_ids=request.prompt_token_ids,
        mm_features=[],
        sampling_params=request.sampling_params,
        pooling_params=None,
        block_ids=([0],),
        num_computed_tokens=0,
        lora_request=None,
    )
    return Requests(1, 16, BlockTables(1, 1, 1)).add_request(data).cache_salt


@pytest.mark.parametrize("extra", [None, {"mine": [1]}])
def test_the_callers_parameters_stay_as_they_were(processor, extra):
    params = SamplingParams(extra_args=extra)
    before, printed = deepcopy(params), repr(params)
    for salt in ("pepper", "thyme", None):
        assert salt_at_the_worker(processor, params, salt) == salt
        assert params == before and repr(params) == printed


@pytest.mark.parametrize("extra", [None, {"mine": [1]}])
def test_so_do_extra_arguments_that_vllm_does_not_copy(processor, extra):
    """vLLM's own servers make such parameters, and vLLM itself writes to other fields of them."""
    params = SamplingParams(extra_args=deepcopy(extra), skip_clone=True)
    kept = params.extra_args
    for salt in ("pepper", "thyme", None):
        assert salt_at_the_worker(processor, params, salt) == salt
        assert params.extra_args is kept and kept == extra


def test_a_client_chooses_no_salt_by_another_name(processor):
    found = SamplingParams()
    assert salt_at_the_worker(processor, found, "pepper") == "pepper"
    prompt = {"type": "token", "prompt_token_ids": [1], "cache_salt": "pepper"}
    sent = processor.process_inputs("a", prompt, found, ("generate",)).sampling_params
    forged = SamplingParams(extra_args=dict(sent.extra_args))
    assert salt_at_the_worker(processor, forged, None) is None
