# SPDX-License-Identifier: Apache-2.0
"""Reads the config.json of Gemma 4's assistants, as transformers' and vLLM's classes read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlx_lm.models.gemma4_text import ModelArgs

from vllm_metal.engine.config_json import inert_keys, published_config
from vllm_metal.engine.config_json.reference_code import reference_of
from vllm_metal.identity.model_files import ModelLoadError

Config = Mapping[str, Any]

_MODULE = "gemma4_text"  # mlx-lm's, which computes the layers
_FULL = "full_attention"
_READ = inert_keys.names(
    "backbone_hidden_size use_ordered_embeddings num_centroids centroid_intermediate_top_k "
    "tie_word_embeddings text_config"
)
#: Keys of `text_config` for parts that an assistant does not have, and the values without them.
_WITHOUT = {
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": False,
    "use_double_wide_mlp": False,
    "attn_logit_softcapping": None,
}


@dataclass(frozen=True)
class AssistantConfig:
    """The shape of an assistant."""

    layers: ModelArgs  # mlx-lm's arguments of the layers
    backbone_hidden_size: int  # of the target
    is_tied: bool  # whether the head is the embedding
    #: Clusters of tokens, and how many of them a token is chosen from; None: the head scores all.
    clusters: tuple[int, int] | None

    @staticmethod
    def of(published: Config) -> AssistantConfig:
        """Reads a config.json.

        Raises:
            ModelLoadError: config.json has a key or value that is not supported.
        """
        reference = reference_of(published)
        for key, value in published.items():
            known = key in _READ or inert_keys.is_inert(key, _MODULE, beside_text=True)
            if value is not None and not known and reference.reads(key):
                raise _unsupported(key, value, "the key is not implemented")

        def read(key: str) -> Any:
            value = published.get(key)
            return reference.declared.get(key) if value is None else value

        layers = _layers(dict(published.get("text_config") or {}))
        clusters = None
        if read("use_ordered_embeddings"):
            clusters = read("num_centroids"), read("centroid_intermediate_top_k")
            if layers.vocab_size % clusters[0]:
                raise _unsupported(
                    "num_centroids", clusters[0], f"vocab_size={layers.vocab_size} is no multiple"
                )
            if not 0 < clusters[1] <= clusters[0]:
                raise _unsupported(
                    "centroid_intermediate_top_k", clusters[1], f"there are {clusters[0]} clusters"
                )
        tied = bool(read("tie_word_embeddings"))
        return AssistantConfig(layers, read("backbone_hidden_size"), tied, clusters)


def _layers(text: dict[str, Any]) -> ModelArgs:
    kinds, count = text.get("layer_types"), text.get("num_hidden_layers")
    if not kinds or count != len(kinds):
        raise ModelLoadError(
            f"config.json of the draft: text_config has num_hidden_layers={count!r} and "
            f"layer_types={kinds!r}, which must name each layer's attention: download the draft "
            "again"
        )
    if kinds[-1] != _FULL:  # transformers' class would make it one
        raise _unsupported("text_config.layer_types", kinds, f"the last must be {_FULL!r}")
    declared = reference_of({"model_type": _MODULE}).declared
    for key, without in _WITHOUT.items():
        if (value := text.get(key, declared.get(key))) != without:
            raise _unsupported(f"text_config.{key}", value, f"only {without!r} is implemented")
    if (shared := text.get("num_kv_shared_layers")) not in (None, 0, count):
        raise _unsupported(
            "text_config.num_kv_shared_layers", shared, "no layer has keys and values of its own"
        )
    text |= {"model_type": _MODULE, "num_kv_shared_layers": count}
    try:
        changed = published_config.as_read(text, _MODULE, ModelArgs)
    except ModelLoadError as error:
        raise ModelLoadError(f"text_config in config.json of the draft: {error}") from error
    return ModelArgs.from_dict(text | changed)


def _unsupported(key: str, value: Any, reason: str) -> ModelLoadError:
    return ModelLoadError(
        f"config.json of the draft: {key}={value!r} is not supported with Gemma 4's assistant: "
        f"{reason}. Choose another drafter."
    )
