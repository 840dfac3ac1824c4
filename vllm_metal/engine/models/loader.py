# SPDX-License-Identifier: Apache-2.0
"""Loads mlx-lm models from a folder or the hub, in the dtype that vLLM chose."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from textwrap import shorten
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
import mlx.nn as nn
import torch
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import load_config
from tqdm.auto import tqdm
from vllm.logger import init_logger

from vllm_metal.engine.config_json import published_config
from vllm_metal.engine.config_json.ropes import fit_context, fix_ropes
from vllm_metal.engine.config_json.stored_head import Head, head_of, is_head
from vllm_metal.engine.kv_cache.formats import MLX_DTYPES
from vllm_metal.engine.models.leftovers import accounted
from vllm_metal.engine.weights import files
from vllm_metal.engine.weights.disk_tables import TableRule
from vllm_metal.engine.weights.judge import plan_of
from vllm_metal.engine.weights.layers import FLOAT32
from vllm_metal.engine.weights.lazy import has_outlines_only
from vllm_metal.engine.weights.loading import Checkpoint, load_model, opened
from vllm_metal.engine.weights.packed import Packed, Weight
from vllm_metal.engine.weights.plan import Plan
from vllm_metal.identity.model_files import HEAD_PATTERNS, ModelLoadError, model_folder
from vllm_metal.patches.mlx_patches import registry as patches
from vllm_metal.patches.mlx_patches.families.engram import load_token_map

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = init_logger(__name__)
#: Maps a config.json to mlx-lm's classes of the model and of its arguments.
Classes = Callable[[dict[str, Any]], tuple[type, type]]
#: Keys of config.json that configure RoPE.
_ROPE = frozenset(("rope_parameters", "rope_scaling", "rope_theta"))
_FLOATING = (mx.float16, mx.bfloat16, mx.float32)
#: Name suffixes of vectors that stay float32 if files have them so: biases that choose experts, and
#: decay rates, whose rounding error grows with the text.
_FLOAT32 = ("e_score_correction_bias", "expert_bias", "A_log", "dt_bias")
_LONGEST_REASON = 400  # characters of another package's message
#: Parts of MLX's messages if the weights do not match the modules that config.json describes.
_MISMATCHES = ("Expected shape", "parameters not in model", "Missing")


def load(
    config: VllmConfig,
    model_config: ModelConfig | None = None,
    classes: Classes = patches.classes,
    prepare: Callable[[nn.Module], None] = lambda model: None,
    tables: TableRule | None = None,
) -> nn.Module:
    """Loads a model, with floating-point weights cast to the configured dtype.

    Quantized weights stay packed; their scales and biases are cast.

    Args:
        model_config: a draft model's, which is loaded in the target's dtype; None: the target's.
        classes: returns the model's classes for its config.json.
        prepare: called with the model before its weights are read; may remove modules.
        tables: decides which embedding tables stay on disk; None: all weights are loaded.

    Raises:
        ModelLoadError: the folder is missing, incomplete or unreadable, or mlx-lm does not support
            the model's family.
    """
    model_config = model_config or config.model_config
    path = model_folder(model_config, config)
    overrides = _overrides(model_config, path)
    trusted = model_config.trust_remote_code
    model = lazy_model(path, mlx_dtype(config), trusted, overrides, classes, tables)
    fit_context(model, model_config.max_model_len)
    prepare(model)
    _read_weights(model, path)
    return model


def _overrides(model_config: ModelConfig, path: Path) -> dict[str, Any]:
    """Returns keys of config.json changed by --hf-overrides, in the form that mlx-lm reads.

    Ignores functions: vLLM sets one for draft models, which concerns its own classes.
    """
    given = model_config.hf_overrides
    if callable(given) or not given:
        return {}
    config = load_config(path)
    for key in _left_out(config, given):
        logger.warning("--hf-overrides removes %s from config.json", key)
    changed = {key: _merged(config.get(key), value) for key, value in given.items()}
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope |= given.get("rope_parameters") or {}
    if given.get("rope_scaling"):
        rope = dict(given["rope_scaling"])
    theta = given.get("rope_theta", rope.get("rope_theta", config.get("rope_theta")))
    if _ROPE.isdisjoint(given):
        return changed
    if theta is None:
        return changed | {"rope_parameters": rope, "rope_scaling": rope}
    # Families read one or two of the three keys, so all three get the same values.
    rope = {"rope_type": "default", **rope, "rope_theta": theta}
    return changed | {"rope_parameters": rope, "rope_scaling": rope, "rope_theta": theta}


def _merged(stated: Any, given: Any) -> Any:
    """Returns a value of config.json with that of an override; mappings are merged."""
    if not isinstance(given, Mapping):
        return given
    # vLLM replaces RoPE parameters within text_config as a whole.
    merged = {
        key: value if key in _ROPE else _merged((stated or {}).get(key), value)
        for key, value in given.items()
    }
    return {**(stated or {}), **merged}


def _left_out(config: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Returns keys of config.json that overrides drop, with their values."""
    lost = []
    for key, value in given.items():
        stated = config.get(key)
        if key == "rope_parameters" and stated is None:
            stated = config.get("rope_scaling")  # the same by its older name
        if value is None and stated is not None:
            lost.append(f"{key} ({stated!r})")
        elif isinstance(value, Mapping) and isinstance(stated, Mapping):
            lost += [f"{key}.{inner}" for inner in _left_out(stated, value)]
    return lost


def lazy_model(
    path: Path,
    dtype: mx.Dtype,
    trust_remote_code: bool = False,
    overrides: Mapping[str, Any] | None = None,
    classes: Classes = patches.classes,
    tables: TableRule | None = None,
) -> nn.Module:
    """Returns a folder's model in one dtype, but reads its weights on first use.

    See `load` for errors, and `dense_model` for the other arguments.
    """
    try:
        patches.install()
        model = dense_model(path, trust_remote_code, overrides, classes, dtype, tables)
        patches.install()  # again: mlx-lm has just imported the modules of the folder's own code
    except ModelLoadError as error:
        raise ModelLoadError(f"cannot load {path}: {error}") from error
    except Exception as error:  # modules raise anything for arguments that they do not support
        reason = shorten(str(error), _LONGEST_REASON)  # mlx-lm lists every missing weight on a line
        if any(sign in reason for sign in _MISMATCHES):
            reason += ". config.json and the weights are not of one model: download both again"
        raise ModelLoadError(f"mlx-lm cannot load {path}: {reason}") from error
    parameters = dict(tree_flatten(model.parameters()))
    model.update(tree_unflatten(list(in_dtype(parameters, dtype, model).items())))
    model.eval()
    return model


def dense_model(
    path: Path,
    trust_remote_code: bool = False,
    overrides: Mapping[str, Any] | None = None,
    classes: Classes = patches.classes,
    dtype: mx.Dtype = mx.float32,
    tables: TableRule | None = None,
) -> nn.Module:
    """Returns mlx-lm's own model of a folder, in its files' dtypes; reads weights on first use.

    Args:
        trust_remote_code: whether the folder's own code may run.
        overrides: replaces keys of config.json.
        classes: see `load`.
        dtype: dtype of activations, for the scales of quantized weights.
        tables: see `load`.

    Raises:
        ModelLoadError: mlx-lm's module does not support a setting of config.json, or the format
            of the weights is not supported.
        Exception: from mlx-lm.
    """
    config = load_config(path) | dict(overrides or {})
    checkpoint = opened(path, config)
    read = config | _as_read(config, checkpoint)
    model = load_model(checkpoint, read, accounted(classes), dtype, trust_remote_code, tables)
    fix_ropes(model, config)
    load_token_map(model, path, has_outlines_only())
    return model


def _as_read(config: Mapping[str, Any], checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns keys of config.json that mlx-lm's module expects under other names or values."""
    if "model_file" in config:
        return {}  # the folder's own code reads it
    family, args = patches.classes(dict(config))
    text = config.get("text_config") or {}
    stated = text.get("tie_word_embeddings", config.get("tie_word_embeddings"))
    is_packed = any(map(is_head, checkpoint.plan.weights))
    head = Head.OWN if is_packed else head_of(checkpoint.arrays, may_be_copy=stated is not False)
    module = patches.module_of(config, family)
    return published_config.as_read(config, module, args, checkpoint.folder, head)


def in_dtype(
    arrays: Mapping[str, mx.array], dtype: mx.Dtype, model: nn.Module | None = None, place: str = ""
) -> dict[str, mx.array]:
    """Casts floating-point arrays to one dtype, lazily.

    Args:
        arrays: arrays by name.
        model: its family may exclude parameters, such as the biases that choose experts.
        place: prefix of the names in the model.
    """
    may_cast = getattr(model, "cast_predicate", lambda name: True)

    def in_its_dtype(name: str, array: mx.array) -> mx.array:
        if array.dtype not in _FLOATING or not may_cast(f"{place}{name}"):
            return array
        kept = name.endswith(FLOAT32) or (array.ndim == 1 and name.endswith(_FLOAT32))
        return array if kept and array.dtype == mx.float32 else array.astype(dtype)

    return {name: in_its_dtype(name, array) for name, array in arrays.items()}


def load_weights(
    model_config: ModelConfig,
    config: VllmConfig,
    wanted: Callable[[str], bool] | None = None,
    dtype: mx.Dtype | None = None,
) -> dict[str, mx.array]:
    """Returns arrays by name of a checkpoint that is not a whole model, such as a draft head.

    Quantized weights are dequantized. Arrays of safetensors files are read on first use. Draft
    heads are often published only as torch's files; of these, only tensors are unpickled.

    Args:
        model_config: names the checkpoint's folder.
        wanted: selects arrays by name; None: all.
        dtype: dtype of the returned arrays; None: the target's.

    Raises:
        ModelLoadError: the folder is missing or has no weights, or they are unreadable.
    """
    dtype = dtype or mlx_dtype(config)
    weights, _ = load_checkpoint(model_config, config, wanted)
    arrays = {
        name: weight.dense(dtype) if isinstance(weight, Packed) else weight
        for name, weight in weights.items()
    }
    return in_dtype(arrays, dtype)


def load_checkpoint(
    model_config: ModelConfig,
    config: VllmConfig,
    wanted: Callable[[str], bool] | None = None,
) -> tuple[dict[str, Weight], Plan]:
    """Returns lazy weights, in their files' dtypes, and their storage plan; see `load_weights`.

    Raises ModelLoadError: see `load_weights`; also if a format is not supported.
    """
    folder = model_folder(model_config, config, HEAD_PATTERNS)
    paths = sorted(folder.glob("*.safetensors"))
    counts = wanted or (lambda name: True)
    try:
        if paths:
            headers = files.headers_of(paths, lambda name, path: counts(name))
            plan = plan_of(load_config(folder), headers, folder)
            return plan.converted(files.arrays_of(headers), mlx_dtype(config)), plan
        found: dict[str, Weight] = {}
        paths = sorted(p for p in folder.iterdir() if p.suffix in (".bin", ".pt"))
        for path in paths:
            found |= {name: a for name, a in _torch_arrays(path).items() if counts(name)}
    except ModelLoadError:
        raise
    except (RuntimeError, OSError, ValueError, UnpicklingError) as error:
        raise ModelLoadError(f"weights in {folder} are unreadable: {error}") from error
    if not paths:
        raise ModelLoadError(f"no weights (*.safetensors, *.bin, *.pt) in {folder}")
    return found, Plan()


def _torch_arrays(path: Path) -> dict[str, mx.array]:
    tensors = torch.load(path, map_location="cpu", weights_only=True)
    return {  # numpy lacks bfloat16; float32 represents it exactly
        name: mx.array((t.float() if t.is_floating_point() else t).numpy())
        for name, t in tensors.items()
    }


def weight_bytes(model: nn.Module) -> int:
    """Returns the bytes of a model's weights on this rank."""
    parameters = cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))
    return sum(array.nbytes for _, array in parameters)


def _read_weights(model: nn.Module, path: Path) -> None:
    parameters = cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))
    arrays = [array for _, array in parameters]
    total = weight_bytes(model)
    try:
        with tqdm(total=total, unit="B", unit_scale=True, desc="Loading weights") as bar:
            for array in arrays:
                mx.eval(array)
                bar.update(array.nbytes)
    except RuntimeError as error:
        raise ModelLoadError(f"weights in {path} are truncated or unreadable: {error}") from error


def mlx_dtype(config: VllmConfig) -> mx.Dtype:
    """Returns MLX's name of the dtype that vLLM chose; raises ModelLoadError if unsupported."""
    dtype = config.model_config.dtype
    assert isinstance(dtype, torch.dtype)  # vLLM resolves "auto" and names before workers start
    if dtype not in MLX_DTYPES:
        raise ModelLoadError(f"--dtype {dtype} is not supported: choose one of {[*MLX_DTYPES]}")
    return MLX_DTYPES[dtype]


def model_type(config: VllmConfig) -> str:
    """Returns `model_type` of config.json, for messages."""
    return str(config.model_config.hf_config.model_type)


def check_draft_vocabulary(config: VllmConfig) -> None:
    """Checks that target and draft model map token ids to the same tokens.

    vLLM only compares the sizes of the vocabularies. Does nothing unless both folders have a
    tokenizer.json.

    Raises ModelLoadError: an id maps to two different tokens.
    """
    assert config.speculative_config is not None
    pair = (config.model_config, config.speculative_config.draft_model_config)
    target, draft = (model_folder(model_config, config) for model_config in pair)
    tokenizer = Path(config.model_config.tokenizer)  # often the same folder
    meant = _tokens(tokenizer if tokenizer.is_dir() else target)
    for token_id, token in _tokens(draft).items():
        if meant.get(token_id, token) != token:
            raise ModelLoadError(
                f"token {token_id} is {meant[token_id]!r} in {target} and {token!r} in {draft}: a "
                "draft model must share the target's vocabulary, so choose one of the same family"
            )


def _tokens(folder: Path) -> dict[int, str]:
    """Maps ids to tokens of tokenizer.json; empty without that file."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return {}
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    if isinstance(vocab, list):  # SentencePiece unigrams: (token, score) in order
        by_id = {token_id: entry[0] for token_id, entry in enumerate(vocab)}
    else:
        by_id = {token_id: token for token, token_id in vocab.items()}
    return by_id | {added["id"]: added["content"] for added in content.get("added_tokens") or ()}
