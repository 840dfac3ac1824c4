# SPDX-License-Identifier: Apache-2.0
"""Text models that only mlx-vlm has a module for: one row per `model_type` of config.json."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass

#: Releases of mlx-vlm that these rows, and the patches of its modules, were written for.
RELEASES = ("mlx-vlm 0.7",)


@dataclass(frozen=True)
class TextModel:
    """Construction and call of a text model in one of mlx-vlm's families."""

    #: Folder of mlx_vlm.models.
    folder: str
    #: Multimodal architectures that are served as text models; vLLM lists the other ones itself.
    architectures: tuple[str, ...] = ()
    #: Attributes of the family's `Model` that its `sanitize` calls and a text model lacks.
    towers: tuple[str, ...] = ()
    #: Prefixes of checkpoint tensors that belong to towers, beside those named after a modality.
    tower_tensors: tuple[str, ...] = ()
    #: Order of the axes of `position_ids`, for decoders that take them: "c" for the coordinates of
    #: a position, "b" and "t" for texts and tokens. Empty: the decoder asks its caches.
    position_axes: str = ""


_ERNIE = TextModel(
    "ernie4_5_moe_vl",
    architectures=("Ernie4_5_VLMoeForConditionalGeneration",),
    towers=("vision_tower",),
    tower_tensors=("model.resampler_model.", "resampler_model."),
    position_axes="bt",
)
_GLM5_NEXT = TextModel(
    "glm5_next",
    architectures=("Glm5NextForConditionalGeneration",),
    towers=("vision_tower",),
)
_INKLING = TextModel("inkling", ("InklingForConditionalGeneration",))
_QWEN4 = TextModel("qwen4_exp", ("Qwen4ExpForConditionalGeneration",), towers=("vision_tower",))
#: Rows by `model_type`. mlx-lm's module goes first where it has one, whatever stands here.
MLX_VLM_MODELS: Mapping[str, TextModel] = {
    "cohere2_moe": TextModel("cohere2_moe"),
    "cohere_compass": TextModel(
        "cohere_compass",
        architectures=("CohereCompassForConditionalGeneration",),
        towers=("vision_tower",),
        position_axes="bt",
    ),
    "deepseek_v4": TextModel("deepseek_v4"),
    "ernie4_5_moe_vl": _ERNIE,
    "ernie4_5_vl_moe": _ERNIE,
    "falcon_ocr": TextModel("falcon_ocr", position_axes="bt"),
    "flint": TextModel("flint"),
    "glm5_next": _GLM5_NEXT,
    "glm5_next_text": _GLM5_NEXT,
    "glm_ocr": TextModel(
        "glm_ocr",
        architectures=("GlmOcrForConditionalGeneration",),
        towers=("vision_tower",),
        position_axes="cbt",
    ),
    "hrm_text": TextModel("hrm_text"),
    "hy_v4": TextModel("hy_v4"),
    "inkling": _INKLING,
    "inkling_mm_model": _INKLING,
    "inkling_text": _INKLING,
    "jvlm": TextModel(
        "jina_vlm",
        architectures=("JinaVLMForConditionalGeneration",),
        tower_tensors=("vl_connector.",),
    ),
    "k2_horizon": TextModel("k2_horizon"),
    "kolibri1": TextModel("kolibri1"),
    "limite": TextModel("limite"),
    "mimo_v2": TextModel(
        "mimo_v2",
        architectures=("MiMoV2OmniForCausalLM",),
        towers=("vision_tower",),
    ),
    "mistral_large3": TextModel(
        "mistral_large3",
        towers=("vision_tower",),
        tower_tensors=("multi_modal_projector.", "patch_merger.", "pre_mm_projector_norm."),
    ),
    "mllama": TextModel(
        "mllama", architectures=("MllamaForConditionalGeneration",), towers=("vision_tower",)
    ),
    "molmo": TextModel("molmo", ("MolmoForCausalLM",)),
    "molmo2": TextModel("molmo2", ("Molmo2ForConditionalGeneration",)),
    "moondream3": TextModel(
        "moondream3",
        architectures=("HfMoondream", "Moondream3ForCausalLM"),
        tower_tensors=("region.", "model.region."),
    ),
    "qwen4_exp": _QWEN4,
    "qwen4_exp_text": _QWEN4,
    "step3p7": TextModel(
        "step3p7",
        architectures=("Step3p7ForConditionalGeneration",),
        towers=("vision_model",),
        tower_tensors=("vit_large_projector.",),
    ),
    "xing4_0": TextModel("xing4_0"),
    "youtu_vl": TextModel("youtu_vl", ("YoutuVLForConditionalGeneration",)),
    "z1t": TextModel("z1t"),
    "zaya1_vl": TextModel("zaya1_vl", ("Zaya1VLForConditionalGeneration",)),
}

#: Multimodal architectures of the rows.
TEXT_ARCHITECTURES = tuple(
    dict.fromkeys(name for row in MLX_VLM_MODELS.values() for name in row.architectures)
)


def is_installed() -> bool:
    """Returns whether mlx-vlm is installed, without importing it."""
    return importlib.util.find_spec("mlx_vlm") is not None
