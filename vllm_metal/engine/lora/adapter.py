# SPDX-License-Identifier: Apache-2.0
"""Reads an adapter's low-rank updates in PEFT's or mlx-lm's format."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pickle import UnpicklingError
from typing import Any, cast

import mlx.core as mx
import torch
from vllm.logger import init_logger
from vllm.lora.peft_helper import PEFTHelper

from vllm_metal.engine.lora.files import AdapterContent, AdapterError
from vllm_metal.engine.lora.patterns import Patterns

logger = init_logger(__name__)

_PEFT_KEY = re.compile(r"base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight")
_MLX_KEY = re.compile(r"(.+)\.lora_([ab])")
#: Keys of PEFT's configuration that are read here or checked by vLLM's PEFTHelper, and keys that
#: only record how or where an adapter was trained.
_READ = {
    *("peft_type", "r", "lora_alpha", "bias", "use_rslora", "use_dora", "lora_bias"),
    *("init_lora_weights", "alora_invocation_tokens", "layer_replication", "use_bdlora"),
    *("use_qalora", "rank_pattern", "alpha_pattern", "fan_in_fan_out", "target_parameters"),
    *("exclude_modules", "layers_pattern", "layers_to_transform", "target_modules"),
}
_HOW_MADE = {
    *("auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying"),
    *(
        "eva_config",
        "inference_mode",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_config",
        "megatron_core",
    ),
    *("peft_version", "qalora_group_size", "revision", "runtime_config"),
    *("task_type", "velora_config"),
}

#: Bound of one element of a weight's update: float16's maximum. Trained adapters stay below 10.
_LARGEST_UPDATE = 65504.0


@dataclass(frozen=True)
class LowRank:
    """An update b @ a of one weight, or of E experts; float32. b includes the adapter's scale."""

    a: mx.array  # [r, in] or [E, r, in]
    b: mx.array  # [out, r] or [E, out, r]

    @property
    def rank(self) -> int:
        return int(self.a.shape[-2])

    @property
    def sizes(self) -> tuple[int, int]:
        """Number of input features and of output features."""
        return int(self.a.shape[-1]), int(self.b.shape[-2])

    def of_rank(self, rank: int) -> LowRank:
        """Zero-pads this update to a higher rank."""
        more = rank - self.rank
        if not more:
            return self
        before = [(0, 0)] * (self.a.ndim - 2)
        a = mx.pad(self.a, [*before, (0, more), (0, 0)])
        return LowRank(a, mx.pad(self.b, [*before, (0, 0), (0, more)]))


@dataclass(frozen=True)
class Adapter:
    """An adapter's updates, by the module names that its files use."""

    name: str
    #: Keys: for PEFT, a checkpoint module as named by transformers, or a parameter of experts; for
    #: mlx-lm, a module of mlx-lm's model.
    updates: Mapping[str, LowRank]
    is_peft: bool
    #: Whether the checkpoint stores weights as [in, out] (GPT-2's Conv1D).
    fan_in_fan_out: bool = False


def read_adapter(content: AdapterContent, max_rank: int) -> Adapter:
    """Reads an adapter and checks everything that does not depend on the model.

    Raises AdapterError: the files are unreadable or use an unsupported feature.
    """
    config = _config(content)
    if "peft_type" in config or "target_modules" in config:
        return _from_peft(content, config, max_rank)
    if "lora_parameters" in config:
        return _from_mlx_lm(content, config, max_rank)
    raise AdapterError(content.name, "has a configuration that is neither PEFT's nor mlx-lm's")


def _config(content: AdapterContent) -> dict[str, Any]:
    try:
        config = json.loads(content.config)
    except ValueError as error:
        raise AdapterError(content.name, f"has an invalid JSON configuration: {error}") from error
    if not isinstance(config, dict):
        raise AdapterError(content.name, "has a configuration that is not a JSON object")
    return config


def _tensors(content: AdapterContent) -> dict[str, mx.array]:
    try:
        found = _torch_tensors(content) if content.file.endswith(".bin") else _safetensors(content)
        return {name: array.astype(mx.float32) for name, array in found.items()}
    except (RuntimeError, ValueError, EOFError, UnpicklingError, AttributeError) as error:
        problem = f"has an unreadable {content.file}: {str(error).splitlines()[0]}"
        raise AdapterError(content.name, problem) from error


def _safetensors(content: AdapterContent) -> dict[str, mx.array]:
    return cast(dict[str, mx.array], mx.load(io.BytesIO(content.weights), format="safetensors"))


def _torch_tensors(content: AdapterContent) -> dict[str, mx.array]:
    tensors = torch.load(io.BytesIO(content.weights), map_location="cpu", weights_only=True)
    return {name: mx.array(tensor.float().numpy()) for name, tensor in tensors.items()}


def _from_peft(content: AdapterContent, config: dict[str, Any], max_rank: int) -> Adapter:
    name = content.name
    if (kind := config.get("peft_type", "LORA")) != "LORA":
        raise AdapterError(name, f"is of peft_type {kind!r}: only LORA is served")
    if config.get("use_dora"):
        raise AdapterError(name, "has use_dora=true: DoRA is not supported")
    for key, value in config.items():
        if value and key not in _READ | _HOW_MADE:
            raise AdapterError(name, f"has {key} in its configuration, which is not supported")
    pairs = _pairs(name, _tensors(content), _PEFT_KEY, "AB")
    try:
        _check_features(PEFTHelper.from_dict(config))
        patterns = Patterns(config, pairs)
        found = {module: patterns.update_of(module) for module in pairs}
        ignored = [module for module in pairs if not patterns.is_targeted(found[module])]
    except (ValueError, TypeError, KeyError, re.error) as error:
        raise AdapterError(name, f"has a configuration that is not supported: {error}") from error
    if ignored:
        _warn_ignored(name, ignored, len(pairs))
    updates = {}
    for module in (each for each in pairs if each not in ignored):
        (a, b), update = pairs[module], found[module]
        if update.is_parameter:
            a, b = _by_expert(name, module, a, b, update.rank)
        _check_ranks(name, module, a.shape[-2], b.shape[-1], update.rank, max_rank)
        updates[module] = _scaled(name, module, a, b, update.scale)
    return Adapter(name, updates, True, bool(config.get("fan_in_fan_out")))


def _warn_ignored(name: str, ignored: Sequence[str], count: int) -> None:
    # PEFT ignores such tensors, too. An adapter with no others would change nothing.
    reason = f"its configuration does not target {ignored[0]}"
    if len(ignored) == count:
        raise AdapterError(name, f"has no tensor that applies: {reason}")
    logger.warning(
        "LoRA adapter %r has %d tensors that are ignored, as by PEFT: %s",
        name,
        len(ignored),
        reason,
    )


def _check_features(helper: PEFTHelper) -> None:
    """Runs vLLM's own check, except for its rank limit: ranks may differ per tensor."""
    problems = helper._validate_features()
    if helper.bias != "none":
        problems.append(f"bias {helper.bias!r} is not supported")
    if problems:
        raise ValueError(" ".join(problems))


def _by_expert(
    name: str, module: str, a: mx.array, b: mx.array, rank: int
) -> tuple[mx.array, mx.array]:
    """Splits PEFT's arrays of a parameter, [E * r, in] and [out, r * E], by its E experts."""
    if a.shape[0] == rank:
        return a, b
    if a.shape[0] % rank or a.shape[0] != b.shape[1]:
        raise AdapterError(name, f"has shapes {a.shape} and {b.shape} for experts at {module}")
    experts = a.shape[0] // rank
    by_rank = b.reshape(b.shape[0], rank, experts)
    return a.reshape(experts, rank, -1), by_rank.transpose(2, 0, 1)


def _from_mlx_lm(content: AdapterContent, config: dict[str, Any], max_rank: int) -> Adapter:
    name = content.name
    if (kind := config.get("fine_tune_type", "lora")) != "lora":
        raise AdapterError(name, f"has fine_tune_type {kind!r}: only lora is served")
    stated = config["lora_parameters"]
    if not isinstance(stated, dict) or not isinstance(stated.get("scale"), int | float):
        raise AdapterError(name, "has lora_parameters without a scale")
    scale, updates = float(stated["scale"]), {}
    for module, (a, b) in _pairs(name, _tensors(content), _MLX_KEY, "ab").items():
        if a.ndim == 2 and b.ndim == 2:
            a, b = a.T, b.T  # [in, r] and [r, out]
        elif b.ndim == 3 and a.ndim == 2:
            a = a.reshape(b.shape[0], -1, a.shape[-1])  # [E * r, in]
        _check_ranks(name, module, a.shape[-2], b.shape[-1], None, max_rank)
        updates[module] = _scaled(name, module, a, b, scale)
    return Adapter(name, updates, False)


def _scaled(name: str, module: str, a: mx.array, b: mx.array, scale: float) -> LowRank:
    """Applies the scale; rejects updates that overflow float16, which would make requests fail."""
    largest = abs(scale) * a.shape[-2] * _max_abs(a) * _max_abs(b)
    if not largest <= _LARGEST_UPDATE:
        raise AdapterError(
            name,
            f"has an update of up to {largest:g} at {module} (with its scale {scale:g}), which "
            "float16 cannot hold",
        )
    return LowRank(a, b * scale)


def _max_abs(array: mx.array) -> float:
    return float(cast(float, mx.abs(array).max().item())) if array.size else 0.0


def _pairs(
    name: str, tensors: dict[str, mx.array], pattern: re.Pattern[str], letters: str
) -> dict[str, tuple[mx.array, mx.array]]:
    """Pairs the A and B matrices of each module; rejects incomplete, misshapen or NaN tensors."""
    found: dict[str, dict[str, mx.array]] = {}
    for key, array in tensors.items():
        if (match := pattern.fullmatch(key)) is None:
            raise AdapterError(name, f"has a tensor that is not supported: {key}")
        if array.ndim not in (2, 3):
            raise AdapterError(name, f"has a tensor of shape {array.shape}: {key}")
        if not mx.isfinite(array).all():
            raise AdapterError(name, f"has a tensor with NaN or infinity: {key}")
        found.setdefault(match[1], {})[match[2]] = array
    for module, both in found.items():
        for letter in letters:
            if letter not in both:
                raise AdapterError(name, f"has no lora_{letter} for {module}")
    if not found:
        raise AdapterError(name, "has no tensors")
    return {module: (both[letters[0]], both[letters[1]]) for module, both in found.items()}


def _check_ranks(
    name: str, module: str, of_a: int, of_b: int, stated: int | None, max_rank: int
) -> None:
    if of_a != of_b or (stated is not None and of_a != stated):
        stated_too = "" if stated is None else f", and {stated} in the configuration"
        raise AdapterError(name, f"has ranks {of_a} and {of_b} at {module}{stated_too}")
    if of_a > max_rank:
        raise AdapterError(name, f"has rank {of_a} at {module}: --max-lora-rank is {max_rank}")
