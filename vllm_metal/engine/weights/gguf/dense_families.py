# SPDX-License-Identifier: Apache-2.0
"""GGUF model families with only attention and MLP layers."""

from functools import partial

from . import family_config as of
from . import stems
from .family import Family, has_any
from .source import GGUFSource

_ATTENTION_INPUTS = ("attn_q", "attn_k", "attn_v")
_GELU = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
_LAYER_NORM = {"rms_norm_eps": "layer_norm_eps"}
WINDOW = {"sliding_window": "attention.sliding_window"}
GRANITE = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}


def _scales_queries(source: GGUFSource) -> bool:
    return bool(source.arch("attention.temperature_scale"))


def _has_window(source: GGUFSource) -> bool:
    return bool(source.arch("attention.sliding_window"))


_llama = partial(Family, interleaved_rope=True, states_bias=True)
DENSE: tuple[Family, ...] = (
    _llama("llama", "llama", "LlamaForCausalLM", stems.COMMON, converts=True),
    # Ministral 3 scales queries with the position.
    _llama(
        "mistral3",
        "ministral3",
        "Ministral3ForCausalLM",
        stems.COMMON,
        when=_scales_queries,
        config=of.ministral3,
    ),
    _llama("mistral3", "llama", "LlamaForCausalLM", stems.COMMON),
    _llama(
        "smollm3",
        "smollm3",
        "SmolLM3ForCausalLM",
        stems.COMMON,
        fixed={"no_rope_layer_interval": 4},
    ),
    Family(
        "qwen2", "qwen2", "Qwen2ForCausalLM", stems.COMMON, biased=_ATTENTION_INPUTS, converts=True
    ),
    Family("qwen2vl", "qwen2", "Qwen2ForCausalLM", stems.COMMON),
    Family("qwen3", "qwen3", "Qwen3ForCausalLM", {**stems.COMMON, **stems.QK_NORM}, converts=True),
    Family("qwen3vl", "qwen3", "Qwen3ForCausalLM", {**stems.COMMON, **stems.QK_NORM}),
    Family(
        "gemma",
        "gemma",
        "GemmaForCausalLM",
        stems.COMMON,
        fixed=_GELU,
        norm_offset=1.0,
    ),
    # Activations of Gemma 2 and 3 exceed float16's range; vLLM refuses float16 for them, too.
    Family(
        "gemma2",
        "gemma2",
        "Gemma2ForCausalLM",
        stems.SANDWICH,
        keys={
            **WINDOW,
            "attn_logit_softcapping": ("attn_logit_softcapping", 50.0),
            "final_logit_softcapping": ("final_logit_softcapping", 30.0),
        },
        fixed=_GELU,
        config=of.gemma2,
        norm_offset=1.0,
        default_dtype="bfloat16",
    ),
    Family(
        "gemma3",
        "gemma3_text",
        "Gemma3ForCausalLM",
        stems.SANDWICH,
        keys=WINDOW,
        fixed={"hidden_activation": "gelu_pytorch_tanh"},
        renamed={"hidden_act": ""},
        config=of.gemma3,
        norm_offset=1.0,
        default_dtype="bfloat16",
        converts=True,
    ),
    Family(
        "gemma4",
        "gemma4_text",
        "Gemma4ForCausalLM",
        stems.GEMMA4,
        when=has_any,
        fixed={"hidden_activation": "gelu_pytorch_tanh"},
        renamed={"hidden_act": ""},
        config=of.gemma4,
        top_names=stems.GEMMA4_TOP,
        rotates_part=True,
        own_rope=True,
        layers_differ=True,
        default_dtype="bfloat16",
    ),
    Family(
        "phi2",
        "phi",
        "PhiForCausalLM",
        stems.PHI2,
        fixed={"hidden_act": "gelu_new"},
        renamed={**_LAYER_NORM, "head_dim": ""},
        top_names=stems.FINAL_NORM,
        rotates_part=True,
    ),
    Family(
        "phi3",
        "phi3",
        "Phi3ForCausalLM",
        stems.PHI3,
        config=of.phi3,
        rotates_part=True,
        unused=("rope_factors_long.weight", "rope_factors_short.weight"),
    ),
    Family(
        "glm4",
        "glm4",
        "Glm4ForCausalLM",
        stems.GLM4,
        states_bias=True,
        rotates_part=True,
        default_dtype="bfloat16",
    ),
    _llama(
        "granite",
        "granite",
        "GraniteForCausalLM",
        stems.COMMON,
        keys=GRANITE,
        fixed={"mlp_bias": False},
    ),
    Family(
        "nemotron",
        "nemotron",
        "NemotronForCausalLM",
        stems.COMMON,
        fixed={"hidden_act": "relu2"},
        renamed={"rms_norm_eps": "norm_eps"},
        norm_offset=1.0,
        states_bias=True,
        rotates_part=True,
        default_dtype="bfloat16",
    ),
    Family(
        "stablelm",
        "stablelm",
        "StableLmForCausalLM",
        {**stems.COMMON, **stems.QK_NORM},
        config=of.stablelm,
        renamed={**_LAYER_NORM, "head_dim": ""},
        rotates_part=True,
    ),
    Family(
        "starcoder2",
        "starcoder2",
        "Starcoder2ForCausalLM",
        stems.STARCODER2,
        keys={"sliding_window": ("attention.sliding_window", None)},
        fixed={"hidden_act": "gelu_pytorch_tanh", "use_bias": True},
        renamed={"rms_norm_eps": "norm_epsilon", "head_dim": ""},
    ),
    Family(
        "olmo2",
        "olmo3",
        "Olmo3ForCausalLM",
        stems.POST_NORM,
        when=_has_window,
        keys=WINDOW,
        config=of.every_fourth_sees_all,
    ),
    Family("olmo2", "olmo2", "Olmo2ForCausalLM", stems.POST_NORM),
    Family(
        "command-r",
        "cohere",
        "CohereForCausalLM",
        stems.PARALLEL,
        keys={"logit_scale": "logit_scale"},
        renamed={**_LAYER_NORM, "head_dim": ""},
        config=of.cohere,
    ),
    Family(
        "cohere2",
        "cohere2",
        "Cohere2ForCausalLM",
        stems.PARALLEL,
        keys={**WINDOW, "logit_scale": "logit_scale"},
        renamed=_LAYER_NORM,
        config=of.every_fourth_sees_all,
    ),
    Family("exaone4", "exaone4", "Exaone4ForCausalLM", stems.POST_NORM, config=of.exaone4),
    Family(
        "hunyuan-dense",
        "hunyuan_v1_dense",
        "HunYuanDenseV1ForCausalLM",
        {
            **stems.COMMON,
            "attn_q_norm": "self_attn.query_layernorm",
            "attn_k_norm": "self_attn.key_layernorm",
        },
        fixed={"use_qk_norm": True},
        states_bias=True,
    ),
    Family("ernie4_5", "ernie4_5", "Ernie4_5ForCausalLM", stems.COMMON, config=of.ernie),
    Family(
        "seed_oss",
        "seed_oss",
        "SeedOssForCausalLM",
        stems.SECOND_NORM,
        config=of.seed_oss,
        states_bias=True,
    ),
)
