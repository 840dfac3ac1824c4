# SPDX-License-Identifier: Apache-2.0
"""What vLLM is told of encoders that we serve, without classes of its own."""

# Remove when a platform can declare which families it serves, and what they can do. Read against
# vLLM 0.33.

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from vllm.config.pooler import SequencePoolingType
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.registry import _BaseRegisteredModel, _ModelInfo

from vllm_metal.patches.vllm_patches.model_info import TextModel

#: Encoders by architecture. vLLM's classes of them bring a pooler, by the first token ...
POOLING = (
    "BertModel",
    "RobertaForMaskedLM",
    "RobertaModel",
    "XLMRobertaModel",
)
#: ... and with it a head over labels, for pairs of texts; ...
CLASSIFYING = (
    "BertForSequenceClassification",
    "ModernBertForSequenceClassification",
    "RobertaForSequenceClassification",
    "XLMRobertaForSequenceClassification",
)
#: ... or it adds one to them, by the first token or by the last.
PLAIN: dict[str, SequencePoolingType] = {"ModernBertModel": "CLS", "Gemma3TextModel": "LAST"}


@dataclass(frozen=True)
class EncoderModel(_BaseRegisteredModel):
    """A registered architecture of an encoder."""

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


def answer_for_encoders() -> None:
    """Registers the encoders that we serve with what vLLM asks of them.

    vLLM imports its own class, in a process of its own, only to ask that: seconds at a first start.
    """
    names = (*POOLING, *CLASSIFYING, *PLAIN)
    ModelRegistry.models.update({name: EncoderModel(name) for name in names})
