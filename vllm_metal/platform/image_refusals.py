# SPDX-License-Identifier: Apache-2.0
"""Rejects images of unsupported models, and unsupported settings of images."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from vllm_metal.settings.extras import install_advice
from vllm_metal.settings.runner import pools

if TYPE_CHECKING:
    from vllm.config import ModelConfig, MultiModalConfig, VllmConfig

_OURS = "mlx-vlm's towers compute images"
_NO_KERNELS = f"{_OURS}, in the model's dtype"
#: Maps each option to its field of `MultiModalConfig` and to why it is rejected.
REFUSED_OF_IMAGES: dict[str, tuple[str, str]] = {
    "--enable-mm-embeds": (
        "enable_mm_embeds",
        "image embeddings are not accepted: send images",
    ),
    "--mm-encoder-only": ("mm_encoder_only", "the text model is always served"),
    "--mm-processor-cache-type": (
        "mm_processor_cache_type",
        "the worker shares no memory with the server: leave it out",
    ),
    "--mm-tensor-ipc": ("mm_tensor_ipc", "leave it out"),
    "--mm-encoder-attn-backend": ("mm_encoder_attn_backend", _OURS),
    "--mm-encoder-attn-dtype": ("mm_encoder_attn_dtype", _NO_KERNELS),
    "--mm-ipc-gpu-memory-gb": ("mm_ipc_gpu_memory_gb", "the server uses no GPU"),
    "--skip-mm-profiling": ("skip_mm_profiling", "memory for images is always set aside"),
    "--video-pruning-rate": ("video_pruning_rate", "all frames are read"),
}


def image_refusals(config: VllmConfig) -> dict[str, bool]:
    """Maps each setting, in the words of the start error, to whether it must be rejected."""
    model = config.model_config
    if model is None or (multimodal := model.multimodal_config) is None:
        return {}
    if multimodal.language_model_only:
        return {}
    return _model_refusals(model, multimodal) | {
        "images with --runner pooling (--language-model-only embeds texts)": pools(config),
        **_option_refusals(multimodal),
    }


def _option_refusals(multimodal: MultiModalConfig) -> dict[str, bool]:
    return {
        f"{option} ({why})": getattr(multimodal, field) not in (None, _default(multimodal, field))
        for option, (field, why) in REFUSED_OF_IMAGES.items()
    }


def _model_refusals(model: ModelConfig, multimodal: MultiModalConfig) -> dict[str, bool]:
    # Imported only for models with images: the module loads MLX and mlx-vlm's names.
    from vllm_metal.engine.vision.families import FAMILIES

    name = model.hf_config.model_type
    served, installed = name in FAMILIES, find_spec("mlx_vlm") is not None
    limits = multimodal.limit_per_prompt.values()
    return {
        f"multimodal inputs of {name!r} (--language-model-only, or a text-only checkpoint)": (
            not served
        ),
        f"images without mlx-vlm (run: {install_advice('vlm')}; or serve text alone: "
        "--language-model-only)": served and not installed,
        f"images of {name!r} (vLLM's processor of them does not load, see above; "
        "--language-model-only serves its text)": (
            served
            and installed
            and not model.supports_multimodal_inputs
            and all(limit.count for limit in limits)
        ),
    }


def _default(multimodal: MultiModalConfig, field: str) -> Any:
    return getattr(type(multimodal), field, None)
