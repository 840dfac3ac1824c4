# SPDX-License-Identifier: Apache-2.0
"""EAGLE heads by architecture: which generation, and how their checkpoints name arrays.

Readable without MLX.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class EagleFamily:
    """Facts about the heads of one architecture, whose layers are Llama's."""

    generation: Literal["eagle", "eagle3"]

    def own_name(self, name: str) -> str | None:
        """An array of the checkpoint as the head's module names it; None: it is not loaded.

        Not loaded are `t2d`, which says the same as `d2t`, and tables of rotary angles, which MLX
        computes.
        """
        if name == "t2d" or "rotary_emb" in name:
            return None
        return name.replace("midlayer.", "layers.0.")


#: By architecture of the head, as vLLM names it.
EAGLE_FAMILIES: Mapping[str, EagleFamily] = {
    "EagleLlamaForCausalLM": EagleFamily("eagle"),
    "Eagle3LlamaForCausalLM": EagleFamily("eagle3"),
    "LlamaForCausalLMEagle3": EagleFamily("eagle3"),
}
