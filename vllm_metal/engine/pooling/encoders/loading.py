# SPDX-License-Identifier: Apache-2.0
"""Loads an encoder from a folder and makes it follow the folder's config.json."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import torch
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import load_config

from vllm_metal.engine.config_json import published_config
from vllm_metal.engine.models.loader import in_dtype
from vllm_metal.engine.pooling.encoders import heads
from vllm_metal.engine.pooling.encoders.networks import (
    Bert,
    EmbeddingGemma,
    Encoder,
    ModernBert,
    PlacedRoPE,
)
from vllm_metal.engine.pooling.encoders.served import (
    BERT,
    EMBEDDING_GEMMA,
    MODERNBERT,
    ROBERTA,
    Architecture,
    Config,
    check_config,
    num_labels,
)
from vllm_metal.engine.weights.loading import load_model, opened
from vllm_metal.identity.model_files import ModelLoadError
from vllm_metal.patches.mlx_patches import encoder_seam
from vllm_metal.patches.mlx_patches import registry as patches
from vllm_metal.patches.mlx_patches.mlx_vlm_families import family as mlx_vlm_family

_LONGEST_REASON = 400  # characters kept of another package's message
#: Old and new names of layer norms: Google's first files use the old ones.
_OLD_NAMES = (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias"))
#: Modules after the pooling, removed from the model once a torch head is made of them.
_HEADS = ("pooler", "classifier", "head")
_FULL, _SLIDING = "full_attention", "sliding_attention"


def lazy_encoder(
    path: Path, served: Architecture, dtype: mx.Dtype, overrides: Config | None = None
) -> tuple[Encoder, torch.nn.Module | None]:
    """Returns an encoder with lazy weights in `dtype`, and its head in float32.

    overrides: replace keys of config.json.

    Raises:
        ImportError: the encoder needs mlx-vlm, which is not installed.
        ModelLoadError: the folder is incomplete or unreadable, or has unsupported settings.
    """
    config = load_config(path) | dict(overrides or {})
    config = {key: value for key, value in config.items() if value is not None}
    model_classes, changed = _PARTS[served.family.module].classes(served, config)
    try:
        whole = load_config(path) | dict(overrides or {}) | changed
        model: Any = load_model(opened(path, whole), whole, lambda config: model_classes, dtype)
    except ModelLoadError as error:
        raise ModelLoadError(f"{path} cannot be loaded: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OSError) as error:
        reason = shorten(str(error), _LONGEST_REASON)
        raise ModelLoadError(f"{path} cannot be loaded: {reason}") from error
    patches.install()
    parts = _PARTS[served.family.module]
    head = parts.head(model) if served.classifies else None
    for name in _HEADS:
        model.pop(name, None)
    parameters = in_dtype(dict(tree_flatten(model.parameters())), dtype)
    model.update(tree_unflatten(list(parameters.items())))
    model.eval()
    return parts.encoder(model, config), head


Classes = tuple[type, type]


def _mlx_vlm_classes(served: Architecture, config: Config) -> tuple[Classes, dict[str, Any]]:
    """Returns mlx-vlm's classes of the model and its arguments, and keys to set in config.json."""
    check_config(config, served.family)
    module = mlx_vlm_family(served.family.module, "an encoder of this family")
    model = module.SequenceClassificationModel if served.classifies else module.Model
    encoder_seam.install(sys.modules[model.__module__])
    return (_renamed(model), module.ModelConfig), {"num_labels": num_labels(config)}


def _gemma_classes(served: Architecture, config: Config) -> tuple[Classes, dict[str, Any]]:
    """Like `_mlx_vlm_classes`, for mlx-lm's Gemma 3 without its head."""
    causal = {key: value for key, value in config.items() if key != "use_bidirectional_attention"}
    base, arguments = patches.classes({**causal, "model_type": served.family.module})

    class Headless(base):  # type: ignore[misc, valid-type]
        """Gemma 3 without a head; files may omit the `model.` prefix."""

        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            self.pop("lm_head")
            return {f"model.{name.removeprefix('model.')}": a for name, a in weights.items()}

    changed = published_config.as_read(causal, served.family.module, arguments)
    return (Headless, arguments), changed


def _renamed(base: type) -> type:
    class Renamed(base):
        """A model of mlx-vlm that also accepts old names of norms."""

        def sanitize(self, weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
            found = {}
            for name, array in weights.items():
                for old, new in _OLD_NAMES:
                    name = name.replace(old, new)
                found[name] = array
            return dict(super().sanitize(found))

    return Renamed


def _bert(model: nn.Module, config: Config) -> Encoder:
    return Bert(model, first_position=0)


def _roberta(model: nn.Module, config: Config) -> Encoder:
    return Bert(model, first_position=int(config.get("pad_token_id", 1)) + 1)


def _modernbert(model: Any, config: Config) -> Encoder:
    """Corrects mlx-vlm's ModernBERT: activation, rotation angles and kinds of layers."""
    # The module uses tanh-approximated GELU, where "gelu" is the exact one, ignores
    # `rope_parameters` and `layer_types`, and rotates by row index.
    bases = {
        _FULL: float(config.get("global_rope_theta", 160_000.0)),
        _SLIDING: float(config.get("local_rope_theta", 10_000.0)),
    }
    for kind, parameters in (config.get("rope_parameters") or {}).items():
        if kind not in bases or parameters.get("rope_type", "default") != "default":
            raise ModelLoadError(
                f"rope_parameters={parameters} of config.json for {kind!r} is not supported. "
                "Choose another checkpoint"
            )
        bases[kind] = float(parameters.get("rope_theta", bases[kind]))
    every = int(config.get("global_attn_every_n_layers", 3))
    by_period = [_SLIDING if index % every else _FULL for index in range(len(model.layers))]
    for layer, kind in zip(model.layers, config.get("layer_types") or by_period, strict=True):
        if kind not in bases:
            raise ModelLoadError(
                f"layer_types of config.json with {kind!r} is not supported. Choose another "
                "checkpoint"
            )
        layer.attn.local = kind == _SLIDING
        layer.attn.rotary_emb = PlacedRoPE(layer.attn.head_dim, bases[kind])
        layer.mlp.act = nn.GELU()
    return ModernBert(model, window=int(config.get("local_attention", 128)) // 2)


def _no_head(model: nn.Module) -> torch.nn.Module:
    raise ModelLoadError("EmbeddingGemma has no classification head: use --convert embed")


def _gemma(model: nn.Module, config: Config) -> Encoder:
    # The window on either side: transformers' Gemma3TextConfig halves the configured value.
    return EmbeddingGemma(model, window=int(config.get("sliding_window", 4096)) // 2)


class _Parts(NamedTuple):
    """Functions that create a family's encoder."""

    classes: Callable[[Architecture, Config], tuple[Classes, dict[str, Any]]]
    encoder: Callable[[Any, Config], Encoder]
    head: Callable[[Any], torch.nn.Module]


_PARTS: Mapping[str, _Parts] = {
    BERT.module: _Parts(_mlx_vlm_classes, _bert, heads.of_bert),
    ROBERTA.module: _Parts(_mlx_vlm_classes, _roberta, heads.of_roberta),
    MODERNBERT.module: _Parts(_mlx_vlm_classes, _modernbert, heads.of_modernbert),
    EMBEDDING_GEMMA.module: _Parts(_gemma_classes, _gemma, _no_head),
}
