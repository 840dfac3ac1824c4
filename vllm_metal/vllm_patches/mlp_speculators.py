# SPDX-License-Identifier: Apache-2.0
"""IBM's MLP speculators, whose architecture vLLM no longer registers."""

from __future__ import annotations

from importlib.util import find_spec

#: The vLLM releases that need this; 0.33 has neither the method nor the module.
RELEASES = ("0.32",)
_MODULE = "vllm.model_executor.models.mlp_speculator"


def allow_mlp_speculators() -> None:
    """Registers the architecture under vLLM's own module for it, which it still carries."""
    from vllm.model_executor.models import ModelRegistry

    name = "MLPSpeculatorPreTrainedModel"
    if name not in ModelRegistry.models and find_spec(_MODULE) is not None:
        ModelRegistry.register_model(name, f"{_MODULE}:MLPSpeculator")
