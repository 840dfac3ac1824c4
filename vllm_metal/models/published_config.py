# SPDX-License-Identifier: Apache-2.0
"""What transformers 5 writes into config.json, as mlx-lm's modules read it.

mlx-lm hands a module those keys that its `ModelArgs` name, and drops all others without a word.
transformers 5 renamed keys, and left out what follows from others: most modules then take their own
default. Each row below gives one key that modules read from what a config.json says instead.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_metal.models.patches import registry as patches
from vllm_metal.models.weight_files import ModelLoadError

Config = Mapping[str, Any]


def _names(words: str) -> frozenset[str]:
    return frozenset(words.split())


#: Modules that take all of `rope_parameters` by themselves.
_READ_ROPE = _names(
    "gemma4_text glm_moe_dsa laguna mellum minimax_m3_vl ministral3 mistral4 muse_glimmer "
    "muse_spark qwen3 qwen3_5 spark2_5"
)
#: Modules that rotate whole heads, whatever share the config says; see `patches.plain_ropes`.
PARTIAL = frozenset(("glm",))
#: Keys that hold the theta of layers with windows.
_LOCAL_THETA = ("rope_local_base_freq", "swa_rope_theta")
#: Modules that scale the rope of layers without windows only.
_LOCAL_PLAIN = frozenset(("gemma3_text", "gemma3n", "gear", "olmo3"))
#: Types of scaled ropes that modules compute which make their own. The others call mlx-lm's
#: `initialize_rope`, which refuses those it does not know.
_TYPES: Mapping[str, frozenset[str]] = {
    "deepseek": frozenset(("linear",)),
    "gemma3n": frozenset(),
    "deepseek_v2": frozenset(("yarn",)),
    "hunyuan": frozenset(("dynamic",)),
    "hunyuan_v1_dense": frozenset(("dynamic",)),
    "minicpm3": frozenset(("longrope",)),
    "nemotron": frozenset(("linear",)),
    "phi3": frozenset(("linear", "longrope", "su")),
    "phimoe": frozenset(("longrope", "su")),
}
#: Modules that read no scaling, or read it and do not compute it, and whose rope can be replaced by
#: one that is scaled; see `patches.plain_ropes`.
UNSCALED = _names(
    "cohere cohere2 dots1 ernie4_5 ernie4_5_moe gemma gemma2 glm4_moe helium mixtral qwen2_moe "
    "qwen3_moe solar_open starcoder2"
)
#: Classes within a module that read its `text_config`, where no module of that name does.
_TEXT_ARGS = ("TextConfig", "TextModelArgs", "TextArgs")
#: Keys of a rope's parameters that have keys of their own.
_OF_THEIR_OWN = ("rope_theta", "partial_rotary_factor")


#: The value of a key that is to be None.
NOTHING = object()


@dataclass(frozen=True)
class Row:
    """A key that modules read, and what it follows from."""

    key: str
    value: Callable[[Config], Any]  # None: the config says nothing of it
    families: tuple[str, ...] = ()  # modules of mlx-lm; none: all that read the key
    always: bool = False  # also where the config has the key, in other words or stale
    no_default: bool = False  # of modules only that demand the key; others know better


def _rope(config: Config, layer_type: str = "full_attention") -> Config:
    """Parameters of the rope, or of the layers of a type; empty where the config has none."""
    parameters = config.get("rope_parameters") or {}
    if _by_layer_type(parameters):
        return parameters.get(layer_type) or {}
    return parameters


def _by_layer_type(parameters: Config) -> bool:
    return any(isinstance(value, Mapping) for value in parameters.values())


def _scaling(config: Config) -> dict[str, Any] | None:
    """As `rope_scaling` was: the type by both of its names."""
    rope = {key: value for key, value in _rope(config).items() if key not in _OF_THEIR_OWN}
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type == "default":
        return None
    return rope | {"rope_type": rope_type, "type": rope_type}


def scaling(config: Config) -> dict[str, Any] | None:
    """How positions are scaled, in either spelling; None: they are not."""
    given = config.get("rope_scaling")
    return _scaling({"rope_parameters": given} if given else config)


def rotated_share(config: Config) -> float:
    """The share of each head that a rope turns."""
    stated = config.get("partial_rotary_factor", _rope(config).get("partial_rotary_factor"))
    return 1.0 if stated is None else float(stated)


def _of_rope(key: str, layer_type: str = "full_attention") -> Callable[[Config], Any]:
    return lambda config: _rope(config, layer_type).get(key)


def _renamed(key: str) -> Callable[[Config], Any]:
    return lambda config: config.get(key)


def _head_dim(config: Config) -> int | None:
    size, heads = config.get("hidden_size"), config.get("num_attention_heads")
    return size // heads if size and heads else None


def _window_period(config: Config) -> int | None:
    """Every so manieth layer sees the whole context; one more than there are layers: none does.

    Raises:
        ModelLoadError: the layers with windows are in no such pattern.
    """
    whole = _whole_layers(config)
    if whole is None:
        return None
    if not whole:
        return len(config["layer_types"]) + 1
    period = whole[0] + 1
    if whole != list(range(period - 1, len(config["layer_types"]), period)):
        raise ModelLoadError(
            "layer_types of config.json have whole attention in layers "
            f"{', '.join(map(str, whole))}: mlx-lm's module of the family has it in every n-th "
            "layer only"
        )
    return period


def _window_letters(config: Config) -> str | None:
    """A letter a layer: L with a window, G without."""
    types = config.get("layer_types")
    return "".join("G" if kind == "full_attention" else "L" for kind in types) if types else None


def _whole_layers(config: Config) -> list[int] | None:
    """Layers without a window; None where the config does not say."""
    types = config.get("layer_types")
    if not types:
        return None
    return [index for index, kind in enumerate(types) if kind == "full_attention"]


def _sparse_layers(config: Config) -> list[bool] | None:
    types = config.get("mlp_layer_types")
    return [kind == "sparse" for kind in types] if types else None


def _num_dense_layers(config: Config) -> int | None:
    """How many layers come before those of experts.

    Raises:
        ModelLoadError: there are dense ones behind them.
    """
    sparse = _sparse_layers(config)
    if sparse is None:
        return None
    count = sparse.index(True) if True in sparse else len(sparse)
    if not all(sparse[count:]):
        raise ModelLoadError(
            "mlp_layer_types of config.json have dense layers behind layers of experts: mlx-lm's "
            "module of the family has them at the beginning only"
        )
    return count


def _always(value: Any) -> Callable[[Config], Any]:
    return lambda config: value


def _kinds_of_granite(config: Config) -> list[str] | None:
    names = {"linear_attention": "mamba", "full_attention": "attention"}
    types = config.get("layer_types")
    return [names.get(kind, kind) for kind in types] if types else None


def _twice_the_kv_heads(config: Config) -> int | None:
    heads = config.get("num_key_value_heads")
    return None if heads is None else 2 * int(heads)


def _layers_with_windows(config: Config) -> list[int] | None:
    types = config.get("layer_types")
    return [int(kind == "sliding_attention") for kind in types] if types else None


def _layers_of_experts(config: Config) -> list[int] | None:
    sparse = _sparse_layers(config)
    return None if sparse is None else [int(each) for each in sparse]


def _head_dim_of_whole_layers(config: Config) -> int | None:
    """transformers 5 says it layer by layer; layers of one kind have one."""
    changed = config.get("per_layer_config") or {}
    for index in _whole_layers(config) or ():
        if (size := (changed.get(str(index)) or {}).get("head_dim")) is not None:
            return int(size)
    return None


def _rotated_width(config: Config) -> int | None:
    size = config.get("head_dim") or _head_dim(config)
    return int(size * rotated_share(config)) if size else None


def _delta_attention(config: Config) -> dict[str, Any] | None:
    """Layers are counted from 1 here."""
    types = config.get("layer_types")
    if not types:
        return None
    whole = [index + 1 for index in _whole_layers(config) or ()]
    return {
        "full_attn_layers": whole,
        "kda_layers": [n for n in range(1, len(types) + 1) if n not in whole],
        "num_heads": config.get("linear_num_heads"),
        "head_dim": config.get("linear_head_dim"),
        "short_conv_kernel_size": config.get("linear_conv_kernel_dim"),
    }


#: By module, what transformers' class has no choice of, so that its files do not name it.
_CHOICES: Mapping[str, Mapping[str, Any]] = {
    "apertus": {"mlp_bias": False, "post_norm": False, "qk_norm": True},
    "ernie4_5_moe": {"moe_use_aux_free": True},
    "kimi_linear": {"rope_theta": 10000.0},  # positions are not used
    "longcat_flash": {
        "attention_method": "MLA",
        "zero_expert_type": "identity",
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
    },
    "minimax": {"shared_intermediate_size": 0},
    "mimo_v2_flash": {
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "n_shared_experts": NOTHING,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    },
    "solar_open": {"partial_rotary_factor": 1.0, "first_k_dense_replace": 0},
}
#: Of modules that do not take `rope_parameters` by themselves.
_ROPE_ROWS: Sequence[Row] = (
    Row("rope_theta", _of_rope("rope_theta")),
    Row("rope_scaling", _scaling),
    Row("partial_rotary_factor", _of_rope("partial_rotary_factor")),
    Row("rotary_pct", _of_rope("partial_rotary_factor"), ("gpt_neox",)),
    Row("rotary_emb_base", _of_rope("rope_theta"), ("gpt_neox",)),
    Row("rope_local_base_freq", _of_rope("rope_theta", "sliding_attention")),
    Row("swa_rope_theta", _of_rope("rope_theta", "sliding_attention")),
)
ROWS: Sequence[Row] = (
    Row("head_dim", _head_dim, no_default=True),
    Row("sliding_window_pattern", _window_period, ("cohere2",), always=True),
    Row("sliding_window_pattern", _window_letters, ("exaone4",), always=True),
    Row("first_k_dense_replace", _num_dense_layers),
    Row("is_moe_layer", _sparse_layers),
    Row("num_experts", _renamed("num_local_experts")),
    Row("n_ctx", _renamed("n_positions"), ("gpt2",)),
    Row("block_dim", _renamed("hidden_size"), ("lfm2",)),
    Row("full_attention_interval", _window_period, ("qwen3_next", "qwen3_5"), always=True),
    Row("layer_types", _kinds_of_granite, ("granitemoehybrid",), always=True),
    Row("global_head_dim", _head_dim_of_whole_layers, ("gemma4_text",)),
    Row("rotary_dim", _rotated_width, ("minimax",)),
    # As transformers' MiMoV2FlashAttention has it.
    Row("swa_num_key_value_heads", _twice_the_kv_heads, ("mimo_v2_flash",)),
    Row("hybrid_layer_pattern", _layers_with_windows, ("mimo_v2_flash",)),
    Row("moe_layer_freq", _layers_of_experts, ("mimo_v2_flash",)),
    *(
        Row(key, _renamed(name), ("mimo_v2_flash",))
        for key, name in {
            "sliding_window_size": "sliding_window",
            "layernorm_epsilon": "rms_norm_eps",
            "swa_num_attention_heads": "num_attention_heads",
            "swa_head_dim": "head_dim",
            "swa_v_head_dim": "v_head_dim",
        }.items()
    ),
    Row("linear_attn_config", _delta_attention, ("kimi_linear",)),
    *(
        Row(key, _always(value), (module,), always=True)
        for module, choices in _CHOICES.items()
        for key, value in choices.items()
    ),
)
#: Keys that name an activation.
_ACTIVATION_KEYS = ("hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act")
_SILU = frozenset(("silu", "swish"))
_GELU_TANH = frozenset(("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_python_tanh"))
#: Activations that modules compute which do not read their name.
_ACTIVATIONS: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(
        _names(
            "afmoe cohere cohere2 deepseek_v2 deepseek_v3 deepseek_v32 dots1 ernie4_5 "
            "ernie4_5_moe exaone4 exaone_moe falcon_h1 glm glm4 glm4_moe glm4_moe_lite "
            "glm_moe_dsa gpt_oss granite granitemoe granitemoehybrid helium hunyuan_v1_dense "
            "jamba kimi_linear laguna llama llama4_text longcat_flash mamba mamba2 mellum "
            "mimo_v2_flash minicpm3 minimax ministral3 mistral4 mixtral olmo2 olmo3 "
            "olmo_hybrid olmoe phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next "
            "seed_oss smollm3 solar_open stablelm step3p5"
        ),
        _SILU,
    ),
    "apertus": frozenset(("xielu",)),
    "gemma": _GELU_TANH | {"gelu"},
    "gpt_bigcode": _GELU_TANH | {"gelu"},
    "gpt_neox": _GELU_TANH | {"gelu"},
    "starcoder2": _GELU_TANH | {"gelu"},
    **dict.fromkeys(("bitnet", "nanochat", "nemotron", "nemotron_h"), frozenset(("relu2",))),
    **dict.fromkeys(
        ("gemma2", "gemma3_text", "gemma3n", "gemma4_text", "gpt2", "gptj", "phi"), _GELU_TANH
    ),
    "recurrent_gemma": _GELU_TANH,
}
#: The share of a head that modules rotate which do not read it.
_ROTATED = {"recurrent_gemma": 0.5}


def as_read(config: Config, module: str, args: type) -> dict[str, Any]:
    """The keys that must be changed in a config.json for a module of mlx-lm's to read what it says.

    Args:
        config: of config.json, --hf-overrides included. What it spells as the module reads it
            stays.
        module: the module's name.
        args: its `ModelArgs`.

    Raises:
        ModelLoadError: the config says two things of one key, or what the module cannot compute.
    """
    if not dataclasses.is_dataclass(args):
        return {}
    fields = dataclasses.fields(args)
    read = {field.name for field in fields}
    required = {
        field.name
        for field in fields
        if field.default is field.default_factory is dataclasses.MISSING
    }
    changed: dict[str, Any] = {}
    for row in (*ROWS, *(() if module in _READ_ROPE else _ROPE_ROWS)):
        if row.key not in (required if row.no_default else read):
            continue
        if row.families and module not in row.families:
            continue
        value = row.value(config)
        if value is not None and (row.always or config.get(row.key) is None):
            changed[row.key] = None if value is NOTHING else value
    if "rope_scaling" in required and "rope_scaling" not in config:
        changed.setdefault("rope_scaling", None)
    if module in UNSCALED and "rope_scaling" in read:
        changed["rope_scaling"] = None  # some refuse what they would not compute in any case
    _check_activation(config, module, read)
    if module not in _READ_ROPE:
        _check_rope(config, module, read)
    if "text_config" in read and isinstance(text := config.get("text_config"), Mapping):
        changed |= _of_text(text, module)
    return changed


def _of_text(text: Config, module: str) -> dict[str, Any]:
    """The same of a `text_config`, which is replaced as a whole."""
    inner, inner_args = _text_args(text, module)
    if inner_args is None:
        return {}
    changed = as_read(text, inner, inner_args)
    return {"text_config": {**text, **changed}} if changed else {}


def _text_args(text: Config, module: str) -> tuple[str, type | None]:
    """The module that reads a `text_config`, and its arguments."""
    own = sys.modules[f"mlx_lm.models.{module}"]
    for name in _TEXT_ARGS:
        if (found := getattr(own, name, None)) is not None:
            return module, found
    try:
        family, args = patches.classes(dict(text))
    except (KeyError, ValueError):
        return module, None
    return patches.module_of(text, family), args


def _check_activation(config: Config, module: str, read: set[str]) -> None:
    """
    Raises:
        ModelLoadError: the config names an activation that the module does not compute.
    """
    computed = _ACTIVATIONS.get(module)
    if computed is None:
        return
    for key in _ACTIVATION_KEYS:
        if key not in read and (named := config.get(key)) is not None and named not in computed:
            raise ModelLoadError(
                f"config.json says {key} {named!r}; mlx-lm's module {module!r} computes "
                f"{' or '.join(sorted(computed))}"
            )


def _check_rope(config: Config, module: str, read: set[str]) -> None:
    """
    Raises:
        ModelLoadError: the config says two things of the rope, or one that the module drops.
    """
    parameters = config.get("rope_parameters") or {}
    for key in _OF_THEIR_OWN:
        given, stated = config.get(key), _rope(config).get(key)
        if given is not None and stated is not None and given != stated:
            raise ModelLoadError(
                f"config.json says {key} {given!r}, and in rope_parameters {stated!r}: say which "
                f"counts, as --hf-overrides '{{\"{key}\": {stated!r}}}'"
            )
    rope_type = (scaling(config) or {}).get("rope_type", "default")
    served = rope_type in _TYPES.get(module, (rope_type,)) and "rope_scaling" in read
    if rope_type != "default" and not served and module not in UNSCALED:
        raise ModelLoadError(
            f"config.json asks for a rope of type {rope_type!r}, which mlx-lm's module {module!r} "
            "does not compute"
        )
    share = rotated_share(config)
    reads_share = module in PARTIAL or read & {"partial_rotary_factor", "rotary_pct", "rotary_dim"}
    if not reads_share and share != _ROTATED.get(module, 1.0):
        raise ModelLoadError(
            f"config.json says partial_rotary_factor {share}, which mlx-lm's module {module!r} "
            "does not compute"
        )
    if _by_layer_type(parameters):
        _check_types(parameters, module, read)


def _check_types(parameters: Config, module: str, read: set[str]) -> None:
    """The same of ropes by layer type."""
    whole = parameters.get("full_attention") or {}
    theta, scaling = whole.get("rope_theta"), _scaling({"rope_parameters": whole})
    share = whole.get("partial_rotary_factor")
    for layer_type, rope in parameters.items():
        if layer_type == "full_attention" or rope is None:
            continue
        computed = {
            "rope_theta": rope.get("rope_theta") if read & set(_LOCAL_THETA) else theta,
            "partial_rotary_factor": share,
            "rope_type": None if module in _LOCAL_PLAIN else scaling,
        }
        stated = {
            "rope_theta": rope.get("rope_theta"),
            "partial_rotary_factor": rope.get("partial_rotary_factor"),
            "rope_type": _scaling({"rope_parameters": rope}),
        }
        lost = [key for key in computed if computed[key] != stated[key]]
        if lost:
            raise ModelLoadError(
                f"rope_parameters of config.json have another {', '.join(lost)} for {layer_type} "
                f"layers, which mlx-lm's module {module!r} does not compute"
            )
