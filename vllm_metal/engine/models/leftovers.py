# SPDX-License-Identifier: Apache-2.0
"""Accounts for every tensor of a checkpoint: a parameter, without effect here, or an error.

Families' `sanitize` functions silently rename, stack and drop tensors. A dropped tensor must be of
a kind listed below: otherwise the model would be served without it, and nobody would know.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten
from vllm.logger import init_logger

from vllm_metal.engine.config_json.stored_head import is_head
from vllm_metal.identity.model_files import ModelLoadError

logger = init_logger(__name__)

Arrays = dict[str, mx.array]
Classes = Callable[[dict[str, Any]], tuple[type, type]]
_DIGITS = re.compile(r"\d+")
_PARTS = ("scales", "biases", "global_scale", "output_scale")  # parts of a packed weight
_NAMED_KINDS = 4  # most kinds in a message

#: Tensors that compute nothing here, by reason.
_ROTARY = re.compile(r"(?:^|\.)(?:rotary\w*|rope)\.\w+$|(?:^|\.)(?:embed_positions|cos_1d|sin_1d)$")
_MASKS = re.compile(r"(?:attn|attention)\.(?:masked_bias|bias)$")
_POSITIONS = re.compile(r"(?:^|\.)position_ids$")
_OTHER_MODALITIES = re.compile(
    r"(?:^|\.)\w*(?:vision|visual|image|video|audio|speech|multi_modal|multimodal|mm_projector)\w*\."
    r"|(?:^|\.)image_newline$"
    r"|\.gate\.bias_vl$"
    r"|\.mlp\.(?:gate\.weight_1$|gate_1\.|switch_mlp_1\.|e_score_correction_bias_1$)"
)
_MTP = re.compile(r"(?:^|\.)(?:mtp|nextn)\w*\.")
_OF_MTP_LAYERS = re.compile(r"^(.*layers\.\d+\.)(?:eh_proj|enorm|hnorm|shared_head)\.")
_OF_IMAGE_LAYERS = re.compile(r"^(.*layers\.\d+\.)cross_attn\.")
_SCALES = re.compile(
    r"\.(?:k|v|q|kv|prob|output|input|prob_output|activation|input_activation)_(?:scale|zero_point)$"
)
_OF_POOLERS = "score."  # the pooler reads it itself


@dataclass(frozen=True)
class _Kinds:
    """Recognizes tensors of a checkpoint that compute nothing here."""

    mtp_layers: tuple[str, ...]  # prefixes of names
    tied: bool  # the model has no head of its own
    tower_tensors: tuple[str, ...] = ()  # prefixes of names

    def reason(self, name: str, array: mx.array) -> str | None:
        """Returns why a tensor is left out, or None if it must not be."""
        if _ROTARY.search(name):
            return "rotary buffers, which are computed"
        if _MASKS.search(name) and (array.ndim == 4 or array.size == 1):
            return "causal masks, which are computed"
        if _POSITIONS.search(name):
            return "numbers of positions"
        if _MTP.search(name) or name.startswith(self.mtp_layers):
            return "draft layers, which are loaded separately"
        if _OTHER_MODALITIES.search(name) or name.startswith(self.tower_tensors):
            return "images and sound: the tower is loaded separately"
        if _SCALES.search(name):
            return "scales of activations and of a quantized KV cache"
        if self.tied and is_head(name):
            return "a copy of the embedding"
        return None


def accounted(classes: Classes) -> Classes:
    """Wraps `classes` so that the model's `sanitize` raises if it drops a tensor with an effect.

    `classes` gives the model and its arguments for a config.json.
    """

    def found(config: dict[str, Any]) -> tuple[type, type]:
        model, args = classes(config)
        return _accounting(model), args

    return found


def _accounting(model: type) -> type:
    logged: set[str] = set()

    def sanitize(self: Any, weights: Arrays) -> Arrays:
        found, line = _sanitized(model, self, dict(weights))
        if line not in logged:
            logged.add(line)
            logger.info(line)
        return found

    changed = {"sanitize": sanitize, "__module__": model.__module__}
    return type(model.__name__, (model,), changed)


def _sanitized(model: type, instance: Any, weights: Arrays) -> tuple[Arrays, str]:
    # Returns the arrays by parameter names, and a log line that accounts for all tensors. Raises
    # ModelLoadError for a dropped tensor that may compute something.
    parameters = _parameters(instance)
    mtp, images = (
        tuple({str(match[1]) for match in map(mark.match, weights) if match} - parameters)
        for mark in (_OF_MTP_LAYERS, _OF_IMAGE_LAYERS)
    )
    towers = (*getattr(model, "tower_tensors", ()), *images)
    kinds = _Kinds(mtp, not any(map(is_head, parameters)), towers)
    run = _run(model)
    found = run(instance, dict(weights))
    kept = {id(array) for array in found.values()}
    rest = {name: array for name, array in weights.items() if id(array) not in kept}
    reasons = {name: kinds.reason(name, array) for name, array in rest.items()}
    unknown = {name: array for name, array in rest.items() if reasons[name] is None}
    given = {id(array) for array in weights.values()}
    # If the new arrays have as many elements as the missing ones, nothing was dropped, only stacked
    # or split. Otherwise `_consumed` finds out by running `sanitize` without each kind.
    made = sum(array.size for array in found.values() if id(array) not in given)
    consumed = set(unknown)
    if sum(array.size for array in unknown.values()) != made:
        consumed = _consumed(lambda some: run(instance, some), weights, found, unknown)
    dropped = [name for name in unknown if name not in consumed]
    if lost := [name for name in dropped if not name.startswith(_OF_POOLERS)]:
        raise ModelLoadError(_message(lost))
    counted = Counter(each for each in reasons.values() if each is not None)
    if dropped:
        counted["heads of other tasks"] = len(dropped)
    # The module has no parameter for these and would reject them.
    for name in [name for name in found if _base(name) not in parameters]:
        if (reason := kinds.reason(name, found[name])) is not None:
            counted[reason] += 1
            del found[name]
    left_out = sum(counted.values())
    why = ", ".join(f"{count} of {reason}" for reason, count in counted.items())
    return found, (
        f"Tensors of the checkpoint: {len(weights) - left_out} in parameters, {left_out} left out"
        f"{f' ({why})' if why else ''}, 0 unknown"
    )


def _run(model: type) -> Callable[[Any, Arrays], Arrays]:
    own = getattr(model, "sanitize", None)
    return (lambda instance, weights: weights) if own is None else own


def _parameters(instance: Any) -> set[str]:
    # Also the modules that have parameters, with a trailing dot.
    flat = cast(list[tuple[str, mx.array]], tree_flatten(instance.parameters()))
    names = {name for name, _ in flat}
    parts = (name.split(".") for name in names)
    return names | {".".join(each[:n]) + "." for each in parts for n in range(1, len(each))}


def _base(name: str) -> str:
    # Scales and biases belong to the parameter with the packed weight.
    path, _, part = name.rpartition(".")
    return f"{path}.weight" if part in _PARTS else name


def _consumed(
    run: Callable[[Arrays], Arrays], weights: Arrays, found: Arrays, rest: Iterable[str]
) -> set[str]:
    # A kind is all tensors whose names differ only in numbers. It is consumed if other arrays
    # change, or fail to be made, without it.
    kinds: dict[str, list[str]] = {}
    for name in rest:
        kinds.setdefault(_DIGITS.sub("#", name), []).append(name)
    whole = _outlines(found)
    consumed: set[str] = set()
    for names in kinds.values():
        left = {name: array for name, array in weights.items() if name not in set(names)}
        try:
            is_dropped = _outlines(run(left)) == whole
        except Exception:  # `sanitize` needs them
            is_dropped = False
        if not is_dropped:
            consumed.update(names)
    return consumed


def _outlines(arrays: Mapping[str, mx.array]) -> dict[str, tuple[Any, ...]]:
    return {name: (array.shape, array.dtype) for name, array in arrays.items()}


def _message(names: list[str]) -> str:
    kinds = list(dict.fromkeys(_DIGITS.sub("#", name) for name in names))
    more = f" and {len(kinds) - _NAMED_KINDS} more kinds" if len(kinds) > _NAMED_KINDS else ""
    return (
        f"{len(names)} tensors of the checkpoint are not supported: mlx-lm's module would drop "
        f"{', '.join(kinds[:_NAMED_KINDS])}{more}, and they may compute something. Choose a "
        "checkpoint without them"
    )
