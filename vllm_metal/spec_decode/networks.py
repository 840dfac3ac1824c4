# SPDX-License-Identifier: Apache-2.0
"""From --speculative-config to a draft network."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.nn as nn

from vllm_metal.models.parts import SelectedRows
from vllm_metal.spec_decode.draft_model import DraftModel
from vllm_metal.spec_decode.eagle import Eagle
from vllm_metal.spec_decode.medusa import Medusa
from vllm_metal.spec_decode.mlp_speculator import MLPSpeculator
from vllm_metal.spec_decode.mtp import MTP
from vllm_metal.spec_decode.paged_proposer import DraftNetwork

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def load_network(
    config: VllmConfig, target: nn.Module, selected: SelectedRows
) -> DraftNetwork | None:
    """Loads what drafts for the target; None for methods without a network.

    Args:
        config: whose speculative_config names it.
        target: the target model.
        selected: its row selection, where some networks tap the target's hidden states.

    Raises:
        ModelLoadError: it cannot be loaded, or does not go with the target.
        NotImplementedError: its layers, or its way of reading the target, are not served.
    """
    match config.speculative_config and config.speculative_config.method:
        case "draft_model":
            return DraftModel(config)
        case "eagle" | "eagle3":
            return Eagle(config, target, selected)
        case "medusa":
            return Medusa(config, target, selected)
        case "mlp_speculator":
            return MLPSpeculator(config, target, selected)
        case "mtp":
            return MTP(config, target, selected)
    return None
