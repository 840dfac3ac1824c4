# SPDX-License-Identifier: Apache-2.0
"""What vLLM may know of the architectures that we serve, told without its classes of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from vllm.model_executor.models.registry import _BaseRegisteredModel, _ModelInfo

#: vLLM's name for families that it does not list; `mlx_models` has their configurations use it.
MLX_MODEL = "MlxForCausalLM"
#: Text models that are published as a part of a multimodal one, and MTP layers of such, by name.
_TEXT_PARTS = (
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "Gemma3nForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "KimiVLForConditionalGeneration",
    "KimiK25ForConditionalGeneration",
    "KimiK3ForConditionalGeneration",
)
#: vLLM's stand-ins for text models that transformers has and its own list has not.
_BY_TRANSFORMERS = ("TransformersForCausalLM", "TransformersMoEForCausalLM")
#: vLLM 0.32 has the method of MLP speculators, but lists their architecture no more.
_MLP_SPECULATOR = "MLPSpeculatorPreTrainedModel"
#: What vLLM lists among text models although they take images or sound: its own classes answer.
_MULTIMODAL = frozenset(
    {
        "HCXVisionV2ForCausalLM",
        "InklingForConditionalGeneration",
        "MuseGlimmerForCausalLM",
        "Emu3ForConditionalGeneration",
        "HunYuanVLForConditionalGeneration",
        "VibeVoiceAsrForConditionalGeneration",
    }
)

#: Families by the start of an architecture's name. All of their layers keep states, ...
_ATTENTION_FREE = ("FalconMamba", "Mamba")
#: ... or some; vLLM looks up the states of these and the former at every block, ...
_MAMBA_IN_PART = (
    "FalconH1",
    "GraniteMoeHybrid",
    "Jamba",
    "NemotronHFor",
    "NemotronHPuzzle",
    "Zamba2",
)
#: ... and those of all others where a chunk ended.
_HYBRID = (
    *_MAMBA_IN_PART,
    "BailingMoeV2_5For",
    "BailingMoeV3For",
    "Glm5NextFor",
    "KimiK3For",
    "KimiLinear",
    "Lfm2",
    "OlmoHybrid",
    "Qwen3NextFor",
    "Qwen3_5For",
    "Qwen3_5MoeFor",
    "Qwen4ExpFor",
)
#: Some of its blocks have no attention at all.
_WITHOUT_SOME_LAYERS = ("DeciLMFor",)


@dataclass(frozen=True)
class TextModel(_BaseRegisteredModel):
    """A registered architecture that mlx-lm's module or a proposer of ours computes."""

    architecture: str

    def inspect_model_cls(self) -> _ModelInfo:
        """What `vllm.config.ModelConfig` asks of the architecture."""
        name = self.architecture
        hybrid, attention_free = name.startswith(_HYBRID), name.startswith(_ATTENTION_FREE)
        return _ModelInfo(
            architecture=name,
            is_text_generation_model=True,
            is_pooling_model=False,
            attn_type="decoder",
            default_seq_pooling_type="LAST",
            default_tok_pooling_type="ALL",
            score_type="bi-encoder",
            supports_multimodal=False,
            supports_multimodal_raw_input_only=False,
            requires_raw_input_tokens=False,
            supports_multimodal_encoder_tp_data=False,
            supports_pp=True,  # so that the platform refuses the option by its name
            supports_hc_sp=False,
            has_inner_state=hybrid or attention_free,
            is_attention_free=attention_free,
            is_hybrid=hybrid,
            has_noops=name.startswith(_WITHOUT_SOME_LAYERS),
            supports_mamba_prefix_caching=name.startswith((*_ATTENTION_FREE, *_MAMBA_IN_PART)),
            supports_replayssm=False,
            supports_transcription=False,
            supports_transcription_only=False,
            supported_video_pruning_methods=(),
            supports_mm_device_do_normalize=False,
        )

    def load_model_cls(self) -> NoReturn:
        """Raises NotImplementedError: the model is MLX's, and has no class of torch's."""
        raise NotImplementedError(
            f"vllm-metal computes {self.architecture} with MLX and never loads vLLM's class of it"
        )


def answer_for_models() -> None:
    """Registers every architecture of text models and draft heads with what vLLM asks of it.

    vLLM imports its own class, in a process of its own, only to ask that: seconds at a first start,
    and a refusal where the class needs packages, or a processor, that serving text does not.
    Architectures of other kinds (images, pooling) stay vLLM's.
    """
    from vllm.model_executor.models import ModelRegistry, registry

    listed: dict[str, Any] = {
        **registry._TEXT_GENERATION_MODELS,
        **registry._TRANSFORMERS_SUPPORTED_MODELS,
        **registry._SPECULATIVE_DECODING_MODELS,
    }
    ours = {*listed, *_TEXT_PARTS, *_BY_TRANSFORMERS, _MLP_SPECULATOR, MLX_MODEL} - _MULTIMODAL
    ModelRegistry.models.update({name: TextModel(name) for name in sorted(ours)})
