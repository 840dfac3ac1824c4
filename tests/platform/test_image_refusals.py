# SPDX-License-Identifier: Apache-2.0
"""The two lists of models with images agree: by architecture and by model type."""

import transformers

from vllm_metal.engine.vision.families import FAMILIES
from vllm_metal.settings.architectures import WITH_IMAGES


def test_architectures_that_take_images_have_towers():
    assert {getattr(transformers, name).config_class.model_type for name in WITH_IMAGES} == {
        *FAMILIES
    }
