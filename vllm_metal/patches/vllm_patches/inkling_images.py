# SPDX-License-Identifier: Apache-2.0
"""vLLM's processor of Inkling's images, without the CUDA kernels that its model class imports.

vLLM finds a vision tower by a key that only Inkling's own files have, and sizes its encoder cache
by an image of 72 tokens, while ordinary photos have thousands.
"""

# Remove when vLLM's class can be imported without CUDA, reads vision_config as transformers writes
# it, and states the largest image. Read against vLLM 0.33.

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

#: Keys with the width of a tower's output: Inkling's own, and transformers'.
_WIDTHS = ("decoder_dmodel", "text_hidden_size")
#: Longest edge in pixels that a processor scales images up to, if it does not state one.
_EDGE = 2048


def most_tokens(edge: int | None, patch_size: int) -> int:
    """Tokens of the largest image that a processor scales up; larger ones are left as they are.

    `edge` is the processor's `rescale_image_max_upscaled_long_edge`, in pixels.
    """
    edge = edge or _EDGE
    return -(-edge // patch_size) * (edge // patch_size + 1)


@functools.cache
def processing_class() -> Any:
    """A class that vLLM asks for Inkling's image processor; it cannot be instantiated."""
    from vllm.model_executor.models.interfaces import SupportsMultiModal
    from vllm.models.inkling.common import mm_preprocess
    from vllm.multimodal import MULTIMODAL_REGISTRY

    class Info(mm_preprocess.InklingProcessingInfo):
        """Limits of images; audio is not served."""

        def get_supported_mm_limits(self) -> Mapping[str, int | None]:
            vision = self.get_hf_config().vision_config
            has_tower = any(getattr(vision, name, None) for name in _WIDTHS)
            return {"image": None} if has_tower else {}

        def get_mm_max_tokens_per_item(
            self, seq_len: int, mm_counts: Mapping[str, int]
        ) -> Mapping[str, int]:
            edge = self.get_hf_processor().image_processor.rescale_image_max_upscaled_long_edge
            return {"image": most_tokens(edge, self.get_hf_config().vision_config.patch_size)}

    @MULTIMODAL_REGISTRY.register_processor(
        mm_preprocess.InklingMultiModalProcessor,
        info=Info,
        dummy_inputs=mm_preprocess.InklingDummyInputsBuilder,
    )
    class InklingForConditionalGeneration(SupportsMultiModal):
        """Stands for vLLM's class of this name."""

        @classmethod
        def get_placeholder_str(cls, modality: str, i: int) -> str | None:
            if modality.startswith("image"):
                return "<|content_image|>"
            raise ValueError("Inkling is served with images only")

    return InklingForConditionalGeneration
