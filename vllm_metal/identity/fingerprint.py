# SPDX-License-Identifier: Apache-2.0
"""All that K/V depend on but the text: what names the folder of a prefix cache.

Two engines of one fingerprint compute the same K/V for the same tokens, and lay them out the same.
Numbers that only say how much is computed at once, such as --max-model-len, have no part in it.
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

#: Of config.json: where it came from, who wrote it, and what vLLM writes into a draft's for itself.
_NO_FACTS = ("transformers_version", "num_lookahead_tokens")
#: Of a spec: which blocks vLLM frees when, which does not change what is in them.
_NO_CONTENT = ("extra_retained_tokens",)
#: Facts that have facts, and how a message names these.
_PARTS = {"weights": "weights of the", "draft": "the draft's"}
_LONGEST_VALUE = 40  # characters of a value in a message; longer ones have "changed"


@dataclass(frozen=True)
class Fingerprint:
    """The facts, and their digest."""

    digest: str  # 32 hex digits: of the facts but for models' names
    facts: Mapping[str, Any]  # JSON has it unchanged; goes into manifest.json

    @staticmethod
    def of(
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        weights: Mapping[str, str],
        pool: str,
    ) -> Fingerprint:
        """Returns the fingerprint of an engine.

        Args:
            vllm_config: after the platform's check.
            kv_cache_config: of the pool: groups, layers and their specs.
            weights: digests by network, of `weights_digest.of_networks`.
            pool: who computes on the K/V, whose roundings differ: "scatter" or "kernels".
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
            "draft": _draft(vllm_config),
            "block_size": cache.block_size,
            "groups": [
                {"layers": list(group.layer_names), "spec": plain(group.kv_cache_spec, _NO_CONTENT)}
                for group in kv_cache_config.kv_cache_groups
            ],
            "hash_algorithm": cache.prefix_caching_hash_algo,
            "hash_seed": _hash_seed(cache.prefix_caching_hash_algo),
        }
        # Models are what their weights and configurations are, wherever they lie.
        nameless = _without(facts, lambda key: key == "model")
        return Fingerprint(facts_of.digest(nameless), facts)

    def why_unused(self, others: Iterable[Mapping[str, Any]]) -> str | None:
        """Why a cache with folders holds nothing for this engine, in one line.

        Args:
            others: facts of the folders that are there, as their manifests have them.

        Returns:
            None: there are no other folders, or one is this engine's own.
        """
        known = [other for other in others if isinstance(other, Mapping) and other]
        same_model = [other for other in known if other.get("model") == self.facts["model"]]
        changes = [differences(self.facts, other, "now") for other in same_model or known]
        closest = min(changes, key=len, default=[])
        if not closest:
            return None
        return f"the prefix cache holds nothing for this set-up: {'; '.join(closest)}"

    def difference(self, theirs: Mapping[str, Any]) -> str:
        """In what another engine's facts differ from these, in one line."""
        return (
            "; ".join(differences(self.facts, theirs, "here"))
            or "its fingerprint has another format"
        )


@dataclass(frozen=True)
class PoolContent:
    """What the pages of a pool are."""

    fingerprint: Fingerprint
    page_bytes: tuple[int, ...]  # of a page, by KV cache group

    def size(self, key: bytes) -> int:
        """Bytes of a page.

        Raises:
            IndexError: there is no such group.
        """
        return self.page_bytes[get_offload_group_idx(OffloadKey(key))]


def _without(facts: Mapping[str, Any], is_none: Callable[[str], bool]) -> dict[str, Any]:
    """Less the keys, also of parts, that are no facts."""
    return {
        key: _without(value, is_none) if isinstance(value, Mapping) else value
        for key, value in facts.items()
        if not is_none(str(key))
    }


def differences(
    ours: Mapping[str, Any], others: Mapping[str, Any], this: str, part: str = ""
) -> list[str]:
    """What differs between facts, in words; `this` says whose `ours` are, `part` of what."""
    found = []
    for key in [*ours, *(key for key in others if key not in ours)]:
        name, own, other = f"{part}{key}", ours.get(key), others.get(key)
        if own == other:
            continue
        values = (_word(other), _word(own))
        if isinstance(own, Mapping) and isinstance(other, Mapping) and name in _PARTS:
            found += differences(own, other, this, f"{_PARTS[name]} ")
        elif None in values or any(
            word in name for word in ("weights", "hf_config", "seed", "vllm_metal")
        ):
            found.append(f"{name} {'changed' if this == 'now' else 'differ'}")
        else:
            found.append(f"{name} {values[0]}, {this} {values[1]}")
    return found


def _word(value: Any) -> str | None:
    """A short value as a user would write it; None: it is long, or has parts."""
    if value is None:
        return "none"
    text = str(value)
    plain = isinstance(value, str | int | float) and len(text) <= _LONGEST_VALUE
    return text if plain else None


def network_facts(model: ModelConfig) -> dict[str, Any]:
    """Facts of a checkpoint: its name, and config.json after --hf-overrides.

    What users change most has a fact of its own, and no part in the digest of all else.
    """
    config = _without(model.hf_config.to_dict(), _is_origin)
    rope, config = _split(config, ("rope", "rotary"))
    quantization, config = _split(config, ("quantization",))
    for scaling in list(rope.values()):
        # LongRoPE has factors for short contexts, and others for long ones.
        if isinstance(scaling, Mapping) and "short_factor" in scaling:
            trained = scaling.get("original_max_position_embeddings") or 0
            rope["short"] = model.max_model_len <= trained
    return {
        "model": _name(model.model),
        "hf_config": facts_of.digest(config),
        "rope": rope,
        "quantization": quantization,
    }


def _name(model: str) -> str:
    """A model's name on the hub, or the last two parts of its path.

    Without network, vLLM puts the snapshot's path in the place of the name.
    """
    if found := re.search(r"models--([^/]+)--([^/]+)/snapshots/[^/]+/?$", model):
        return f"{found[1]}/{found[2]}"
    path = PurePath(model)
    return "/".join([part for part in path.parts if part != path.anchor][-2:])


def _draft(config: VllmConfig) -> dict[str, Any] | None:
    """Facts of a draft network that keeps K/V; others leave nothing in the blocks."""
    if not draft_methods.keeps_kv(config):
        return None
    assert config.speculative_config is not None
    return {
        "method": config.speculative_config.method,
        **network_facts(config.speculative_config.draft_model_config),
    }


def _is_origin(key: str) -> bool:
    """Whether a key says where a configuration came from; some are paths of this machine."""
    return key.startswith("_") or key in _NO_FACTS


def _split(config: dict[str, Any], words: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The keys that have one of the words in them, also of parts of the configuration; the rest."""
    taken, rest = {}, {}
    for key, value in config.items():
        if any(word in str(key) for word in words):
            if value is not None:
                taken[str(key)] = plain(value)
        elif isinstance(value, dict):
            inner, rest[key] = _split(value, words)
            taken |= {f"{key}.{name}": found for name, found in inner.items()}
        else:
            rest[key] = value
    return taken, rest


def _pool_dtype(cache_dtype: str, model_dtype: str) -> str:
    """Returns one name for the dtype of the pool: a model's own may be given as "auto", too."""
    name = cache_dtypes.canonical(cache_dtype)
    return model_dtype if name == "auto" else name


def _hash_seed(algorithm: str) -> str:
    """What the hash of a first block starts from: PYTHONHASHSEED where it is set."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

    return resolve_none_hash_seed(get_hash_fn_by_name(algorithm))
