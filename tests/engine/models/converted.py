# SPDX-License-Identifier: Apache-2.0
"""Converts transformers' small models to folders as mlx-lm's `convert` writes them.

mlx-lm's module of a family reads the arrays and writes them under its own names, as for the
folders of mlx-community. Weights are chosen so that quantization keeps them, so
transformers' forward of the same weights is the reference.
"""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from mlx_lm.utils import load_config, quantize_model, save_config, save_model
from patches.mlx_patches.test_registry import own_model

from vllm_metal.engine.config_json import published_config
from vllm_metal.engine.models.loader import dense_model
from vllm_metal.patches.mlx_patches import registry

GROUP = 32
_ROUNDS = 8  # until rounding changes nothing


def rounded(model: torch.nn.Module, bits_of: Any) -> None:
    """Rounds weights to values that quantization keeps.

    Args:
        model: transformers' model.
        bits_of: returns the bits for a parameter's name; None keeps it.
    """
    for name, parameter in model.named_parameters():
        bits = bits_of(name)
        if parameter.ndim < 2 or bits is None or name.endswith("bias"):
            continue
        turned = _inputs_first(model, name)
        array = mx.array(parameter.detach().numpy())
        array = mx.contiguous(array.swapaxes(-1, -2)) if turned else array
        if array.shape[-1] % GROUP:
            continue
        for _ in range(_ROUNDS):
            array = mx.dequantize(*mx.quantize(array, GROUP, bits), GROUP, bits)
        array = array.swapaxes(-1, -2) if turned else array
        parameter.data = torch.from_numpy(np.array(array)).contiguous()


def _inputs_first(model: Any, name: str) -> bool:
    """Returns whether the parameter's rows are inputs, unlike elsewhere."""
    family = model.config.model_type
    return (family == "gpt2" and ".h." in name) or (family == "gpt_oss" and ".experts." in name)


#: Modules that cannot read what transformers 5 writes, but older files. In folders that
#: mlx-lm writes, their arrays have the same names, so the patched module writes them.
OLDER = ("gpt2", "gpt_oss", "jamba", "kimi_linear", "olmo_hybrid", "qwen3_next")


def convert(folder: Path, out: Path, module: str, bits_of: Any = None) -> Path:
    """Converts a folder whose config.json mlx-lm can read, as `mlx_lm.convert` does.

    Args:
        folder: published folder.
        out: target folder.
        module: module of mlx-lm.
        bits_of: returns the bits for a module's path; None: no quantization.
    """
    config = load_config(folder)
    model: Any = dense_model(folder) if module in OLDER else own_model(folder, module)
    config |= published_config.as_read(config, module, registry.classes(dict(config))[1])
    if bits_of is not None:

        def predicate(path: str, part: Any) -> Any:
            if not hasattr(part, "to_quantized") or part.weight.shape[-1] % GROUP:
                return False
            return {"group_size": GROUP, "bits": bits_of(path)}

        model, config = quantize_model(model, config, GROUP, 4, quant_predicate=predicate)
    out.mkdir()
    save_model(out, model)
    save_config(config, out / "config.json")
    return out
