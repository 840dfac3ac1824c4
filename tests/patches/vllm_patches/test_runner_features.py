# SPDX-License-Identifier: Apache-2.0
"""vLLM's lists of what its model runners lack name nothing that this plugin's worker does."""

import copy
import inspect

import pytest
from transformers import PreTrainedConfig
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from vllm_metal.engine.models.embedded import embedded_model_path
from vllm_metal.patches.vllm_patches.runner_features import OURS

V1 = "_get_v1_model_runner_unsupported_features"
V2 = "_get_v2_model_runner_unsupported_features"
MIXED = ["sliding_attention", "full_attention"]
#: method, keys of the drafter's config.json, fields of the configuration of speculation, vLLM's
#: list, and what stays in it.
CASES = {
    "dspark": ("dspark", {}, {}, V1, []),
    "dspark that verifies less": (
        "dspark",
        {},
        {"enable_adaptive_verification": True},
        V1,
        ["adaptive draft verification"],
    ),
    "mixed windows": ("dflash", {"layer_types": MIXED}, {}, V1, []),
    "candidate heads": ("dflash", {"architectures": ["DFlash2DraftModel"]}, {}, V1, []),
    "a refiner": (
        "dflash",
        {"architectures": ["Qwen3XPressModel"], "layer_types": MIXED},
        {},
        V1,
        ["xpress speculative decoding"],
    ),
    "suffix": ("suffix", {}, {}, V2, []),
    "a class of the user's": (
        "custom_class",
        {},
        {},
        V2,
        ["speculative method 'custom_class'"],
    ),
}


@pytest.fixture(scope="module")
def engine_config():
    speculation = {"method": "ngram", "num_speculative_tokens": 2}
    return EngineArgs(
        model=str(embedded_model_path(dequantize=True)),
        max_model_len=256,
        speculative_config=speculation,
    ).create_engine_config()


def configured(engine_config, method, keys, fields):
    """Makes a configuration with vLLM's own objects, for vLLM's checks."""
    config = copy.copy(engine_config)
    speculation = config.speculative_config = copy.copy(engine_config.speculative_config)
    speculation.method = method
    for name, value in fields.items():
        setattr(speculation, name, value)
    draft = speculation.draft_model_config = copy.copy(config.model_config)
    draft.hf_config = PreTrainedConfig(**keys)
    draft.model_arch_config = copy.copy(draft.model_arch_config)
    draft.model_arch_config.architectures = keys.get("architectures", ["DFlashDraftModel"])
    return config


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_only_what_is_not_ours_is_refused(engine_config, case):
    method, keys, fields, name, stays = case
    config = configured(engine_config, method, keys, fields)
    assert getattr(config, name)() == stays
    theirs = inspect.unwrap(getattr(VllmConfig, name))(config)
    taken = set(theirs) - set(stays)
    assert taken <= OURS
    assert taken or stays == theirs


def test_vllm_words_each_feature_so(engine_config):
    listed = set()
    for method, keys, fields, name, _ in CASES.values():
        config = configured(engine_config, method, keys, fields)
        listed.update(inspect.unwrap(getattr(VllmConfig, name))(config))
    assert listed >= OURS


class Picky(AdapterLogitsProcessor):
    """A user's processor with vLLM's first interface that rejects top_k of 3."""

    @classmethod
    def validate_params(cls, params):
        if params.top_k == 3:
            raise ValueError("not 3")

    def is_argmax_invariant(self):
        return True

    def new_req_logits_processor(self, params):
        return None


@pytest.mark.parametrize("second", ["0", "1"])
def test_processors_have_one_interface(monkeypatch, second):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", second)
    config = EngineArgs(
        model=str(embedded_model_path(dequantize=True)),
        max_model_len=256,
        logits_processors=[Picky],
    ).create_engine_config()
    assert config.use_v2_model_runner == (second == "1")
    processor = InputProcessor(config)
    processor.validate_logits_processors_params(SamplingParams(top_k=2))
    with pytest.raises(VLLMValidationError, match="not 3"):
        processor.validate_logits_processors_params(SamplingParams(top_k=3))
