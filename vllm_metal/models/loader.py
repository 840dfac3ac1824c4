# SPDX-License-Identifier: Apache-2.0
"""Loads an mlx-lm model from a local folder or the hub, in the dtype vLLM settled on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
import mlx.nn as nn
import torch
from mlx.utils import tree_flatten, tree_map
from mlx_lm.utils import load_model as load_mlx_model
from tqdm.auto import tqdm

from vllm_metal.attention import seam

if TYPE_CHECKING:
    from vllm.config import VllmConfig

MLX_DTYPES = {
    torch.float32: mx.float32,
    torch.float16: mx.float16,
    torch.bfloat16: mx.bfloat16,
}
#: What a model folder must hold for mlx-lm; the tokenizer is vLLM's to fetch.
_PATTERNS = ("*.json", "model*.safetensors", "*.py", "*.tiktoken", "*.jinja")


class ModelLoadError(RuntimeError):
    """The model folder cannot be loaded; the message says why and what to do."""


def load(config: VllmConfig) -> nn.Module:
    """The model of `config`, its floating-point weights cast to the configured dtype.

    Quantised weights stay packed, their scales and biases are cast.

    Raises:
        ModelLoadError: the folder is missing, incomplete, unreadable, or of no mlx-lm family.
    """
    model_config = config.model_config
    path = _folder(model_config.model, model_config.revision, config.load_config.download_dir)
    seam.install()
    try:
        model, _ = load_mlx_model(path, lazy=True, trust_remote_code=model_config.trust_remote_code)
    except (ValueError, KeyError, RuntimeError, OSError) as error:
        raise ModelLoadError(f"mlx-lm cannot load {path}: {error}") from error
    seam.install()  # the family's module was imported just now
    dtype = mlx_dtype(config)
    floating = (mx.float16, mx.bfloat16, mx.float32)
    model.update(
        tree_map(lambda a: a.astype(dtype) if a.dtype in floating else a, model.parameters())
    )
    model.eval()
    _materialise(model, path)
    return model


def _folder(model: str, revision: str | None, download_dir: str | None) -> Path:
    path = Path(model)
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                model, revision=revision, cache_dir=download_dir, allow_patterns=list(_PATTERNS)
            )
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise ModelLoadError(
            f"no folder {model!r}, and the hub has no such model: {error}"
        ) from error


def _materialise(model: nn.Module, path: Path) -> None:
    """Reads the weights, which load lazily, with a progress bar in bytes."""
    parameters = cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))
    arrays = [array for _, array in parameters]
    total = sum(array.nbytes for array in arrays)
    try:
        with tqdm(total=total, unit="B", unit_scale=True, desc="Loading weights") as bar:
            for array in arrays:
                mx.eval(array)
                bar.update(array.nbytes)
    except RuntimeError as error:
        raise ModelLoadError(f"weights in {path} are truncated or unreadable: {error}") from error


def torch_dtype(config: VllmConfig) -> torch.dtype:
    """The dtype vLLM settled on for weights and KV cache."""
    dtype = config.model_config.dtype
    assert isinstance(dtype, torch.dtype)  # vLLM resolves "auto" and names before workers start
    return dtype


def mlx_dtype(config: VllmConfig) -> mx.Dtype:
    """The same as MLX's dtype.

    Raises:
        ModelLoadError: MLX models do not come in it.
    """
    dtype = torch_dtype(config)
    if dtype not in MLX_DTYPES:
        raise ModelLoadError(f"--dtype {dtype} is not supported: choose one of {[*MLX_DTYPES]}")
    return MLX_DTYPES[dtype]


def model_type(config: VllmConfig) -> str:
    """The family's name for messages, as config.json gives it."""
    return str(config.model_config.hf_config.model_type)


class SelectedRows:
    """Lets only chosen rows of the hidden states reach the model's head."""

    def __init__(self, model: nn.Module) -> None:
        self._rows: mx.array | None = None
        self._decoder = _decoder(model)
        if self._decoder is not None:
            _wrap_call(self._decoder, self._select)

    def _select(self, hidden: mx.array) -> mx.array:
        return hidden if self._rows is None else hidden[self._rows]

    def logits(
        self, model: nn.Module, input_ids: mx.array, caches: list[Any], rows: mx.array | None
    ) -> mx.array:
        """Runs the model over T rows of length 1.

        Args:
            model: the one this was made for.
            input_ids: [T] int32.
            caches: one a layer, already told of the step.
            rows: [N] int32, rows whose logits are wanted; None for all T.

        Returns:
            [N, V] logits.
        """
        self._rows = rows
        out = model(input_ids[:, None], cache=caches)[:, 0]
        self._rows = None
        return out if self._decoder is not None or rows is None else out[rows]


def _decoder(model: nn.Module) -> nn.Module | None:
    """The module that holds the layers and returns hidden states; None where that is the model."""
    layers = model.layers
    for _, module in model.named_modules():
        if module is not model and module.get("layers") is layers:
            return module
    return None


def _wrap_call(module: nn.Module, then: Callable[[mx.array], mx.array]) -> None:
    """Applies `then` to what the module returns; Python looks up ``__call__`` on the class."""
    family = type(module)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> mx.array:
        return then(family.__call__(self, *args, **kwargs))

    module.__class__ = type(family.__name__, (family,), {"__call__": call})
