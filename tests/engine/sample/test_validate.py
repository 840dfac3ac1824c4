# SPDX-License-Identifier: Apache-2.0
import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from vllm_metal.engine.sample import validate


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("thinking_token_budget", 100),
        ("watermarking", True),
        ("prompt_logprob_token_ids", [[1, 2]]),
        ("prompt_logprob_start", 3),
        ("trace_decode_token_ids", [1]),
    ],
)
def test_unsupported_parameters_are_refused_by_name(name, value):
    with pytest.raises(VLLMValidationError, match=f"^{name} is not supported"):
        validate(SamplingParams(**{name: value}))


def test_everything_vllm_warms_up_with_is_accepted():
    params = SamplingParams.for_sampler_warmup()
    params.watermarking = False  # asked for only where the engine has a watermark
    validate(params)
    validate(SamplingParams(logprob_token_ids=[1, 2], flat_logprobs=True, watermarking=None))
