# SPDX-License-Identifier: Apache-2.0
"""Families that mlx-lm has, and neither vLLM nor transformers."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Container
from pathlib import Path
from typing import Any

#: Names of transformers that vLLM asks every configuration for, and what families call the same.
_OTHER_NAMES = {
    "hidden_size": ("d_model", "n_embd", "model_dim", "dim"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers", "num_transformer_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
}


def take_mlx_models() -> None:
    """Has transformers read such a config.json, under an architecture that `model_info` registers.

    What the layers keep is read off the model that mlx-lm makes.
    """
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    for model_type in _model_types({*CONFIG_MAPPING, *_CONFIG_REGISTRY}):
        AutoConfig.register(model_type, _config_class(model_type))


def _model_types(known: Container[str]) -> list[str]:
    """Names of mlx-lm's modules that are not known, found without an import of them."""
    found = importlib.util.find_spec("mlx_lm")
    assert found is not None and found.submodule_search_locations is not None
    folder = Path(found.submodule_search_locations[0]) / "models"
    unknown = (path for path in sorted(folder.glob("*.py")) if path.stem not in known)
    return [path.stem for path in unknown if "class ModelArgs" in path.read_text()]


@functools.cache
def _config_class(model_type: str) -> type:
    from transformers import PretrainedConfig
    from vllm.model_executor.models import ModelRegistry

    from vllm_metal.vllm_patches.model_info import MLX_MODEL

    class MlxConfig(PretrainedConfig):
        """A configuration of which transformers knows no more than its keys."""

        def __init__(self, **values: Any) -> None:
            values.pop("layer_types", None)  # transformers takes no names that it does not know
            super().__init__(**values)
            if not any(name in ModelRegistry.models for name in self.architectures or ()):
                self.architectures = [MLX_MODEL]
            for name, others in _OTHER_NAMES.items():
                if getattr(self, name, None) is None:
                    setattr(self, name, next((values[x] for x in others if x in values), 1))

        def __reduce__(self) -> tuple[Any, ...]:
            """The engine's process makes the class anew: nobody can import it."""
            return _restored, (model_type, self.to_dict())

    MlxConfig.model_type = model_type
    # With --trust-remote-code a checkpoint's own class goes before those of transformers' modules,
    # but not before those that others register.
    MlxConfig.__module__ = "transformers.models"
    return MlxConfig


def _restored(model_type: str, values: dict[str, Any]) -> Any:
    return _config_class(model_type)(**values)
