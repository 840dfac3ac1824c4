# SPDX-License-Identifier: Apache-2.0
"""Loads a folder of any weight format into a model of mlx-lm."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.utils import infer_quant_config
from vllm.logger import init_logger

from vllm_metal.engine.weights import disk_tables, files
from vllm_metal.engine.weights.disk_tables import TableRule
from vllm_metal.engine.weights.files import Header
from vllm_metal.engine.weights.judge import plan_of
from vllm_metal.engine.weights.placing import Placed, install, place
from vllm_metal.engine.weights.plan import Plan
from vllm_metal.identity import model_files

logger = init_logger(__name__)

Classes = Callable[[dict[str, Any]], tuple[type, type]]
#: Maximum NVFP4 value (6 * 448); MLX's `global_scale` is the largest magnitude instead of a factor.
_NVFP4_MAX = 2688.0


@dataclass(frozen=True)
class Checkpoint:
    """A folder's weights as lazy arrays, and the plan to read them."""

    folder: Path
    arrays: dict[str, mx.array]  # stored arrays by name; lazy
    plan: Plan
    headers: Mapping[str, Header] = field(default_factory=dict)  # safetensors headers by name


def opened(folder: Path, config: dict[str, Any]) -> Checkpoint:
    """Opens a folder's weights.

    Raises ModelLoadError: weights are missing, unreadable or in an unsupported format.
    """
    if model_files.is_gguf(folder):
        from vllm_metal.engine.weights import gguf_model  # needs the package gguf

        files.check_weight_files(folder)
        return Checkpoint(folder, *gguf_model.opened(folder))
    headers = files.headers(folder)
    plan = plan_of(config, headers, folder)
    return Checkpoint(folder, files.arrays_of(headers), plan, headers)


def load_model(
    checkpoint: Checkpoint,
    config: dict[str, Any],
    classes: Classes,
    dtype: mx.Dtype,
    trust_remote_code: bool = False,
    tables: TableRule | None = None,
) -> nn.Module:
    """Builds a model with a checkpoint's weights, which are read when they are used.

    Args:
        checkpoint: see `opened`.
        config: config.json as mlx-lm's module reads it.
        classes: returns the classes of the model and its arguments for a config.
        dtype: dtype of activations. Unquantized weights keep the dtype of their files.
        trust_remote_code: whether the folder's own code may run.
        tables: decides which embedding tables stay on disk; None: all weights are loaded.

    Raises:
        ModelLoadError: weights do not fit each other.
        ValueError: the weights do not fit the model, or the folder's own code may not run.
    """
    for note in checkpoint.plan.notes:
        logger.info(note)
    model_class, arguments = _classes(checkpoint.folder, config, classes, trust_remote_code)
    model = model_class(arguments.from_dict(config))
    arrays, plan = checkpoint.arrays, checkpoint.plan

    def placed_with(some: nn.Module, others: Mapping[str, mx.array]) -> Placed:
        return placed(some, config, {**arrays, **others}, plan, dtype)

    on_disk = {}
    if tables is not None:
        on_disk = disk_tables.find(model, checkpoint.headers, placed_with, dtype, tables)
        tables.log(on_disk)
    found = disk_tables.without(placed_with(model, {}), on_disk)
    model.update_modules(tree_unflatten(list(on_disk.items())))
    install(model, found)
    model.eval()
    return model


def placed(
    model: nn.Module,
    config: dict[str, Any],
    arrays: dict[str, mx.array],
    plan: Plan,
    dtype: mx.Dtype,
) -> Placed:
    """Converts a checkpoint's arrays to the names and formats of an empty model; lazy."""
    if config.get("quantization"):
        return _place_mlx_quantized(model, config, arrays)
    return place(model, plan.converted(arrays, dtype), plan.weights, dtype)


def _classes(
    folder: Path, config: dict[str, Any], classes: Classes, trust_remote_code: bool
) -> tuple[Any, Any]:
    code = config.get("model_file")
    if code is None:
        return classes(config)
    if not trust_remote_code:
        raise ValueError(
            f"model_file={code!r} in config.json is not supported without --trust-remote-code: the "
            "model needs code of its folder. Set it if you trust the model."
        )
    spec = importlib.util.spec_from_file_location("custom_model", folder / code)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Model, module.ModelArgs


def _place_mlx_quantized(
    model: nn.Module, config: dict[str, Any], arrays: dict[str, mx.array]
) -> Placed:
    """Like `placed`, for arrays that MLX's own tools quantized: `sanitize` knows their names."""
    found: dict[str, mx.array] = dict(
        model.sanitize(arrays) if hasattr(model, "sanitize") else arrays
    )
    if config.get("quantize_activations"):
        logger.info("quantize_activations is not used: weights are served as they are stored")
    packings = packings_of_mlx(model, config["quantization"], found)
    for name in [name for name in found if name.endswith(".global_scale")]:
        path = name.removesuffix(".global_scale")
        if f"{path}.weight" not in found:
            continue  # a parameter of a module (Inkling's MLP)
        scale = found.pop(name).astype(mx.float32) / _NVFP4_MAX
        rows = found[f"{path}.weight"].shape[:-1]
        found[f"{path}.output_scale"] = mx.broadcast_to(
            scale.reshape(*scale.shape, *[1] * (len(rows) - scale.ndim)), rows
        )
    return Placed(found, packings)


def packings_of_mlx(
    model: nn.Module, stated: Mapping[str, Any], arrays: dict[str, mx.array]
) -> dict[str, dict[str, Any]]:
    """Returns the packing of each layer, by path, that MLX's own tools quantized.

    `stated` is `quantization` of config.json; `arrays` have the names of the model's parameters.
    """
    default = {
        "group_size": stated.get("group_size"),
        "bits": stated.get("bits"),
        "mode": stated.get("mode", "affine"),
    }
    packings: dict[str, dict[str, Any]] = {}
    for path, module in model.named_modules():
        given = stated.get(path)
        if given is False or not hasattr(module, "to_quantized"):
            continue
        if isinstance(given, dict):
            packings[path] = given
        elif given is True:
            packings[path] = default
        elif f"{path}.scales" in arrays:
            packings[path] = infer_quant_config(path, module, arrays)
    return packings
