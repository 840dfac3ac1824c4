# SPDX-License-Identifier: Apache-2.0
"""Settings that modules of mlx-lm do not read, and the values of them that they compute."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from vllm_metal.models.weight_files import ModelLoadError

#: By module and key of config.json; no value: the key must not be there.
FIXED: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "ernie4_5_moe": {"use_bias": (False,)},
    "falcon_h1": {"time_step_limit": ((0.0, math.inf),)},
    "gpt_oss": {"swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)},
    # mlx-lm's module of this name is MiniMax-M2's.
    "minimax": {"linear_attn_alpha_factor": ()},
    "olmoe": {"clip_qkv": ()},
    "qwen2_moe": {
        "decoder_sparse_step": (1,),
        "mlp_only_layers": ([],),
        "norm_topk_prob": (False,),
    },
    "qwen3": {"attention_bias": (False,)},
    "qwen3_moe": {"attention_bias": (False,)},
    "recurrent_gemma": {"rope_theta": (10000.0,)},
}


def check(config: Mapping[str, Any], module: str) -> None:
    """
    Args:
        config: of config.json, or its `text_config`.
        module: of mlx-lm, that reads it.

    Raises:
        ModelLoadError: a setting has a value that the module does not compute.
    """
    for key, computed in FIXED.get(module, {}).items():
        value = config.get(key)
        if value is None or any(_same(value, each) for each in computed):
            continue
        served = " or ".join(map(repr, computed))
        raise ModelLoadError(
            f"config.json says {key} {value!r}; mlx-lm's module {module!r} "
            + (f"computes {served}" if served else "has nothing of that name")
        )


def _same(value: Any, other: Any) -> bool:
    """Lists of JSON and tuples are alike."""
    if isinstance(value, list) and isinstance(other, tuple):
        return len(value) == len(other) and all(map(_same, value, other))
    return bool(value == other)
