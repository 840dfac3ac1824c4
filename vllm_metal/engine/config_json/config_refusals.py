# SPDX-License-Identifier: Apache-2.0
"""Rejects settings of config.json that mlx-lm's module does not compute."""

from __future__ import annotations

from collections.abc import Mapping

from vllm_metal.engine.config_json import fixed_values
from vllm_metal.engine.config_json.inert_keys import names
from vllm_metal.engine.config_json.rope_parameters import (
    OF_THEIR_OWN,
    Config,
    by_layer_type,
    rope,
    scaling,
    scaling_of,
    stated_share,
)
from vllm_metal.identity.model_files import ModelLoadError

#: Modules that read `rope_parameters` themselves.
READ_ROPE = names(
    "deepseek_v4 gemma4_text glm_moe_dsa glm_ocr laguna mellum minimax_m3_vl ministral3 mistral4 "
    "muse_glimmer muse_spark qwen3 qwen3_5 qwen4_exp spark2_5"
)
#: Modules that rotate whole heads whatever share is configured; see `ropes`.
PARTIAL = frozenset(("glm",))
#: Keys for the theta of sliding-window layers.
_LOCAL_THETA = ("rope_local_base_freq", "swa_rope_theta")
#: Modules that scale only the RoPE of layers without sliding windows.
_LOCAL_PLAIN = frozenset(("gemma3_text", "gemma3n", "gear", "olmo3"))
#: Types of scaled RoPE computed by modules that build their own. The others call mlx-lm's
#: `initialize_rope`, which rejects types it does not know.
_TYPES: Mapping[str, frozenset[str]] = {
    "deepseek": frozenset(("linear",)),
    "ernie4_5_moe_vl": frozenset(),
    "gemma3n": frozenset(),
    "gpt_oss": frozenset(("linear", "llama3", "yarn")),
    "deepseek_v2": frozenset(("yarn",)),
    "deepseek_v41": frozenset(("yarn",)),
    "hunyuan": frozenset(("dynamic",)),
    "hunyuan_v1_dense": frozenset(("dynamic",)),
    "minicpm3": frozenset(("longrope",)),
    "nemotron": frozenset(("linear",)),
    "phi3": frozenset(("linear", "longrope", "su")),
    "phimoe": frozenset(("longrope", "su")),
}
#: Modules that require a scaled RoPE.
_SCALED = frozenset(("deepseek_v2", "minicpm3"))
#: Modules that do not read or compute a scaling, but have RoPE modules that can be replaced by
#: scaled ones; see `ropes`.
UNSCALED = names(
    "cohere cohere2 dots1 ernie4_5 ernie4_5_moe gemma gemma2 glm4_moe helium llama4_text mixtral "
    "olmo qwen2_moe qwen3_moe solar_open starcoder2"
)
#: Keys for an activation's name.
_ACTIVATION_KEYS = ("hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act")
_SILU = frozenset(("silu", "swish"))
_GELU_TANH = frozenset(("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_python_tanh"))
#: Activations computed by modules that do not read the name.
_ACTIVATIONS: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(
        names(
            "afm7 afmoe baichuan_m1 bailing_hybrid bailing_moe bailing_moe_linear "
            "bailing_moe_v3 cohere cohere2 cohere2_moe dbrx deepseek deepseek_v2 deepseek_v3 "
            "deepseek_v32 dots1 ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe falcon_h1 glm glm4 "
            "glm4_moe glm4_moe_lite glm_moe_dsa gpt_oss granite granitemoe granitemoehybrid helium "
            "hunyuan hunyuan_v1_dense internlm2 internlm3 iquestloopcoder jamba kimi_linear "
            "kimi_vl Klear laguna lfm2 lfm2_moe lille-130m llama llama4 llama4_text longcat_flash "
            "longcat_flash_ngram mamba mamba2 mellum mimo mimo_v2 mimo_v2_flash minicpm minicpm3 "
            "minimax ministral3 mistral4 mixtral nanbeige olmo olmo2 olmo3 olmo_hybrid olmoe "
            "openelm phi3 phimoe plamo plamo2 plamo3 qwen qwen2 qwen2_moe qwen3 qwen3_5 qwen3_moe "
            "qwen3_next seed_oss smollm3 solar_open stablelm step3p5 step3p7 talkie "
            "telechat3 xing4_0 youtu_llm flint hrm_text k2_horizon kolibri1 mistral_large3 "
            "cohere_compass deepseek_v4 deepseek_v41 ernie4_5_moe_vl glm5_next glm_ocr hy_v4 "
            "mllama molmo2 qwen4_exp youtu_vl"
        ),
        _SILU,
    ),
    "apertus": frozenset(("xielu",)),
    "gemma": _GELU_TANH | {"gelu"},
    **dict.fromkeys(("bitnet", "nanochat", "nemotron", "nemotron_h"), frozenset(("relu2",))),
    **dict.fromkeys(
        ("gemma2", "gemma3_text", "gemma3n", "gemma4_text", "gpt2", "gptj", "phi"), _GELU_TANH
    ),
    "recurrent_gemma": _GELU_TANH,
}
#: Share of each head rotated by modules that do not read it.
_ROTATED = {"recurrent_gemma": 0.5}


def keys(module: str) -> set[str]:
    """Returns the keys that `check` examines, whether or not the module reads them."""
    rope_keys = (
        () if module in READ_ROPE else ("partial_rotary_factor", "rope_parameters", "rope_scaling")
    )
    return {*rope_keys, *(_ACTIVATION_KEYS if module in _ACTIVATIONS else ())}


def check(config: Config, module: str, read: set[str]) -> None:
    """Checks activation, RoPE, and settings with a single supported value.

    Raises ModelLoadError: the module does not compute a setting, or the config contradicts itself.
    """
    fixed_values.check(config, module)
    _check_activation(config, module)
    _check_agreement(config, read)
    _check_blocks(config)
    if module not in READ_ROPE:
        _check_rope(config, module, read)


def _check_activation(config: Config, module: str) -> None:
    # Some of these modules name the key among their arguments and do not use it.
    computed = _ACTIVATIONS.get(module)
    if computed is None:
        return
    for key in _ACTIVATION_KEYS:
        if (named := config.get(key)) is not None and named not in computed:
            raise ModelLoadError(
                f"config.json sets {key}={named!r}, but mlx-lm's module {module!r} supports "
                f"only {' or '.join(sorted(computed))}. Choose another checkpoint"
            )


def _check_blocks(config: Config) -> None:
    # Blocks of nemotron-nas: mlx-lm's module drops their windows and sinks.
    for index, block in enumerate(config.get("block_configs") or ()):
        for part in ("attention", "ffn"):
            for key in ("window_length", "num_sink_tokens", "sparsify"):
                if (block.get(part) or {}).get(key) is not None:
                    raise ModelLoadError(
                        f"config.json sets {key} in block {index} of block_configs, which mlx-lm's "
                        "module does not support. Choose another checkpoint"
                    )


def _check_agreement(config: Config, read: set[str]) -> None:
    # A key at the top level must agree with rope_parameters.
    for key in (*OF_THEIR_OWN, *(read & {"original_max_position_embeddings"})):
        given, stated = config.get(key), rope(config).get(key)
        if given is not None and stated is not None and given != stated:
            raise ModelLoadError(
                f"config.json sets {key}={given!r}, but rope_parameters sets {stated!r}: "
                f"choose one with --hf-overrides, such as '{{\"{key}\": {stated!r}}}'"
            )


def _check_rope(config: Config, module: str, read: set[str]) -> None:
    parameters = config.get("rope_parameters") or {}
    rope_type = (scaling(config) or {}).get("rope_type", "default")
    if rope_type == "default" and module in _SCALED:
        raise ModelLoadError(
            f"config.json sets rope_type='default', but mlx-lm's module {module!r} "
            "supports only scaled RoPE. Choose another checkpoint"
        )
    served = rope_type in _TYPES.get(module, (rope_type,)) and "rope_scaling" in read
    if rope_type != "default" and not served and module not in UNSCALED:
        raise ModelLoadError(
            f"config.json sets rope_type={rope_type!r}, which mlx-lm's module {module!r} "
            "does not support. Choose another checkpoint"
        )
    share = stated_share(config)
    reads_share = module in PARTIAL or read & {"partial_rotary_factor", "rotary_pct", "rotary_dim"}
    if not reads_share and share not in (None, _ROTATED.get(module, 1.0)):
        raise ModelLoadError(
            f"config.json sets partial_rotary_factor={share}, which mlx-lm's module "
            f"{module!r} does not support. Choose another checkpoint"
        )
    if by_layer_type(parameters):
        _check_types(parameters, module, read)


def _check_types(parameters: Config, module: str, read: set[str]) -> None:
    """Rejects RoPE parameters of a layer type that the module does not compute separately."""
    whole = parameters.get("full_attention") or {}
    theta, scaled = whole.get("rope_theta"), scaling_of({"rope_parameters": whole})
    share = whole.get("partial_rotary_factor")
    for layer_type, own in parameters.items():
        if layer_type == "full_attention" or own is None:
            continue
        computed = {
            "rope_theta": own.get("rope_theta") if read & set(_LOCAL_THETA) else theta,
            "partial_rotary_factor": share,
            "rope_type": None if module in _LOCAL_PLAIN else scaled,
        }
        stated = {
            "rope_theta": own.get("rope_theta"),
            "partial_rotary_factor": own.get("partial_rotary_factor"),
            "rope_type": scaling_of({"rope_parameters": own}),
        }
        uncomputed = [key for key in computed if computed[key] != stated[key]]
        if uncomputed:
            raise ModelLoadError(
                f"config.json sets another {', '.join(uncomputed)} for {layer_type} layers in "
                f"rope_parameters, which mlx-lm's module {module!r} does not support. Choose "
                "another checkpoint"
            )
