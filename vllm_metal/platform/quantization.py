# SPDX-License-Identifier: Apache-2.0
"""Registers one quantization method with vLLM for all published quantized weights, in any dtype.

vLLM's own classes reject dtypes that they have no kernels for. vLLM asks methods that it does not
know first, so its classes are never created.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from vllm.model_executor.layers.quantization import (
    QuantizationMethods,
    register_quantization_config,
)
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)

from vllm_metal.engine.kv_cache.formats import MLX_DTYPES
from vllm_metal.engine.weights.quantization import METHODS, Quantization

NAME = "metal"
_NAME = cast(QuantizationMethods, NAME)


@register_quantization_config(NAME)
class PublishedWeights(QuantizationConfig):
    """Represents every `quant_method` of published checkpoints; our loader reads the weights."""

    def __init__(self, config: Quantization) -> None:
        super().__init__()
        self.config = config

    def get_name(self) -> QuantizationMethods:
        return _NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return list(MLX_DTYPES)

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return ["hf_quant_config.json"]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> PublishedWeights:
        """Raises ModelLoadError if the format is not supported, before weights are read."""
        return cls(Quantization.of(config))

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> QuantizationMethods | None:
        """Selects this class for every published format; None for folders that MLX's tools wrote.

        Raises ValueError if --quantization names another format than the folder's.
        """
        if not hf_quant_cfg.get("quant_method") and "quantization" not in hf_quant_cfg:
            return None
        method = Quantization.of(hf_quant_cfg).method
        if user_quant not in (None, NAME) and METHODS.get(str(user_quant)) != method:
            raise ValueError(
                f"--quantization={user_quant} is not supported with this model: config.json says "
                f"quant_method={hf_quant_cfg.get('quant_method')}. Leave --quantization out."
            )
        return _NAME

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        return None  # vLLM's layers are never created
