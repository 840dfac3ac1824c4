# SPDX-License-Identifier: Apache-2.0
"""Registered encoder properties equal those of vLLM's own classes."""

import dataclasses
import importlib

import pytest
from vllm.model_executor.models import registry as vllms

from vllm_metal.engine.pooling.encoders.served import ARCHITECTURES
from vllm_metal.patches.vllm_patches.encoder_info import CLASSIFYING, PLAIN, POOLING, EncoderModel

#: Differences, and their reasons.
REASONS = {
    "architecture",  # theirs is the name of the class
    "supports_pp",  # so that the platform refuses the option by its name
    "supports_lora",  # likewise
}


def test_all_that_are_served_are_told_of():
    names = [*POOLING, *CLASSIFYING, *PLAIN]
    assert sorted(names) == sorted(ARCHITECTURES)
    assert {name for name, served in ARCHITECTURES.items() if served.classifies} == {*CLASSIFYING}


@pytest.mark.more  # imports vLLM's classes
@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_the_answers_are_those_of_vllms_classes(name):
    module, class_name = vllms._VLLM_MODELS[name]
    imported = importlib.import_module(vllms._resolve_module_name(module))
    theirs = vllms._ModelInfo.from_model_cls(getattr(imported, class_name))
    told = EncoderModel(name).inspect_model_cls()
    different = {
        field.name
        for field in dataclasses.fields(theirs)
        if getattr(theirs, field.name) != getattr(told, field.name)
    }
    assert different <= REASONS
