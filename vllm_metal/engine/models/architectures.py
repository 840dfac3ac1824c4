# SPDX-License-Identifier: Apache-2.0
"""Checks that vLLM supports an architecture, without importing its registry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_metal.engine.config_json.reference_code import (
    decoders_of_transformers,
    families,
    listed_by_vllm,
)
from vllm_metal.identity.model_files import ModelLoadError
from vllm_metal.settings.architectures import (
    BY_TRANSFORMERS,
    MULTIMODAL,
    TEXT_PARTS,
    WITH_IMAGES,
)
from vllm_metal.settings.mlx_vlm_models import MLX_VLM_MODELS

#: Tables of vLLM's registry with models that are served as text models.
_TABLES = ("_TEXT_GENERATION_MODELS", "_TRANSFORMERS_SUPPORTED_MODELS")
#: Suffixes of decoders' architectures, and of those that embed or classify.
_GENERATES = ("ForCausalLM", "LMHeadModel")
_POOLS = ("Model", "ForSequenceClassification", "ForTokenClassification")


def check(content: Mapping[str, Any]) -> None:
    """Checks the architectures of a config.json that is not an encoder's.

    Raises:
        ModelLoadError: there is no model_type, or vLLM knows the family but none of the
            architectures.
    """
    names, model_type = content.get("architectures") or (), content.get("model_type")
    if not isinstance(model_type, str):
        raise ModelLoadError("config.json names no model_type: download the model again")
    if not isinstance(names, list | tuple):
        raise ModelLoadError(f"config.json says architectures={names!r}, which is not a list")
    if not names or model_type not in families() or model_type in MLX_VLM_MODELS:
        _check_type(content)
    if not names or model_type not in families():
        return
    listed = {name for table in _TABLES for name in listed_by_vllm(table)}
    served = {*listed, *TEXT_PARTS, *WITH_IMAGES, *BY_TRANSFORMERS} - MULTIMODAL
    served |= decoders_of_transformers()
    for name in names:
        base = next((name.removesuffix(each) for each in _POOLS if name.endswith(each)), None)
        decoders = {f"{base}{each}" for each in _GENERATES}
        if name in served or (base is not None and decoders & served):
            return
    raise ModelLoadError(
        f"architectures={list(names)} of config.json is not supported with model_type="
        f"{model_type!r}: no family that is served has them. Choose a checkpoint of a family in "
        "docs/models.md"
    )


def _check_type(content: Mapping[str, Any]) -> None:
    # A library must have a module for the model_type, unless the folder has code of its own.
    from vllm_metal.patches.mlx_patches import registry

    if not content.get("model_file") and (reason := registry.missing(content)) is not None:
        raise ModelLoadError(
            f"model_type={content['model_type']!r} of config.json is not supported: {reason}"
        )
