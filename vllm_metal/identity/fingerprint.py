# SPDX-License-Identifier: Apache-2.0
"""Fingerprints everything that K/V depend on except the tokens; names a prefix cache's folder.

Two engines with one fingerprint compute the same K/V for the same tokens, in the same layout.
Settings that only limit how much is computed at once, such as --max-model-len, are left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import OffloadKey, get_offload_group_idx

from vllm_metal.identity import facts as facts_of
from vllm_metal.identity.facts import plain
from vllm_metal.settings import cache_dtypes, draft_methods, envs

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

#: Keys of config.json that say who wrote it, or that vLLM adds to a draft's.
_NO_FACTS = ("transformers_version", "num_lookahead_tokens")
#: Fields of a spec that control when vLLM frees blocks, not what is in them.
_NO_CONTENT = ("extra_retained_tokens",)
#: Maps nested facts to their prefix in messages.
_PARTS = {"weights": "weights of the", "draft": "the draft's"}
_LONGEST_VALUE = 40  # characters of a value in a message; longer ones are not shown


@dataclass(frozen=True)
class Fingerprint:
    """An engine's facts, and their digest."""

    digest: str  # digest of the facts without the models' names, 32 hex digits
    facts: Mapping[str, Any]  # unchanged by a round trip through JSON; stored in manifest.json

    @staticmethod
    def of(
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        weights: Mapping[str, str],
        pool: str,
    ) -> Fingerprint:
        """Returns the fingerprint of an engine.

        Args:
            vllm_config: configuration, checked and completed by the platform.
            kv_cache_config: groups, layers and specs of the pool.
            weights: digests by network, from `weights_digest.of_networks`.
            pool: implementation ("scatter" or "kernels"); their rounding differs.
        """
        model, cache = vllm_config.model_config, vllm_config.cache_config
        facts = {
            "vllm_metal": facts_of.sources(facts_of.NOT_IN_ENGINE),
            "device": envs.requested_device(),
            "pool": pool,
            **facts_of.versions("mlx", "mlx-lm", "mlx-vlm", "transformers", "vllm"),
            **network_facts(model),
            "weights": dict(weights),
            "dtype": plain(model.dtype),
            "kv_cache_dtype": _pool_dtype(cache.cache_dtype, plain(model.dtype)),
            "draft": _draft_facts(vllm_config),
            "block_size": cache.block_size,
            "groups": [
                {"layers": list(group.layer_names), "spec": plain(group.kv_cache_spec, _NO_CONTENT)}
                for group in kv_cache_config.kv_cache_groups
            ],
            "hash_algorithm": cache.prefix_caching_hash_algo,
            "hash_seed": _hash_seed(cache.prefix_caching_hash_algo),
        }
        # Weights and configuration identify a model, wherever its files are.
        nameless = _without(facts, lambda key: key == "model")
        return Fingerprint(facts_of.digest(nameless), facts)

    def why_unused(self, others: Iterable[Mapping[str, Any]]) -> str | None:
        """Explains in one line why a non-empty cache holds nothing for this engine.

        `others`: facts in the manifests of the cache's folders. Returns None if it is
        empty, or has facts equal to this engine's.
        """
        known = [other for other in others if isinstance(other, Mapping) and other]
        same_model = [other for other in known if other.get("model") == self.facts["model"]]
        changes = [differences(self.facts, other, "now") for other in same_model or known]
        # The folder with the fewest differences is the most likely predecessor.
        closest = min(changes, key=len, default=[])
        if not closest:
            return None
        return f"the prefix cache holds nothing for this set-up: {'; '.join(closest)}"

    def difference(self, theirs: Mapping[str, Any]) -> str:
        """Describes in one line how another engine's facts differ from these."""
        return (
            "; ".join(differences(self.facts, theirs, "here"))
            or "its fingerprint has another format"
        )


@dataclass(frozen=True)
class PoolContent:
    """Describes the content of a pool: the size of a page of each group."""

    fingerprint: Fingerprint
    page_bytes: tuple[int, ...]  # bytes of a page, by KV cache group

    def size(self, key: bytes) -> int:
        """Returns the bytes of a page; raises IndexError for an unknown group."""
        return self.page_bytes[get_offload_group_idx(OffloadKey(key))]


def _without(facts: Mapping[str, Any], is_excluded: Callable[[str], bool]) -> dict[str, Any]:
    return {
        key: _without(value, is_excluded) if isinstance(value, Mapping) else value
        for key, value in facts.items()
        if not is_excluded(str(key))
    }


def differences(
    ours: Mapping[str, Any], others: Mapping[str, Any], this: str, part: str = ""
) -> list[str]:
    """Describes the differences between two sets of facts in words.

    `this` labels the values of `ours`; `part` is a prefix for nested facts.
    """
    found = []
    for key in [*ours, *(key for key in others if key not in ours)]:
        name, own, other = f"{part}{key}", ours.get(key), others.get(key)
        if own == other:
            continue
        values = (_short(other), _short(own))
        if isinstance(own, Mapping) and isinstance(other, Mapping) and name in _PARTS:
            found += differences(own, other, this, f"{_PARTS[name]} ")
        elif None in values or any(
            word in name for word in ("weights", "hf_config", "seed", "vllm_metal")
        ):
            found.append(f"{name} {'changed' if this == 'now' else 'differ'}")
        else:
            found.append(f"{name} {values[0]}, {this} {values[1]}")
    return found


def _short(value: Any) -> str | None:
    if value is None:
        return "none"
    text = str(value)
    plain = isinstance(value, str | int | float) and len(text) <= _LONGEST_VALUE
    return text if plain else None


def network_facts(model: ModelConfig) -> dict[str, Any]:
    """Returns the facts of a checkpoint: its name, and config.json after --hf-overrides."""
    # The keys that users change most are separate facts, so that messages can name them; all others
    # are one digest.
    config = _without(model.hf_config.to_dict(), _is_origin)
    rope, config = _split(config, ("rope", "rotary"))
    quantization, config = _split(config, ("quantization",))
    for scaling in list(rope.values()):
        # LongRoPE uses other factors for short contexts than for long ones.
        if isinstance(scaling, Mapping) and "short_factor" in scaling:
            trained = scaling.get("original_max_position_embeddings") or 0
            rope["short"] = model.max_model_len <= trained
    return {
        "model": _model_name(model.model),
        "hf_config": facts_of.digest(config),
        "rope": rope,
        "quantization": quantization,
    }


def _model_name(model: str) -> str:
    # Offline, vLLM replaces the name by the path of the snapshot in the cache.
    if match := re.search(r"models--([^/]+)--([^/]+)/snapshots/[^/]+/?$", model):
        return f"{match[1]}/{match[2]}"
    path = PurePath(model)
    return "/".join([part for part in path.parts if part != path.anchor][-2:])


def _draft_facts(config: VllmConfig) -> dict[str, Any] | None:
    if not draft_methods.keeps_kv(config):  # other methods leave nothing in the blocks
        return None
    assert config.speculative_config is not None
    return {
        "method": config.speculative_config.method,
        **network_facts(config.speculative_config.draft_model_config),
    }


def _is_origin(key: str) -> bool:
    # Some of these are paths on this machine, such as `_name_or_path`.
    return key.startswith("_") or key in _NO_FACTS


def _split(config: dict[str, Any], words: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits a config: keys that contain one of the words, also nested ones, and the rest."""
    matching, rest = {}, {}
    for key, value in config.items():
        if any(word in str(key) for word in words):
            if value is not None:
                matching[str(key)] = plain(value)
        elif isinstance(value, dict):
            inner, rest[key] = _split(value, words)
            matching |= {f"{key}.{name}": found for name, found in inner.items()}
        else:
            rest[key] = value
    return matching, rest


def _pool_dtype(cache_dtype: str, model_dtype: str) -> str:
    # The model's own dtype may be given by name or as "auto".
    name = cache_dtypes.canonical(cache_dtype)
    return model_dtype if name == "auto" else name


def _hash_seed(algorithm: str) -> str:
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

    # PYTHONHASHSEED if it is set; the hash of a first block starts from it.
    return resolve_none_hash_seed(get_hash_fn_by_name(algorithm))
