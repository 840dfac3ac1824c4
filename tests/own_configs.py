# SPDX-License-Identifier: Apache-2.0
"""Configurations of transformers' own classes, whatever vLLM has registered since.

vLLM registers classes of its own for some model types (Kimi Linear, Step 3.5) when it reads such
a model, for the rest of the process; `AutoConfig` then answers with those.
"""

from typing import Any

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES


def own_class(model_type: str) -> Any:
    """The configuration class of transformers for `model_type`."""
    found = getattr(transformers, CONFIG_MAPPING_NAMES[model_type])
    found.model_type = model_type  # vLLM gives DeepSeek V3's class the name of V3.2
    return found


def own_config(model_type: str, **keys: Any) -> Any:
    """A configuration of transformers' class for `model_type`."""
    return own_class(model_type)(**keys)
