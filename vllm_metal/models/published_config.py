# SPDX-License-Identifier: Apache-2.0
"""What transformers 5 writes into config.json, as mlx-lm's modules read it.

mlx-lm hands a module those keys that its `ModelArgs` name, and drops all others without a word.
transformers 5 renamed keys, and left out what follows from others: most modules then take their own
default. Each row below gives one key that modules read from what a config.json says instead.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_metal.models import config_keys, config_refusals, implied_values
from vllm_metal.models.rope_parameters import (
    Config,
    by_layer_type,
    rope,
    rotated_share,
    scaling_of,
)
from vllm_metal.models.weight_files import ModelLoadError

Unread = dict[tuple[str, ...], Any]
#: Classes within a module that read its `text_config`, where no module of that name does.
_TEXT_ARGS = ("TextConfig", "TextModelArgs", "TextArgs")
#: Modules that read the `text_config` of others, which have no class for it.
_TEXT_OF = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "lfm2-vl": "lfm2",
    "pixtral": "llama",
    "qwen2_vl": "qwen2",
    "qwen3_5_moe": "qwen3_5",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
}
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


def _of_rope(key: str, layer_type: str = "full_attention") -> Callable[[Config], Any]:
    return lambda config: rope(config, layer_type).get(key)


def _renamed(key: str) -> Callable[[Config], Any]:
    return lambda config: config.get(key)


def _head_dim(config: Config) -> int | None:
    size, heads = config.get("hidden_size"), config.get("num_attention_heads")
    return size // heads if size and heads else None


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


def _share_of_whole_layers(config: Config) -> Any:
    """Where ropes differ by layer type, each says its own share."""
    return NOTHING if by_layer_type(config.get("rope_parameters") or {}) else None


def _head_dim_of_whole_layers(config: Config) -> int | None:
    """transformers 5 says it layer by layer; layers of one kind have one."""
    changed, size = config.get("per_layer_config"), config.get("head_dim")
    if changed is None:
        return None
    for index in _whole_layers(config) or ():
        size = (changed.get(str(index)) or {}).get("head_dim", size)
    return size


def _expanded(config: Config) -> int | None:
    """Channels of Mamba 2, whose class of transformers' has them by a factor."""
    factor, size = config.get("expand"), config.get("hidden_size")
    return int(factor * size) if factor and size else None


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


def _attention_of_dbrx(config: Config) -> dict[str, Any] | None:
    """Older files have the rope's base in here.

    Raises:
        ModelLoadError: the config says two of them.
    """
    own, theta = config.get("attn_config"), rope(config).get("rope_theta")
    if own is None or theta is None:
        return None
    if own.get("rope_theta", theta) != theta:
        raise ModelLoadError(
            f"config.json says rope_theta {own['rope_theta']!r} in attn_config, and {theta!r} in "
            "rope_parameters"
        )
    return {**own, "rope_theta": theta}


def _vocabulary_of_text(config: Config) -> int | None:
    """mlx-lm's module of the whole model reads it beside the text's own configuration."""
    return (config.get("text_config") or {}).get("vocab_size")


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
    # All of its layers have experts.
    "solar_open": {
        "partial_rotary_factor": 1.0,
        "first_k_dense_replace": 0,
        "intermediate_size": 0,
    },
}
#: Of modules that do not take `rope_parameters` by themselves.
_ROPE_ROWS: Sequence[Row] = (
    Row("rope_theta", _of_rope("rope_theta")),
    Row("rope_scaling", scaling_of),
    Row("partial_rotary_factor", _of_rope("partial_rotary_factor")),
    Row("rotary_pct", _of_rope("partial_rotary_factor"), ("gpt_neox",)),
    Row("rotary_emb_base", _of_rope("rope_theta"), ("gpt_neox",)),
    Row(
        "original_max_position_embeddings",
        _of_rope("original_max_position_embeddings"),
        ("phi3", "phimoe"),
    ),
    Row("rope_local_base_freq", _of_rope("rope_theta", "sliding_attention")),
    Row("swa_rope_theta", _of_rope("rope_theta", "sliding_attention")),
)
ROWS: Sequence[Row] = (
    Row("head_dim", _head_dim, no_default=True),
    Row("sliding_window_pattern", _window_letters, ("exaone4",), always=True),
    Row("first_k_dense_replace", _num_dense_layers),
    Row("is_moe_layer", _sparse_layers),
    Row("num_experts", _renamed("num_local_experts")),
    Row("vocab_size", _vocabulary_of_text, ("gemma3",)),
    Row("n_ctx", _renamed("n_positions"), ("gpt2",)),
    Row("block_dim", _renamed("hidden_size"), ("lfm2",)),
    # transformers' default; mlx-lm's other one is of no file.
    Row("time_step_limit", _always((0.0, math.inf)), ("granitemoehybrid",)),
    Row("layer_types", _kinds_of_granite, ("granitemoehybrid",), always=True),
    Row("global_head_dim", _head_dim_of_whole_layers, ("gemma4_text",)),
    Row("intermediate_size", _expanded, ("mamba2",)),
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
    Row("partial_rotary_factor", _share_of_whole_layers, ("laguna",), always=True),
    # transformers' class bounds these weights while it trains only.
    Row("altup_coef_clip", _always(NOTHING), ("gemma3n",), always=True),
    Row("attn_config", _attention_of_dbrx, ("dbrx",), always=True),
    Row("linear_attn_config", _delta_attention, ("kimi_linear",)),
    *(
        Row(key, _always(value), (module,), always=True)
        for module, choices in _CHOICES.items()
        for key, value in choices.items()
    ),
)


def as_read(config: Config, module: str, args: type) -> dict[str, Any]:
    """The keys that must be changed in a config.json for a module of mlx-lm's to read what it says.

    Args:
        config: of config.json, --hf-overrides included. What it spells as the module reads it
            stays.
        module: the module's name.
        args: its `ModelArgs`.

    Raises:
        ModelLoadError: the config says two things of one key, or what the module cannot compute, or
            it has a key that nobody reads.
    """
    changed, unread = _read(config, module, args)
    config_keys.refuse(unread, module, config)
    return changed


def _read(config: Config, module: str, args: type) -> tuple[dict[str, Any], Unread]:
    """What `as_read` returns, and the keys that nobody reads."""
    if not dataclasses.is_dataclass(args):
        return {}, {}
    read = {field.name for field in dataclasses.fields(args)}
    if "text_config" in read and config.get("text_config") is None:
        # A text model without the multimodal one around it.
        inner, inner_args = _text_args(config, module)
        if inner_args is None:
            return {}, {}
        of_text, unread = _read(config, inner, inner_args)
        return {"text_config": {**config, **of_text}}, unread
    changed, used = _changed(config, module, args)
    config_refusals.check(config, module, read)
    unread = config_keys.unread(config, module, read, used)
    if "text_config" in read and isinstance(text := config.get("text_config"), Mapping):
        inner, inner_args = _text_args(text, module)
        if inner_args is not None:
            tied = _tied(config, text, inner_args)
            of_text, unread_of_text = _read({**text, **tied}, inner, inner_args)
            if of_text := tied | of_text:  # replaced as a whole
                changed["text_config"] = {**text, **of_text}
            unread |= {("text_config", *path): value for path, value in unread_of_text.items()}
    return changed, unread


def _tied(config: Config, text: Config, args: type) -> dict[str, bool]:
    """Whether head and embedding are one, which transformers says around the text model alone."""
    key = "tie_word_embeddings"
    if key in text or key not in _required(args):
        return {}
    return {key: bool(config.get(key))}


def _required(args: type) -> set[str]:
    """Keys without a default."""
    fields: Any = dataclasses.fields(args)
    return {
        field.name
        for field in fields
        if field.default is field.default_factory is dataclasses.MISSING
    }


def _changed(config: Config, module: str, args: type) -> tuple[dict[str, Any], set[str]]:
    """The keys that rows give, and those that they were made of."""
    fields: Any = dataclasses.fields(args)
    read = {field.name for field in fields}
    required = _required(args)
    changed: dict[str, Any] = {}
    used: set[str] = set()
    for row in (*ROWS, *(() if module in config_refusals.READ_ROPE else _ROPE_ROWS)):
        if row.key not in (required if row.no_default else read):
            continue
        if row.families and module not in row.families:
            continue
        asked = implied_values.Asked(config)
        value = row.value(asked)
        if value is None:
            continue
        if row.always or config.get(row.key) is None:
            changed[row.key] = None if value is NOTHING else value
            used |= asked.keys_asked
        elif config[row.key] == value:  # it says the same by both names
            used |= asked.keys_asked
    for field in fields:
        null = field.name not in changed and config.get(field.name, ...) is None
        if null and field.name in required and field.type in (int, float):
            raise ModelLoadError(
                f"config.json says null for {field.name}, which mlx-lm's module {module!r} needs"
            )
    if "rope_scaling" in required and "rope_scaling" not in config:
        changed.setdefault("rope_scaling", None)
    if module in config_refusals.UNSCALED and "rope_scaling" in read:
        changed["rope_scaling"] = None  # some refuse what they would not compute in any case
    return changed, used


def _text_args(text: Config, module: str) -> tuple[str, type | None]:
    """The module that reads a `text_config`, and its arguments."""
    if module == "mistral3":
        inner = text.get("model_type")
        module = inner if inner in ("ministral3", "mistral4") else "llama"
    module = _TEXT_OF.get(module, module)
    own = sys.modules[f"mlx_lm.models.{module}"]
    for cls in own.Model.__mro__:  # of another module, where it is a variant of its model
        for name in _TEXT_ARGS:
            found = getattr(sys.modules[cls.__module__], name, None)
            if found is not None:
                own_place = found.__module__.startswith("mlx_lm.")  # else a patch has made it
                place = found.__module__ if own_place else cls.__module__
                return place.rpartition(".")[2], found
    of_text: type | None = getattr(own, "ModelArgs", None)
    if of_text is None or "text_config" in inspect.signature(of_text).parameters:
        return module, None
    return module, of_text
