# SPDX-License-Identifier: Apache-2.0
"""All changes of mlx-lm's modules.

A model must compute what its files say, as transformers' class does, or be refused.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.metadata import version
from types import ModuleType
from typing import Any

from mlx_lm.models import rope_utils as rope_utils_module
from mlx_lm.utils import MODEL_REMAPPING, _get_classes

from vllm_metal.mlx_patches.families import paged
from vllm_metal.mlx_patches.families.activations import gelu, gemma
from vllm_metal.mlx_patches.families.ernie import ernie4_5_moe
from vllm_metal.mlx_patches.families.falcon_h1 import falcon_h1
from vllm_metal.mlx_patches.families.gpt_oss import gpt_oss
from vllm_metal.mlx_patches.families.jamba import jamba
from vllm_metal.mlx_patches.families.layer_kinds import cohere2, qwen3_5, qwen3_next
from vllm_metal.mlx_patches.families.llama4_text import llama4_text
from vllm_metal.mlx_patches.families.longcat_flash import longcat_flash
from vllm_metal.mlx_patches.families.names import (
    dense_of_kimi,
    norms_of_olmo,
    renamed,
    without_transformer,
)
from vllm_metal.mlx_patches.families.nanochat import nanochat
from vllm_metal.mlx_patches.families.norms import epsilon, of_latents
from vllm_metal.mlx_patches.families.positions import gpt_bigcode
from vllm_metal.mlx_patches.families.recurrent_gemma import recurrent_gemma
from vllm_metal.mlx_patches.families.ropes import rope_utils, spread
from vllm_metal.mlx_patches.families.routers import grouped
from vllm_metal.mlx_patches.families.text_models import gemma3n, qwen3_5_moe
from vllm_metal.mlx_patches.families.windows import gemma2, gemma3_text, mistral, of_all_layers
from vllm_metal.mlx_patches.patch import ModulePatch

_READ = ((0, 32),)
_MODULES = "mlx_lm.models."
_MARK = "_vllm_metal_patched"


def _gpt_bigcode(module: ModuleType) -> None:
    gelu("activation_function", "gelu_pytorch_tanh", "c_fc", "c_proj")(module)
    gpt_bigcode(module)


def _glm4_moe_lite(module: ModuleType) -> None:
    grouped()(module)
    of_latents("Glm4MoeLiteAttention")(module)


def _kimi_linear(module: ModuleType) -> None:
    grouped("_group_expert_select")(module)
    of_latents("KimiMLAAttention")(module)
    renamed(dense_of_kimi)(module)


def _recurrent_gemma(module: ModuleType) -> None:
    epsilon("rms_norm_eps")(module)
    recurrent_gemma(module)


def _starcoder2(module: ModuleType) -> None:
    of_all_layers("Starcoder2Model")(module)
    gelu("hidden_act", "gelu_pytorch_tanh", "c_fc", "c_proj")(module)


#: What transformers calls the text model of a multimodal one where it stands alone, and mlx-lm's
#: module of the whole, which reads it too.
TEXT_MODELS = {
    "gemma3n_text": "gemma3n",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "qwen3_5_text": "qwen3_5",
}

PATCHES = (
    ModulePatch("cohere2", _READ, cohere2),
    ModulePatch("ernie4_5_moe", _READ, ernie4_5_moe),
    ModulePatch("falcon_h1", _READ, falcon_h1),
    ModulePatch("gemma", _READ, gemma),
    ModulePatch("gemma2", _READ, gemma2),
    ModulePatch("gemma3_text", _READ, gemma3_text),
    ModulePatch("gemma3n", _READ, gemma3n),
    ModulePatch("gpt2", _READ, renamed(without_transformer)),
    ModulePatch("gpt_bigcode", _READ, _gpt_bigcode),
    ModulePatch("gpt_neox", _READ, gelu("hidden_act", "gelu", "dense_h_to_4h", "dense_4h_to_h")),
    ModulePatch("gpt_oss", _READ, gpt_oss),
    ModulePatch("jamba", _READ, jamba),
    ModulePatch("llama", _READ, mistral),
    ModulePatch("llama4_text", _READ, llama4_text),
    ModulePatch("longcat_flash", _READ, longcat_flash),
    ModulePatch("mamba2", _READ, epsilon("layer_norm_epsilon")),
    ModulePatch("nanochat", _READ, nanochat),
    ModulePatch("olmo_hybrid", _READ, renamed(norms_of_olmo)),
    ModulePatch("phi3", _READ, of_all_layers("Phi3Model")),
    ModulePatch("qwen3_5", _READ, qwen3_5),
    ModulePatch("qwen3_5_moe", _READ, qwen3_5_moe),
    ModulePatch("qwen3_next", _READ, qwen3_next),
    ModulePatch("recurrent_gemma", _READ, _recurrent_gemma),
    ModulePatch("starcoder2", _READ, _starcoder2),
    ModulePatch("rope_utils", _READ, rope_utils),
    *(
        ModulePatch(module, _READ, grouped())
        for module in (
            "deepseek_v3",
            "dots1",
            "exaone_moe",
            "glm4_moe",
            "mimo_v2_flash",
            "nemotron_h",
        )
    ),
    ModulePatch("glm4_moe_lite", _READ, _glm4_moe_lite),
    ModulePatch("kimi_linear", _READ, _kimi_linear),
)


def classes(config: dict[str, Any]) -> tuple[type, type]:
    """mlx-lm's model and its arguments for a config.json, patched; for mlx-lm's `load_model`.

    Raises:
        ValueError: mlx-lm's module is not there, or needs what is not installed.
    """
    config = {**config, "model_type": _model_type(config)}
    try:
        _get_classes(config)
    except SystemExit as error:  # of a module that finds a package missing
        raise ValueError(
            f"mlx-lm's module of model_type {config['model_type']!r} needs a package that is not "
            f"installed: {error.__context__}"
        ) from error
    install()
    return _get_classes(config)


def module_of(config: Mapping[str, Any], model: type) -> str:
    """The name of mlx-lm's module that reads a config.json.

    Args:
        config: of config.json.
        model: its model, which the module may have of another one.
    """
    known = _model_type(config)
    name = str(MODEL_REMAPPING.get(known, known))
    module = sys.modules.get(_MODULES + name)
    if getattr(module, "Model", None) is model:
        return name
    return model.__module__.removeprefix(_MODULES)


def _model_type(config: Mapping[str, Any]) -> str:
    """As mlx-lm knows it."""
    model_type = str(config["model_type"])
    return TEXT_MODELS.get(model_type, model_type)


def install() -> None:
    """Patches the modules that mlx-lm has imported; idempotent.

    Raises:
        ValueError: a module is of a release of mlx-lm that the patch was not written for.
    """
    major, minor = (int(part) for part in version("mlx-lm").split(".")[:2])
    for patch in (*PATCHES, *paged.PATCHES):
        module: ModuleType | None = sys.modules.get(_MODULES + patch.module)
        if module is None or hasattr(module, _MARK):
            continue
        if (major, minor) not in patch.releases:
            read = " and ".join(f"{first}.{second}" for first, second in patch.releases)
            raise ValueError(
                f"mlx-lm {major}.{minor} may compute {patch.module!r} as transformers does not: "
                f"vllm-metal knows what {read} lack"
            )
        patch.apply(module)
        setattr(module, _MARK, patch)
    spread(rope_utils_module)
