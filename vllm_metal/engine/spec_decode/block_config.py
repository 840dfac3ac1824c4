# SPDX-License-Identifier: Apache-2.0
"""Reads the config.json of block drafters (DFlash, DFlash2, DSpark), as vLLM's classes read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_metal.engine.config_json import inert_keys
from vllm_metal.identity.model_files import ModelLoadError

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Kind:
    """An architecture of block drafters."""

    method: str  # of --speculative-config
    module: str  # of mlx-vlm's drafters, with its layers
    published: str | None = None  # its name in checkpoints; None: vLLM's


#: Served architectures by vLLM's names.
KINDS: Mapping[str, Kind] = {
    "DFlashDraftModel": Kind("dflash", "qwen3_dflash"),
    "DFlash2DraftModel": Kind("dflash", "dflash2"),
    # Other names of the same layers.
    "DFlashMuseGlimmerAssistantModel": Kind("dflash", "qwen3_dflash", "MuseGlimmerAssistantModel"),
    "DFlashLagunaForCausalLM": Kind("dflash", "laguna_dflash", "LagunaForCausalLM"),
    "Qwen3DSparkModel": Kind("dspark", "dspark", "DSparkDraftModel"),
    "Gemma4DSparkModel": Kind("dspark", "gemma4_dspark"),
}
METHODS = tuple(dict.fromkeys(kind.method for kind in KINDS.values()))
#: Default num_speculative_tokens: blocks of five rows are the fastest for most drafters.
DEFAULT_DRAFTS = 4

_SLIDING, _FULL = "sliding_attention", "full_attention"
_NESTED = "dflash_config"
_READ = inert_keys.names(
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
    "head_dim rms_norm_eps rope_theta rope_scaling rope_parameters max_position_embeddings "
    "attention_bias hidden_act vocab_size draft_vocab_size block_size mask_token_id "
    "target_layer_ids dflash_config target_hidden_size layer_types sliding_window is_causal "
    "is_neox_style use_aux_hidden_state add_swa_attention_sink_bias logit_scale markov_rank "
    "markov_head_type sample_from_anchor dspark_draft_topk eagle_aux_hidden_state_layer_ids"
)
_READ_NESTED = inert_keys.names(
    "mask_token_id target_layer_ids causal use_swa swa_window_size attention_sink_bias "
    "attention_value_scale use_aux_hidden_state sample_from_anchor block_size conv_kernel_size "
    "conv_group_size selector_rank selector_top_k input_embedding_scale output_multiplier "
    "final_logit_softcapping markov_rank markov_head_type"
)
#: Sizes that the target repeats, windows that `layer_types` says again, confidence heads, which
#: choose between drafts that are verified anyway, and widths that another engine prefers.
_INERT = inert_keys.names(
    "num_target_layers use_sliding_window max_window_layers enable_confidence_head "
    "confidence_head_with_markov confidence_head_alpha dspark_bonus_anchor runtime_block_size "
    "block_size_policy dflash_initial_block_size prefer_requested_block_size tie_word_embeddings"
)
#: Keys of the speculators layout around the layers' own configuration.
_SPECULATORS = inert_keys.names(
    "speculators_model_type speculators_config speculators_version transformer_layer_config "
    "aux_hidden_state_layer_ids sliding_window_non_causal conv_kernel_size conv_group_size "
    "selector_rank selector_top_k"
)
#: Further keys of Laguna's drafters, the values of which are computed.
_LAGUNA = inert_keys.names(
    "gating mlp_layer_types partial_rotary_factor swa_rope_parameters num_experts "
    "num_experts_per_tok moe_intermediate_size shared_expert_intermediate_size"
)
#: Those of Gemma 4's.
_GEMMA4 = inert_keys.names(
    "attention_k_eq_v global_head_dim num_global_key_value_heads final_logit_softcapping "
    "hidden_activation num_anchors vocab_size_per_layer_input"
)
_OF_MODULE = {"laguna_dflash": _LAGUNA, "gemma4_dspark": _GEMMA4}
_GELU = "gelu_pytorch_tanh"  # Gemma 4's
_COMPUTED = {"hidden_act": "silu", "markov_head_type": "vanilla", "use_aux_hidden_state": True}
#: Kinds of projectors that other networks have in the same place.
_PROJECTORS = (None, "dflash", "dflash2", "dspark")


@dataclass(frozen=True)
class Selector:
    """DFlash2's selector, which picks among each position's top tokens by scores of pairs."""

    rank: int
    top_k: int


@dataclass(frozen=True)
class BlockConfig:
    """The shape of a block drafter."""

    module: str  # of mlx-vlm's drafters
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Config  # rope_parameters, rope_theta among them
    max_len: int
    vocab_size: int
    draft_vocab_size: int  # of a head of its own
    mask_token_id: int
    target_layer_ids: tuple[int, ...]  # after which layers of the target it reads, from 1
    target_hidden_size: int
    windows: tuple[int | None, ...]  # of each layer; None: full attention
    causal: tuple[bool, ...]  # of each layer
    attention_bias: bool
    sinks: bool
    value_scale: float | None
    interleaved: bool  # pairs of the rotary embedding are neighbors
    from_anchor: bool  # the first draft follows from the newest token's own row
    logit_scale: float
    markov_rank: int | None
    draft_topk: int | None  # tokens that the Markov head corrects; None: all
    embedding_scale: float = 1.0
    softcap: float | None = None
    conv: tuple[int, int] | None = None  # kernel and group size
    selector: Selector | None = None
    attention_scale: float | None = None  # None: of the heads' size
    keys_are_values: bool = False  # values are normed projections of the keys
    own_ends: bool = False  # has an embedding and a head of its own
    is_laguna: bool = False  # norms taps and context by layer, gates its heads

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    def num_rows(self, num_drafts: int) -> int:
        """Tokens in a request's block."""
        return num_drafts + (0 if self.from_anchor else 1)

    @staticmethod
    def of(given: Config, published: Config, architecture: str) -> BlockConfig:
        """Reads a drafter's configuration.

        Args:
            given: config.json as vLLM completes it.
            published: config.json as published.
            architecture: name of the drafter's architecture.

        Raises:
            ModelLoadError: config.json has a key or value that is not supported.
        """
        module, dspark = KINDS[architecture].module, KINDS[architecture].method == "dspark"
        _check_keys(published, module)
        nested = dict(given.get(_NESTED) or {})

        def either(key: str, default: Any = None) -> Any:
            value = nested.get(key, given.get(key))
            return default if value is None else value

        for key, computed in _COMPUTED.items():
            if (value := either(key, computed)) != computed:
                raise _unsupported(key, value, f"only {computed!r} is implemented")
        from_anchor = bool(either("sample_from_anchor", dspark))
        if from_anchor and not dspark:
            raise _unsupported("sample_from_anchor", True, "DFlash drafts from its masked rows")
        size, heads = given["hidden_size"], given["num_attention_heads"]
        vocab_size = given["vocab_size"]
        further = _FURTHER.get(module, _nothing)({**given, **published}, nested)
        shape = {
            "num_kv_heads": given.get("num_key_value_heads"),
            "head_dim": given.get("head_dim") or size // heads,
            "logit_scale": given.get("logit_scale") or 1.0,
        }
        return BlockConfig(
            module=module,
            hidden_size=size,
            intermediate_size=given["intermediate_size"],
            num_heads=heads,
            rms_norm_eps=given["rms_norm_eps"],
            rope=_rope(given, nested),
            max_len=given["max_position_embeddings"],
            vocab_size=vocab_size,
            draft_vocab_size=given.get("draft_vocab_size") or vocab_size,
            mask_token_id=_wanted(either("mask_token_id"), "mask_token_id"),
            target_layer_ids=_taps(given, nested),
            target_hidden_size=given.get("target_hidden_size") or size,
            windows=_windows(given, published, nested),
            causal=_causal(given, nested),
            attention_bias=bool(given.get("attention_bias")),
            sinks=bool(either("attention_sink_bias", given.get("add_swa_attention_sink_bias"))),
            value_scale=nested.get("attention_value_scale"),
            interleaved=not given.get("is_neox_style", True),
            from_anchor=from_anchor,
            markov_rank=_wanted(either("markov_rank"), "markov_rank") if dspark else None,
            draft_topk=given.get("dspark_draft_topk") if dspark else None,
            **(shape | further),
        )


def _of_dflash2(_: Config, nested: Config) -> dict[str, Any]:
    return {
        "logit_scale": nested.get("output_multiplier", 1.0),
        "embedding_scale": float(nested.get("input_embedding_scale", 1.0)),
        "softcap": nested.get("final_logit_softcapping") or None,
        "conv": (nested["conv_kernel_size"], nested["conv_group_size"]),
        "selector": Selector(nested["selector_rank"], nested["selector_top_k"]),
    }


def _of_laguna(given: Config, _: Config) -> dict[str, Any]:
    """Fields of Laguna's drafters."""
    if (gating := given.get("gating")) not in (True, "per-head"):
        raise _unsupported("gating", gating, "only 'per-head' is implemented")
    if "sparse" in (given.get("mlp_layer_types") or ()) and given.get("num_experts"):
        raise _unsupported(
            "mlp_layer_types", given["mlp_layer_types"], "only 'dense' is implemented"
        )
    if given.get("attention_bias"):
        raise _unsupported("attention_bias", True, "Laguna's layers have none")
    return {"is_laguna": True}


def _of_gemma4(given: Config, nested: Config) -> dict[str, Any]:
    """Fields of Gemma 4's drafters: global heads in all layers, as vLLM's class demands."""
    if _SLIDING in _layer_types(given, nested):
        raise _unsupported("layer_types", _SLIDING, "only full attention is implemented")
    if not given.get("attention_k_eq_v"):
        raise _unsupported("attention_k_eq_v", False, "only true is implemented")
    if given.get("dspark_draft_topk") is not None:
        raise _unsupported("dspark_draft_topk", given["dspark_draft_topk"], "it belongs to Qwen3's")
    if (act := given.get("hidden_activation", _GELU)) != _GELU:
        raise _unsupported("hidden_activation", act, f"only {_GELU!r} is implemented")
    kept = given.get("num_global_key_value_heads") or given["num_key_value_heads"]
    return {
        "num_kv_heads": kept,
        "head_dim": given.get("global_head_dim") or 512,  # Gemma4TextConfig's default
        "attention_scale": 1.0,
        "keys_are_values": True,
        "own_ends": True,
        "embedding_scale": given["hidden_size"] ** 0.5,
        "softcap": given.get("final_logit_softcapping"),
    }


def _nothing(*_: Config) -> dict[str, Any]:
    return {}


_FURTHER = {"dflash2": _of_dflash2, "laguna_dflash": _of_laguna, "gemma4_dspark": _of_gemma4}


def _rope(given: Config, nested: Config) -> dict[str, Any]:
    """Parameters of the rotary embedding, which is the same in all layers."""
    rope = dict(given.get("rope_parameters") or given.get("rope_scaling") or {})
    kinds = set(_layer_types(given, nested))
    if any(isinstance(value, Mapping) for value in rope.values()):  # by kind of layer
        if len(kinds) > 1:
            raise _unsupported("rope_parameters", rope, "layers of two kinds have one rope here")
        rope = dict(rope.get(*kinds) or rope.get(_FULL) or {})
    if kinds == {_SLIDING} and (windowed := given.get("swa_rope_parameters")):
        rope = dict(windowed)
    if (factor := given.get("partial_rotary_factor")) is not None:
        rope.setdefault("partial_rotary_factor", factor)
    rope.setdefault("rope_theta", given.get("rope_theta") or 1000000.0)
    return rope


def architecture_of(published: Config) -> str:
    """vLLM's name for the architecture of a config.json; "none" if it states none."""
    (given, *_) = published.get("architectures") or ("none",)
    return next((name for name, kind in KINDS.items() if given == kind.published), given)


def most_drafts(published: Config, method: str) -> int | None:
    """The most tokens that a drafter was trained to draft at once; None if not in config.json.

    Args:
        published: config.json.
        method: `method` of --speculative-config.
    """
    nested = published.get(_NESTED) or {}
    block = nested.get("block_size", published.get("block_size"))
    if block is None:
        return None
    from_anchor = nested.get("sample_from_anchor", published.get("sample_from_anchor"))
    if from_anchor is None:
        from_anchor = method == "dspark" and "speculators_model_type" not in published
    return int(block) - (0 if from_anchor else 1)


def _check_keys(published: Config, module: str) -> None:
    """Raises ModelLoadError if a key that is not supported has a value."""
    nested = published.get(_NESTED) or {}
    if (projector := nested.get("projector_type")) not in _PROJECTORS:
        raise _unsupported(f"{_NESTED}.projector_type", projector, "its head is not implemented")
    known = _READ | _INERT | _OF_MODULE.get(module, frozenset())
    unread = {f"{_NESTED}.{key}": v for key, v in nested.items() if key not in known | _READ_NESTED}
    unread.pop(f"{_NESTED}.projector_type", None)
    layers = published.get("transformer_layer_config")
    if layers is None:
        unread |= {key: value for key, value in published.items() if key not in known}
    else:
        outer = known | _SPECULATORS
        unread |= {key: value for key, value in published.items() if key not in outer}
        inner = {k: v for k, v in layers.items() if k not in known}
        unread |= {f"transformer_layer_config.{key}": value for key, value in inner.items()}
    for key, value in unread.items():
        name = key.rpartition(".")[2]
        quantized = name in ("quantization", "quantization_config")
        if value not in (None, {}, [], False) and not (
            quantized or inert_keys.is_inert(name, "qwen3", beside_text=False)
        ):
            raise _unsupported(key, value, "the key is not implemented")


def _unsupported(key: str, value: Any, reason: str) -> ModelLoadError:
    return ModelLoadError(
        f"config.json of the draft: {key}={value!r} is not supported: {reason}. Choose another "
        "drafter"
    )


def _wanted(value: Any, key: str) -> Any:
    if value is None:
        raise ModelLoadError(f"config.json of the draft has no {key}: download the draft again")
    return value


def _taps(given: Config, nested: Config) -> tuple[int, ...]:
    """Layers of the target after which its hidden states are read, counted from 1.

    Published ids count from 0 and name the layer itself (vLLM's get_eagle3_aux_layers_from_config).
    """
    if ids := given.get("eagle_aux_hidden_state_layer_ids"):
        return tuple(ids)
    ids = nested.get("target_layer_ids") or given.get("target_layer_ids")
    return tuple(layer + 1 for layer in _wanted(ids, "target_layer_ids"))


def _layer_types(given: Config, nested: Config) -> Sequence[str]:
    kinds = given.get("layer_types") or ()
    if _SLIDING in kinds:
        unknown = set(kinds) - {_SLIDING, _FULL}
        if unknown:
            raise _unsupported("layer_types", sorted(unknown), "such layers are not implemented")
        return kinds
    kind = _SLIDING if nested.get("use_swa") else _FULL
    return [kind] * given["num_hidden_layers"]


def _windows(given: Config, published: Config, nested: Config) -> tuple[int | None, ...]:
    # transformers drops the window where `use_sliding_window` is missing; layer_types counts.
    layers = published.get("transformer_layer_config") or published
    window = nested.get("swa_window_size") or given.get("sliding_window")
    window = window or layers.get("sliding_window")
    kinds = _layer_types(given, nested)
    if _SLIDING in kinds:
        _wanted(window, "sliding_window")
    return tuple(window if kind == _SLIDING else None for kind in kinds)


def _causal(given: Config, nested: Config) -> tuple[bool, ...]:
    """Whether each layer's attention is causal; by default, layers with a window are."""
    stated = given.get("is_causal")
    stated = nested.get("causal") if stated is None else stated
    kinds = given.get("layer_types") or [_FULL] * given["num_hidden_layers"]
    return tuple(kind == _SLIDING if stated is None else bool(stated) for kind in kinds)
