# SPDX-License-Identifier: Apache-2.0
"""What vLLM asks of its class of a model before an engine is made, answered without the class.

vLLM imports its torch class of an architecture, in a process of its own, to ask what a model can
do. That takes seconds, and wants packages that serving text does not. The class would not be used:
the model that serves is mlx-lm's.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from vllm.model_executor.models import ModelRegistry, registry

if TYPE_CHECKING:
    from torch import nn

#: The vLLM releases that all of this is true for.
RELEASES = ("0.32", "0.33")

#: Architectures with recurrent or convolution layers beside attention, as vLLM has them.
_HYBRID = {
    "BailingMoeV2_5ForCausalLM",
    "BailingMoeV3ForCausalLM",
    "FalconH1ForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "JambaForCausalLM",
    "KimiK3ForConditionalGeneration",
    "KimiLinearForCausalLM",
    "Lfm2ForCausalLM",
    "Lfm2MoeForCausalLM",
    "NemotronHForCausalLM",
    "NemotronHPuzzleForCausalLM",
    "OlmoHybridForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
    "Zamba2ForCausalLM",
}
#: Architectures without attention.
_ATTENTION_FREE = {"FalconMambaForCausalLM", "Mamba2ForCausalLM", "MambaForCausalLM"}
#: Architectures of which vLLM may keep the states of every block.
_STATES_OF_ALL_BLOCKS = _ATTENTION_FREE | {
    "FalconH1ForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "JambaForCausalLM",
    "NemotronHForCausalLM",
    "NemotronHPuzzleForCausalLM",
    "Zamba2ForCausalLM",
}
#: Checkpoints of multimodal models whose text model mlx-lm serves, draft layers included.
_TEXT_OF_MULTIMODAL = {
    "Gemma3nForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "KimiK25ForConditionalGeneration",
    "KimiK3ForConditionalGeneration",
    "KimiVLForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
}
#: Models of text that vLLM's list of them lacks: its wrappers of transformers' models, and IBM's
#: MLP speculators, which it lists no more.
_UNLISTED = {
    "MLPSpeculatorPreTrainedModel",
    "TransformersForCausalLM",
    "TransformersMoEForCausalLM",
}
#: The answers but those above, for every model. All else that vLLM asks for is a capability that
#: the plugin does not have.
_ANSWERS: dict[str, Any] = {
    "is_text_generation_model": True,
    "attn_type": "decoder",
    "default_seq_pooling_type": "LAST",
    "default_tok_pooling_type": "ALL",
    "score_type": "bi-encoder",
    "supports_pp": True,  # so that the platform's own refusal is heard
    "supported_video_pruning_methods": (),
}


@dataclass(frozen=True)
class ServedModel(registry._BaseRegisteredModel):
    """An architecture in vLLM's registry that mlx-lm serves.

    vLLM remembers answers by the registered model, so it is hashable.
    """

    info: registry._ModelInfo

    @staticmethod
    def of(architecture: str) -> ServedModel:
        """The answers for an architecture by its name alone."""
        own = {
            "architecture": architecture,
            "has_inner_state": architecture in _HYBRID | _ATTENTION_FREE,
            "is_hybrid": architecture in _HYBRID,
            "is_attention_free": architecture in _ATTENTION_FREE,
            "supports_mamba_prefix_caching": architecture in _STATES_OF_ALL_BLOCKS,
        }
        names = [field.name for field in fields(registry._ModelInfo)]
        answers = dict.fromkeys(names, False) | _ANSWERS | own
        return ServedModel(registry._ModelInfo(**answers))

    def inspect_model_cls(self) -> registry._ModelInfo:
        return self.info

    def load_model_cls(self) -> type[nn.Module]:
        """Raises NotImplementedError: there is no such class here."""
        raise NotImplementedError(
            f"vllm-metal serves {self.info.architecture} by mlx-lm's module, and does not import "
            "vLLM's torch class of it"
        )


def served_architectures() -> list[str]:
    """Architectures whose answers are ours: models of text, and draft layers."""
    listed = {*registry._TEXT_GENERATION_MODELS, *registry._SPECULATIVE_DECODING_MODELS}
    return sorted(listed | _TEXT_OF_MULTIMODAL | _UNLISTED)


def answer_for_model_classes() -> None:
    """Puts our answers into vLLM's registry; no class of a served architecture is imported.

    Checkpoints of multimodal models become text models: vLLM would have images taken that nobody
    looks at.
    """
    for architecture in served_architectures():
        ModelRegistry.models[architecture] = ServedModel.of(architecture)
