# SPDX-License-Identifier: Apache-2.0
"""Request options beside speculation."""

import pytest
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError

from vllm_metal.engine.models.embedded import embedded_model_path
from vllm_metal.patches.vllm_patches import speculation


@pytest.fixture(scope="module")
def config():
    """Makes the configuration as in every process that checks requests."""
    return EngineArgs(
        model=str(embedded_model_path(dequantize=True)),
        max_model_len=256,
        speculative_config={"method": "ngram", "num_speculative_tokens": 2},
    ).create_engine_config()


def verify(params, config):
    params.verify(config.model_config, config.speculative_config, None, None)


@pytest.mark.parametrize(
    "options", [{"min_p": 0.1}, {"logit_bias": {5: 2.0}}, {"min_p": 0.1, "logit_bias": {5: -100}}]
)
def test_min_p_and_logit_bias_are_accepted_and_left_as_they_are(config, options):
    params = SamplingParams(temperature=1.0, **options)
    verify(params, config)
    assert {name: getattr(params, name) for name in options} == options


def test_what_else_is_wrong_with_them_is_still_said(config):
    with pytest.raises(VLLMValidationError, match="out-of-vocab"):
        verify(SamplingParams(logit_bias={10**6: 1.0}), config)


def test_other_refusals_stay(config, monkeypatch):
    """vLLM may reject another parameter beside speculation."""

    def refuse(self, speculative_config):
        if self.min_p or self.logit_bias or self.presence_penalty:
            raise VLLMValidationError("not supported with speculative decoding")

    monkeypatch.setattr(SamplingParams, "_validate_spec_decode", refuse)
    speculation.allow_min_p_and_logit_bias()
    verify(SamplingParams(min_p=0.1, logit_bias={5: 2.0}), config)
    with pytest.raises(VLLMValidationError, match="not supported"):
        verify(SamplingParams(min_p=0.1, presence_penalty=0.5), config)


def test_vllm_is_changed_once():
    before = SamplingParams._validate_spec_decode
    speculation.allow_min_p_and_logit_bias()
    assert SamplingParams._validate_spec_decode is before
