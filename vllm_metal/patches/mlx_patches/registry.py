# SPDX-License-Identifier: Apache-2.0
"""Decides which of mlx-lm's modules are patched, and finds a model's module.

A model must compute what its files say, as transformers' class does, or be refused.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import version
from types import ModuleType
from typing import Any

from mlx_lm.utils import MODEL_REMAPPING, _get_classes

from vllm_metal.patches.mlx_patches import multi_linear, seam
from vllm_metal.patches.mlx_patches.families import (
    activations,
    arrays,
    experts,
    falcon_h1,
    layer_kinds,
    llama4,
    nanochat,
    norms,
    plamo,
    positions,
    recurrent_gemma,
    shared_kv,
    states,
    text_models,
    windows,
)

#: The releases of mlx-lm whose modules the families' patches were written by.
RELEASES = ("mlx-lm 0.32",)
_MODULES = "mlx_lm.models."
_MARK = "_vllm_metal_patched"

#: What transformers calls the text model of a multimodal one where it stands alone, and mlx-lm's
#: module of the whole, which reads it too.
TEXT_MODELS = {
    "gemma3n_text": "gemma3n",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "qwen3_5_text": "qwen3_5",
}

#: What transformers calls a model whose module mlx-lm has under a name of its own.
OTHER_NAMES = {"lfm2_vl": "lfm2-vl"}

Patches = Mapping[str, tuple[Callable[[ModuleType], None], ...]]
#: What modules of mlx_lm.models lack to compute what transformers' classes do. Applied in this
#: order, once, when mlx-lm has imported the module.
PATCHES: Patches = {
    "cohere2": (layer_kinds.cohere2,),
    "ernie4_5_moe": (experts.ernie4_5_moe,),
    "falcon_h1": (falcon_h1.falcon_h1,),
    "gemma": (activations.gemma,),
    "gemma2": (windows.gemma2,),
    "gemma3_text": (layer_kinds.gemma3_text,),
    "gemma3n": (text_models.gemma3n,),
    "gpt2": (arrays.renamed(arrays.without_transformer),),
    "gpt_bigcode": (
        activations.gelu("activation_function", "gelu_pytorch_tanh", "c_fc", "c_proj"),
        positions.gpt_bigcode,
    ),
    "gpt_neox": (activations.gelu("hidden_act", "gelu", "dense_h_to_4h", "dense_4h_to_h"),),
    "gpt_oss": (arrays.converted(experts.in_full_precision),),
    "jamba": (experts.jamba,),
    "lfm2-vl": (arrays.converted(text_models.of_lfm2_vl),),
    "llama": (windows.mistral,),
    "llama4_text": (llama4.llama4_text,),
    "longcat_flash": (arrays.converted(experts.with_weights), norms.of_latents("LongcatFlashMLA")),
    "mamba2": (norms.epsilon("layer_norm_epsilon"),),
    "nanochat": (nanochat.nanochat,),
    "olmo_hybrid": (arrays.renamed(arrays.norms_of_olmo),),
    "phi3": (windows.of_all_layers("Phi3Model"),),
    "qwen3_5": (layer_kinds.qwen3_5,),
    "qwen3_5_moe": (arrays.converted(text_models.stacked),),
    "qwen3_next": (layer_kinds.qwen3_next,),
    "recurrent_gemma": (norms.epsilon("rms_norm_eps"), recurrent_gemma.recurrent_gemma),
    "starcoder2": (
        windows.of_all_layers("Starcoder2Model"),
        activations.gelu("hidden_act", "gelu_pytorch_tanh", "c_fc", "c_proj"),
    ),
    "rope_utils": (positions.rope_utils,),
    "deepseek_v3": (experts.grouped(),),
    "dots1": (experts.grouped(),),
    "exaone_moe": (experts.grouped(),),
    "glm4_moe": (experts.grouped(),),
    "mimo_v2_flash": (experts.grouped(),),
    "nemotron_h": (experts.grouped(),),
    "glm4_moe_lite": (experts.grouped(), norms.of_latents("Glm4MoeLiteAttention")),
    "kimi_linear": (
        experts.grouped("_group_expert_select"),
        norms.of_latents("KimiMLAAttention"),
        arrays.renamed(arrays.dense_of_kimi),
    ),
}
#: Modules that the paged path could not serve as they are. They compute with rows of many texts
#: what they compute with one text: the reference is mlx-lm's own forward, for transformers has no
#: classes of these families.
PAGED: Patches = {
    "afm7": (shared_kv.afm7,),
    "baichuan_m1": (states.baichuan_m1,),
    "iquestloopcoder": (shared_kv.iquestloopcoder,),
    "llama4": (llama4.llama4,),
    "longcat_flash_ngram": (states.longcat_flash_ngram,),
    "plamo": (plamo.plamo,),
    "plamo2": (plamo.plamo2,),
    "plamo3": (plamo.plamo3,),
}


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


def has_module(config: Mapping[str, Any]) -> bool:
    """Whether mlx-lm has a module that reads a config.json; none is imported."""
    known = _model_type(config)
    name = str(MODEL_REMAPPING.get(known, known))
    # Some have dashes in their names, such as nemotron-nas.
    is_name = name.replace("-", "_").isidentifier()
    return is_name and importlib.util.find_spec(_MODULES + name) is not None


def _model_type(config: Mapping[str, Any]) -> str:
    """The type as mlx-lm knows it."""
    model_type = str(config["model_type"])
    return {**TEXT_MODELS, **OTHER_NAMES}.get(model_type, model_type)


def install() -> None:
    """Patches attention, its parts and the modules that mlx-lm has imported; idempotent.

    Raises:
        ValueError: a module is of a release of mlx-lm that its patches were not written for.
    """
    release = "mlx-lm " + ".".join(version("mlx-lm").split(".")[:2])
    for name, patches in {**PATCHES, **PAGED}.items():
        module: ModuleType | None = sys.modules.get(_MODULES + name)
        if module is None or hasattr(module, _MARK):
            continue
        if release not in RELEASES:
            raise ValueError(
                f"{release} may compute {name!r} as transformers does not: vllm-metal knows what "
                f"{' and '.join(RELEASES)} lack"
            )
        for patch in patches:
            patch(module)
        setattr(module, _MARK, True)
    positions.spread_ropes()
    multi_linear.install()
    seam.install()
