# SPDX-License-Identifier: Apache-2.0
"""Creates vLLM's pooler for a model, including layers from its sentence-transformers files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from vllm_metal.identity.model_files import ModelLoadError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.pooler.abstract import Pooler


def make(config: VllmConfig, classifier: torch.nn.Module | None) -> Pooler:
    """Returns the pooler that vLLM would give this decoder.

    classifier: maps [n, H] hidden states to [n, labels]; None: the model embeds.

    Raises ModelLoadError: a layer of the sentence-transformers files could not be read.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.pooler import DispatchPooler

    pooler_config = config.model_config.pooler_config
    assert pooler_config is not None
    with set_current_vllm_config(config):
        if classifier is not None:
            return DispatchPooler.for_seq_cls(pooler_config, classifier=classifier).eval()
        pooler = DispatchPooler.for_embedding(pooler_config)
    for task in pooler.poolers_by_task.values():
        check_projector(config, task)
    return pooler.eval()


def check_projector(config: VllmConfig, pooler: Any) -> None:
    """Checks that a pooler has all Dense layers of the checkpoint.

    Raises ModelLoadError: a Dense layer is missing.
    """
    from vllm.transformers_utils.config import try_get_dense_modules

    model = config.model_config
    named = try_get_dense_modules(model.model, revision=model.revision) or ()
    layers = pooler.head.projector.modules() if pooler.head.projector is not None else ()
    # vLLM silently skips layers it cannot read, so count those it made.
    read = sum(isinstance(layer, torch.nn.Linear) for layer in layers)
    if read != len(named):
        folders = ", ".join(str(layer["folder"]) for layer in named)
        raise ModelLoadError(
            f"{model.model} has {len(named)} Dense layers ({folders}), but only {read} could be "
            "read: the weights of the others are missing or in an unknown format"
        )
