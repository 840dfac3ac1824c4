# SPDX-License-Identifier: Apache-2.0
"""Lists patches of mlx-lm's and mlx-vlm's modules, and finds a model's module.

A model must compute what transformers' class computes for its files, or be rejected.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from mlx_lm.utils import MODEL_REMAPPING, _get_classes

from vllm_metal.patches.mlx_patches import mlx_vlm_text, multi_linear, seam
from vllm_metal.patches.mlx_patches.families import (
    activations,
    arrays,
    cohere_compass,
    deepseek_v4,
    deepseek_v41,
    experts,
    falcon_h1,
    falcon_ocr,
    glm5_next,
    hy_v4,
    inkling,
    jina_vlm,
    layer_kinds,
    limite,
    llama4,
    minimax_m3,
    mllama,
    moondream3,
    nanochat,
    norms,
    olmo,
    plamo,
    positions,
    qwen4_exp,
    recurrent_gemma,
    shared_kv,
    sparse_attention,
    states,
    text_models,
    windows,
    z1t,
    zaya,
)
from vllm_metal.patches.mlx_patches.replacing import MLX_LM, MLX_VLM, check_release
from vllm_metal.settings.extras import install_advice
from vllm_metal.settings.mlx_vlm_models import MLX_VLM_MODELS, TextModel, is_installed

#: Releases of mlx-lm for which the family patches were written.
RELEASES = ("mlx-lm 0.32",)
_MARK = "_vllm_metal_patched"

#: Maps transformers' name of a multimodal model's separate text model to mlx-lm's module of the
#: whole, which reads it too.
TEXT_MODELS = {
    "gemma3n_text": "gemma3n",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "qwen3_5_text": "qwen3_5",
}

#: Maps transformers' names to mlx-lm's where they differ.
OTHER_NAMES = {"lfm2_vl": "lfm2-vl"}

Patches = Mapping[str, tuple[Callable[[ModuleType], None], ...]]
#: Fixes that make modules of mlx_lm.models agree with transformers' classes. Applied in this
#: order, once, after mlx-lm has imported the module.
PATCHES: Patches = {
    "cohere2": (layer_kinds.cohere2,),
    "ernie4_5_moe": (experts.ernie4_5_moe,),
    "falcon_h1": (falcon_h1.falcon_h1,),
    "gemma": (activations.gemma,),
    "gemma2": (windows.gemma2,),
    "gemma3_text": (layer_kinds.gemma3_text,),
    "gemma3n": (text_models.gemma3n,),
    "glm_moe_dsa": (sparse_attention.glm_moe_dsa,),
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
    "mistral3": (windows.caches_of_text,),
    "nanochat": (nanochat.nanochat,),
    "olmo": (olmo.olmo,),
    "olmo_hybrid": (arrays.renamed(arrays.norms_of_olmo),),
    "pixtral": (windows.caches_of_text,),
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
    "deepseek_v32": (
        experts.grouped(),
        norms.of_latents("DeepseekV32Attention"),
        sparse_attention.deepseek_v32,
    ),
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
#: Fixes for modules that the paged path cannot serve unchanged. With rows of many texts they
#: compute the same as with one text: the reference is mlx-lm's own forward, and transformers' class
#: where it has one (MiniMax M3).
PAGED: Patches = {
    "afm7": (shared_kv.afm7,),
    "baichuan_m1": (states.baichuan_m1,),
    "deepseek_v41": (deepseek_v41.deepseek_v41,),
    "iquestloopcoder": (shared_kv.iquestloopcoder,),
    "llama4": (llama4.llama4,),
    "longcat_flash_ngram": (states.longcat_flash_ngram,),
    "minimax_m3_vl": (minimax_m3.minimax_m3_vl,),
    "plamo": (plamo.plamo,),
    "plamo2": (plamo.plamo2,),
    "plamo3": (plamo.plamo3,),
}
#: The same for modules below mlx_vlm.models, by their dotted paths, such as "klear.language".
OF_MLX_VLM: Patches = {
    "cohere_compass.language": (cohere_compass.language,),
    "cohere2_moe.language": (layer_kinds.cohere2_moe,),
    "deepseek_v32.language": (experts.grouped(),),
    "deepseek_v4": (deepseek_v4.config,),
    "deepseek_v4.deepseek_v4": (deepseek_v4.names,),
    "deepseek_v4.language": (deepseek_v4.language,),
    "ernie4_5_moe_vl.config": (
        text_models.text_of_its_own,
        text_models.first_of_two(
            *("moe_num_experts", "moe_intermediate_size"),
            *("moe_layer_start_index", "moe_layer_end_index"),
        ),
    ),
    "ernie4_5_moe_vl.ernie4_5_moe_vl": (arrays.converted(experts.of_text),),
    "ernie4_5_moe_vl.language": (positions.ernie4_5_moe_vl,),
    "falcon_ocr.config": (text_models.text_of_its_own,),
    "falcon_ocr.falcon_ocr": (falcon_ocr.arrays,),
    "falcon_ocr.language": (falcon_ocr.language,),
    "glm5_next.config": (glm5_next.config, text_models.part_of_a_whole),
    "glm5_next.language": (glm5_next.language,),
    "glm_ocr.config": (text_models.known_keys,),
    "hy_v4": (hy_v4.config,),
    "hy_v4.hyper_connection": (hy_v4.hyper_connection,),
    "hy_v4.indexer": (hy_v4.indexer,),
    "hy_v4.language": (hy_v4.language,),
    "inkling.inkling": (inkling.arrays,),
    "inkling.language": (inkling.language,),
    "jina_vlm.config": (jina_vlm.config,),
    "jina_vlm.jina_vlm": (arrays.converted(jina_vlm.as_published),),
    "jina_vlm.language": (text_models.added_tokens("ExtendedEmbedding"), jina_vlm.language),
    "limite.language": (limite.language,),
    "limite.limite": (limite.arrays,),
    "mllama.language": (mllama.language,),
    "molmo.language": (text_models.added_tokens("Embedding"),),
    "molmo2.language": (text_models.added_tokens("Molmo2Embedding"),),
    "moondream3.language": (moondream3.language,),
    "moondream3.moondream3": (moondream3.arrays,),
    "qwen4_exp.config": (qwen4_exp.config, text_models.part_of_a_whole),
    "qwen4_exp.language": (qwen4_exp.language,),
    "qwen4_exp.qwen4_exp": (qwen4_exp.arrays,),
    "youtu_vl.config": (text_models.text_of_its_own,),
    "z1t.language": (z1t.language,),
    "zaya1_vl.config": (text_models.text_of_its_own,),
    "zaya1_vl.language": (zaya.language,),
    "zaya1_vl.zaya1_vl": (zaya.arrays,),
}


def classes(config: dict[str, Any]) -> tuple[type, type]:
    """Returns a library's patched model and arguments classes for a config.json.

    They are mlx-lm's if it has the model_type, otherwise mlx-vlm's; see `load_model`.

    Raises:
        ImportError: the model is mlx-vlm's, which is not installed; the message has the command.
        ValueError: there is no such module, or the module needs a missing package.
    """
    if (row := of_mlx_vlm(config)) is not None:
        mlx_vlm_text.imported(row)
        install()
        return mlx_vlm_text.classes(row)
    config = {**config, "model_type": _model_type(config)}
    try:
        with _optional_found():
            _get_classes(config)
    except SystemExit as error:  # raised by modules that miss a package
        raise ValueError(
            f"mlx-lm's module of model_type {config['model_type']!r} needs a package that is not "
            f"installed: {error.__context__}"
        ) from error
    install()
    return _get_classes(config)


@contextmanager
def _optional_found() -> Iterator[None]:
    # mlx-lm's OLMo only looks whether this package is there, and exits without it.
    name = "hf_olmo"
    if importlib.util.find_spec(name) is not None:
        yield
        return
    sys.modules[name] = ModuleType(name)
    try:
        yield
    finally:
        del sys.modules[name]


def module_of(config: Mapping[str, Any], model: type) -> str:
    """Returns the name of the module that reads a config.json: a folder where it is mlx-vlm's.

    model: the model's class, which that module may have imported from another one.
    """
    if (row := of_mlx_vlm(config)) is not None:
        return row.folder
    known = _model_type(config)
    name = str(MODEL_REMAPPING.get(known, known))
    module = sys.modules.get(MLX_LM + name)
    if getattr(module, "Model", None) is model:
        return name
    return model.__module__.removeprefix(MLX_LM)


def of_mlx_vlm(config: Mapping[str, Any]) -> TextModel | None:
    """Returns the row of a model for which mlx-vlm is used; None for all others."""
    row = MLX_VLM_MODELS.get(str(config["model_type"]))
    return None if row is None or _is_of_mlx_lm(config) else row


def missing(config: Mapping[str, Any]) -> str | None:
    """Returns why no module can read a config.json, or None; imports none."""
    if _is_of_mlx_lm(config):
        return None
    if of_mlx_vlm(config) is None:
        return "no family that is served has it. Choose a checkpoint of a family in docs/models.md"
    if is_installed():
        return None
    return f"its module is mlx-vlm's, which is not installed. Run: {install_advice('vlm')}"


def _is_of_mlx_lm(config: Mapping[str, Any]) -> bool:
    known = _model_type(config)
    name = str(MODEL_REMAPPING.get(known, known))
    # Some names have dashes, such as nemotron-nas.
    is_name = name.replace("-", "_").isidentifier()
    return is_name and importlib.util.find_spec(MLX_LM + name) is not None


def _model_type(config: Mapping[str, Any]) -> str:
    model_type = str(config["model_type"])
    return {**TEXT_MODELS, **OTHER_NAMES}.get(model_type, model_type)


def install() -> None:
    """Patches attention, its parts and the modules that were imported; idempotent.

    Raises ValueError: mlx-lm's release is not one the patches were written for.
    """
    for name, patches in {**PATCHES, **PAGED}.items():
        module = sys.modules.get(MLX_LM + name)
        if module is None or hasattr(module, _MARK):
            continue
        check_release("mlx-lm", RELEASES, repr(name))
        _apply(patches, module)
    for name, patches in OF_MLX_VLM.items():
        module = sys.modules.get(MLX_VLM + name)
        if module is not None and not hasattr(module, _MARK):
            _apply(patches, module)
    positions.spread_ropes()
    multi_linear.install()
    mlx_vlm_text.install()
    seam.install()


def _apply(patches: Iterable[Callable[[ModuleType], None]], module: ModuleType) -> None:
    for patch in patches:
        patch(module)
    setattr(module, _MARK, True)
