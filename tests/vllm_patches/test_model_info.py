# SPDX-License-Identifier: Apache-2.0
"""Our answers for models, against vLLM's own of its torch classes."""

import json
import os
import subprocess
import sys

import pytest
from vllm.model_executor.models import ModelRegistry

from vllm_metal.vllm_patches.model_info import (
    ServedModel,
    answer_for_model_classes,
    served_architectures,
)

#: What vLLM answers of every class in the registry as it comes, in a process without a platform of
#: ours; an error where the class cannot be imported.
THEIRS = """
import dataclasses, json, os
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
from vllm.model_executor.models import ModelRegistry, registry
import sys
found = {}
for name in json.load(sys.stdin):
    try:
        model = ModelRegistry.models[name].load_model_cls()
        found[name] = dataclasses.asdict(registry._ModelInfo.from_model_cls(model))
    except Exception as error:
        found[name] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""
#: Where we answer otherwise on purpose, by field: the reason.
DIFFERENT = {
    "architecture": "vLLM has the name of the class, which several architectures share",
    "supports_pp": "the platform itself refuses --pipeline-parallel-size, by its name",
    "is_text_generation_model": "some heads lack a method that vLLM looks for",
    "supports_multimodal": "only the text of such a checkpoint is served",
    "supports_multimodal_raw_input_only": "only the text of such a checkpoint is served",
    "requires_raw_input_tokens": "only the text of such a checkpoint is served",
    "supports_multimodal_encoder_tp_data": "only the text of such a checkpoint is served",
    "supported_video_pruning_methods": "only the text of such a checkpoint is served",
    "supports_mm_device_do_normalize": "only the text of such a checkpoint is served",
    "supports_replayssm": "states lie in the pool's blocks, and are never computed again",
}
#: Classes that want a package for images or for another device, which serving text does not.
PACKAGES = ("torchvision", "numba", "compile_flash_attn_varlen_func_from_specs")


@pytest.mark.slow  # imports every class, a minute
def test_answers_are_those_of_vllms_classes():
    names = served_architectures()
    done = subprocess.run(
        [sys.executable, "-c", THEIRS],
        input=json.dumps(names),
        capture_output=True,
        text=True,
        env=os.environ | {"VLLM_PLUGINS": ""},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = json.loads(done.stdout.splitlines()[-1])
    compared, wrong = 0, []
    for name in names:
        if isinstance(theirs[name], str):
            known = any(package in theirs[name] for package in PACKAGES)
            known = known or theirs[name] == f"KeyError: '{name}'"  # we add it to the list
            wrong += [] if known else [(name, theirs[name])]
            continue
        compared += 1
        ours = vars(ServedModel.of(name).info)
        for field, answer in theirs[name].items():
            same = (list(ours[field]) if isinstance(answer, list) else ours[field]) == answer
            wrong += [] if same or field in DIFFERENT else [(name, field, answer, ours[field])]
    print(f"{compared} of {len(names)} architectures compared")
    assert wrong == [] and compared > 140


def test_no_class_is_imported_and_whoever_wants_one_is_told():
    answer_for_model_classes()
    before = set(sys.modules)
    for name in ("LlamaForCausalLM", "Qwen3_5ForCausalLM", "EagleLlamaForCausalLM", "MedusaModel"):
        model = ModelRegistry.models[name]
        assert model.inspect_model_cls().is_text_generation_model and hash(model)
        with pytest.raises(NotImplementedError, match=f"serves {name} by mlx-lm's module"):
            model.load_model_cls()
    assert not {name for name in set(sys.modules) - before if "vllm.model" in name}


def test_hybrids_keep_states_and_models_of_images_are_models_of_text():
    info = ServedModel.of("Qwen3_5ForConditionalGeneration").info
    assert info.is_hybrid and info.has_inner_state and not info.supports_multimodal
    assert not info.is_attention_free
    mamba = ServedModel.of("MambaForCausalLM").info
    assert mamba.is_attention_free and mamba.has_inner_state and not mamba.is_hybrid
