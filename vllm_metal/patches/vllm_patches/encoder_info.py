# SPDX-License-Identifier: Apache-2.0
"""Describes the encoders that we serve to vLLM, without vLLM's own classes."""

# Remove when a platform can declare which families it serves, and what they can do. Read against
# vLLM 0.33.

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from vllm.config.pooler import SequencePoolingType
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.registry import _BaseRegisteredModel, _ModelInfo

from vllm_metal.patches.vllm_patches.model_info import TextModel

#: Encoder architectures. vLLM's classes for these include a pooler over the first token ...
POOLING = (
    "BertModel",
    "RobertaForMaskedLM",
    "RobertaModel",
    "XLMRobertaModel",
)
#: ... these also a classification head for pairs of texts ...
CLASSIFYING = (
    "BertForSequenceClassification",
    "ModernBertForSequenceClassification",
    "RobertaForSequenceClassification",
    "XLMRobertaForSequenceClassification",
)
#: ... and vLLM adds a pooler to these, over the first token or the last.
PLAIN: dict[str, SequencePoolingType] = {"ModernBertModel": "CLS", "Gemma3TextModel": "LAST"}


@dataclass(frozen=True)
class EncoderModel(_BaseRegisteredModel):
    """An encoder's architecture as registered with vLLM."""

    architecture: str

    def load_model_cls(self) -> type[Any]:
        return TextModel(self.architecture).load_model_cls()

    def inspect_model_cls(self) -> _ModelInfo:
        name = self.architecture
        return replace(
            TextModel(name).inspect_model_cls(),
            is_text_generation_model=False,
            is_pooling_model=name not in PLAIN,
            default_seq_pooling_type=PLAIN.get(name, "CLS"),
            score_type="cross-encoder" if name in CLASSIFYING else "bi-encoder",
        )


def register_encoders() -> None:
    """Registers the encoders that we serve, with the properties that vLLM reads."""
    # vLLM would import its own class, in a process of its own, only to ask for these facts: that
    # takes seconds at a first start.
    names = (*POOLING, *CLASSIFYING, *PLAIN)
    ModelRegistry.models.update({name: EncoderModel(name) for name in names})
