# SPDX-License-Identifier: Apache-2.0
"""Every sampling parameter changes the answer, or is rejected."""

import pytest
from vllm import PoolingParams, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.pooling_params import LateChunkingParams, LateInteractionParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.input_processor import InputProcessor
from vllm_settings.configured import configure
from vllm_settings.row import differences, of_kind
from vllm_settings.sampling import POOLING_PARAMS, SAMPLING_PARAMS

#: A value that each refused field is refused for.
REFUSED = {
    "thinking_token_budget": 5,
    "watermarking": True,
    "prompt_logprob_token_ids": [[1]],
    "prompt_logprob_start": 1,
    "trace_decode_token_ids": [1],
}
POOLING = {
    "use_activation": True,
    "dimensions": 8,
    "step_tag_id": 1,
    "returned_token_ids": [1],
    "task": "embed",
    "requires_token_ids": True,
    "skip_reading_prefix_cache": True,
    "late_interaction_params": LateInteractionParams("cache_query", "a"),
    "late_chunking_params": LateChunkingParams(chunk_size=4),
    "extra_kwargs": {"a": 1},
    "output_kind": RequestOutputKind.DELTA,
}


@pytest.fixture(scope="module")
def processor(folder):
    return InputProcessor(configure(folder))


@pytest.mark.parametrize(
    ("table", "fields", "cases"),
    [
        (SAMPLING_PARAMS, SamplingParams.__struct_fields__, REFUSED),
        (POOLING_PARAMS, PoolingParams.__struct_fields__, POOLING),
    ],
    ids=["SamplingParams", "PoolingParams"],
)
def test_every_field_has_a_row_and_a_case(table, fields, cases):
    lacking, unknown = differences(table, fields)
    assert not lacking, f"say in tests/vllm_settings/sampling.py what becomes of {lacking}"
    assert not unknown, f"vLLM has no such fields: {unknown}"
    assert set(of_kind(table, "refused")) == cases.keys()


@pytest.mark.parametrize("field", REFUSED)
def test_a_refused_field_is_named(processor, field):
    prompt = {"type": "token", "prompt_token_ids": [1, 2]}
    params = SamplingParams(**{field: REFUSED[field]})
    with pytest.raises(VLLMValidationError, match=field):
        processor.process_inputs("a", prompt, params, ("generate",))


@pytest.mark.parametrize("field", POOLING)
def test_a_pooling_request_is_refused(processor, field):
    prompt = {"type": "token", "prompt_token_ids": [1, 2]}
    with pytest.raises(VLLMValidationError, match=r"does not support pooling|output_kind has to"):
        params = PoolingParams(**{field: POOLING[field]})
        processor.process_inputs("a", prompt, params, ("generate",))
