# SPDX-License-Identifier: Apache-2.0
"""IBM's MLP speculators, which vLLM has left behind."""

from __future__ import annotations

from importlib.util import find_spec

#: The vLLM releases that all of this is true for; since 0.33 vLLM knows nothing of the method.
RELEASES = ("0.32",)
_MODULE = "vllm.model_executor.models.mlp_speculator"


def allow_mlp_speculators() -> None:
    """Names vLLM the architecture of MLP speculators: it still has their module, but not listed."""
    from vllm.model_executor.models import ModelRegistry

    name = "MLPSpeculatorPreTrainedModel"
    if name not in ModelRegistry.models and find_spec(_MODULE) is not None:
        ModelRegistry.register_model(name, f"{_MODULE}:MLPSpeculator")
