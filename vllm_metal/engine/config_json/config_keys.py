# SPDX-License-Identifier: Apache-2.0
"""Finds keys of config.json that mlx-lm's module does not read and rejects those with an effect.

mlx-lm drops keys that a module does not name. Such a key may determine what the model computes,
and future files will have keys unknown today.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from textwrap import shorten
from typing import Any

from vllm.logger import init_logger

from vllm_metal.engine.config_json import (
    config_refusals,
    fixed_values,
    implied_values,
    inert_keys,
    rope_keys,
)
from vllm_metal.engine.config_json.reference_code import Reference
from vllm_metal.engine.config_json.rope_parameters import OF_THEIR_OWN, Config, rope
from vllm_metal.identity.model_files import ModelLoadError

logger = init_logger(__name__)

_LONGEST_VALUE = 60  # characters of a value in a message
_LONGEST_LIST = 60  # characters of a list of file names
#: A key that transformers' shared code reads for all families.
_CHUNK = "attention_chunk_size"
#: Keys that mlx-lm's `load_model` reads.
_LOADER = frozenset(("model_file", "model_type", "quantization", "quantization_config"))
#: Keys that patches read, by module (`mlx_patches.families.activations`).
_PATCHES: Mapping[str, frozenset[str]] = {
    "gpt_bigcode": frozenset(("activation_function",)),
    "gpt_neox": frozenset(("hidden_act",)),
    "starcoder2": frozenset(("hidden_act",)),
}
#: Modules of families whose newest release nobody has compared: a key that no implementation
#: reads may be a mechanism that all of them lack (Inkling 2), or a size by a name that only the
#: family's own code has (Moondream 3).
_UNSEEN = frozenset(("inkling", "moondream3"))
#: Parts of mapping-valued keys that modules read, and the values of the remaining parts that they
#: compute (`...`: any). Other modules pass the mapping on whole.
_NESTED: Mapping[tuple[str, str], tuple[frozenset[str], Mapping[str, Any]]] = {
    ("dbrx", "attn_config"): (frozenset(("clip_qkv", "kv_n_heads", "rope_theta")), {}),
    ("dbrx", "ffn_config"): (
        frozenset(("ffn_hidden_size", "moe_num_experts", "moe_top_k")),
        {
            "ffn_act_fn": {"name": "silu"},
            "hidden_size": ...,  # that of the weights
            "moe_loss_weight": ...,
            "moe_normalize_expert_weights": 1,
            "uniform_expert_assignment": False,
        },
    ),
    ("minimax_m3_vl", "sparse_attention_config"): (
        frozenset(
            (
                *("sparse_attention_freq", "sparse_block_size", "sparse_index_dim"),
                *("sparse_local_block", "sparse_num_index_heads", "sparse_topk_blocks"),
                # The patch reads and checks these (`mlx_patches.families.minimax_m3`).
                *("sparse_disable_index_value", "sparse_init_block", "sparse_score_type"),
                "use_sparse_attention",
            )
        ),
        {},
    ),
    ("glm5_next", "linear_attn_config"): (
        inert_keys.names("gate_lower_bound head_dim num_heads safe_gate short_conv_kernel_size"),
        {"full_attn_layers": ..., "kda_layers": ...},  # transformers' class reads layer_types alone
    ),
    ("kimi_linear", "linear_attn_config"): (
        frozenset(
            ("full_attn_layers", "head_dim", "kda_layers", "num_heads", "short_conv_kernel_size")
        ),
        {},
    ),
}

Path = tuple[str, ...]


def unread(
    config: Config, module: str, read: set[str], used: set[str], reference: Reference
) -> dict[Path, Any]:
    """Returns keys by path that the module does not read and the reference may.

    Args:
        read: fields of the module's `ModelArgs`.
        used: keys from which the values of keys that the module reads were derived.
    """
    beside_text = "text_config" in read
    text = config.get("text_config") or {}
    known = read | used | _LOADER | fixed_values.keys(module) | config_refusals.keys(module)
    known |= _PATCHES.get(module, frozenset())
    found: dict[Path, Any] = {}
    for key, value in config.items():
        if value is None or value == {}:
            continue
        if key in reference.overwritten - (read - implied_values.keys(module)):
            continue
        if implied_values.must_follow(config, module, key):
            found[(key,)] = value
        elif key in known or _repeats_rope(config, key):
            found |= {
                (key, *path): each for path, each in _unread_nested(config, module, key).items()
            }
        elif not (
            inert_keys.is_inert(key, module, beside_text)
            or implied_values.is_implied(config, module, key)
            or reference.is_default(key, value)
            or key in reference.beside_text
            or (beside_text and _repeats_other_part(config, key, reference))
            or (key == _CHUNK and _has_no_chunks(config, reference))
            or (key in text and text[key] == value)  # repeated in text_config
        ):
            found[(key,)] = value
    return found


def _repeats_other_part(config: Config, key: str, reference: Reference) -> bool:
    """Whether a top-level key repeats a value of a non-text part, such as vision_config."""
    parts = [config.get(name) for name in reference.beside_text]
    return key not in reference.declared and any(
        isinstance(part, Mapping) and part.get(key) == config[key] for part in parts
    )


def _has_no_chunks(config: Config, reference: Reference) -> bool:
    """Whether the chunk size has no effect: no layer type uses chunks, and the class has no key."""
    kinds = config.get("layer_types") or ()
    return reference.has_types_of_layers(_CHUNK) and "chunked_attention" not in kinds


def _repeats_rope(config: Config, key: str) -> bool:
    """Whether a key repeats a value of the RoPE parameters, which are read."""
    return key in OF_THEIR_OWN and config[key] == rope(config).get(key)


def _unread_nested(config: Config, module: str, key: str) -> dict[Path, Any]:
    """Returns keys within a mapping that the module does not read, by path."""
    value = config[key]
    if not isinstance(value, Mapping):
        return {}
    if key in rope_keys.KEYS:
        return rope_keys.unread(config, module, key)
    names, computed = _NESTED.get((module, key), (None, {}))
    if names is None:
        return {}
    return {
        (name,): each
        for name, each in value.items()
        if not (
            each is None
            or name in names | fixed_values.EVERYWHERE.keys()
            or inert_keys.is_inert(name, module, beside_text=False)
            or (name in computed and computed[name] in (..., each))
        )
    }


def judge(
    found: Mapping[Path, Any],
    module: str,
    config: Config,
    reference: Reference,
    library: str = "mlx-lm",
) -> None:
    """Logs the keys in `found` that the reference does not read, and rejects those that it reads.

    Raises:
        ModelLoadError: the reference reads some of `found`, there is no reference, or the family is
            one of `_UNSEEN`.
    """
    ignored = [path for path in found if not reference.reads(path[-1]) and module not in _UNSEEN]
    if ignored:
        logger.info(
            "config.json has keys that no implementation of %s reads; they are ignored: %s",
            config.get("model_type"),
            ", ".join(map(".".join, ignored)),
        )
    if effective := {path: value for path, value in found.items() if path not in ignored}:
        raise ModelLoadError(
            f"config.json has keys that {library}'s module {module!r} does not read: "
            + _rejection(effective, module, config, reference)
        )


def _rejection(found: Mapping[Path, Any], module: str, config: Config, reference: Reference) -> str:
    named = ", ".join(_describe(path, value, module, config) for path, value in found.items())
    readers = shorten(", ".join(reference.files), _LONGEST_LIST)
    reason = f"read by {readers}" if readers else "no reference implementation is installed"
    return (
        f"{named} ({reason}). To serve the model as if they were not there, pass "
        f"--hf-overrides '{json.dumps(_removal_overrides(list(found), config))}'"
    )


def _describe(path: Path, value: Any, module: str, config: Config) -> str:
    """Describes a key: its path, its value and the keys that determine the expected value."""
    determined_by = implied_values.sources(config, module, path[0]) if len(path) == 1 else ()
    why = f", which does not follow from {', '.join(determined_by)}" if determined_by else ""
    return f"{'.'.join(path)} ({_short(value)}{why})"


def _short(value: Any) -> str:
    return shorten(json.dumps(value, default=repr), _LONGEST_VALUE, placeholder=" ...")


def _removal_overrides(paths: Sequence[Path], config: Config) -> dict[str, Any]:
    # vLLM replaces RoPE parameters as a whole, so they are repeated without the removed ones.
    overrides: dict[str, Any] = {}
    for path in paths:
        inner, stated = overrides, config
        for key in path[:-1]:
            stated = stated[key]
            if key in rope_keys.KEYS:  # the loader merges both names into rope_parameters
                inner = inner.setdefault("rope_parameters", dict(stated))
            else:
                inner = inner.setdefault(key, {})
        inner[path[-1]] = None
    return overrides
