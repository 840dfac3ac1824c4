# SPDX-License-Identifier: Apache-2.0
"""transformers' own configuration classes, regardless of what vLLM has registered.

vLLM registers its own classes for some model types (Kimi Linear, Step 3.5) when it reads such
a model, for the rest of the process; `AutoConfig` then returns those.
"""

from typing import Any

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES


def own_class(model_type: str) -> Any:
    """Returns transformers' configuration class for `model_type`."""
    found = getattr(transformers, CONFIG_MAPPING_NAMES[model_type])
    found.model_type = model_type  # vLLM gives DeepSeek V3's class the name of V3.2
    return found


def own_config(model_type: str, **keys: Any) -> Any:
    """Returns a configuration of transformers' class for `model_type`."""
    return own_class(model_type)(**keys)
