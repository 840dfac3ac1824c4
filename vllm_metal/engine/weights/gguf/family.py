# SPDX-License-Identifier: Apache-2.0
"""Defines Family, which describes how the files of a GGUF architecture are read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .source import GGUFSource
from .stems import TOP, Stems


def has_experts(source: GGUFSource) -> bool:
    return bool(source.arch("expert_count", 0))


def has_none(source: GGUFSource) -> bool:
    return not has_experts(source)


def has_any(source: GGUFSource) -> bool:
    """Always true: selects files with and without experts (for `Family.when`)."""
    return True


@dataclass(frozen=True)
class Family:
    """Describes how to read the files of one GGUF architecture that `when` selects."""

    architecture: str
    """`general.architecture` of its files."""
    model_type: str
    """`model_type` of config.json; also the module of mlx_lm.models that runs it."""
    hf_class: str
    """Entry of `architectures` in config.json."""
    layer_names: Stems
    """Maps stems under `blk.N.` in GGUF to modules of a layer."""
    when: Callable[[GGUFSource], bool] = has_none
    """Selects files of the architecture."""
    keys: Mapping[str, str | tuple[str, Any]] = field(default_factory=dict)
    """Maps keys of config.json to keys of the file without the architecture; a tuple has a
    default, too."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Keys of config.json with the same value for all files."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Maps usual keys of config.json to the family's names; an empty name drops the key."""
    config: Callable[[GGUFSource, dict[str, Any]], dict[str, Any]] | None = None
    """Builds further keys of config.json (family_config.py)."""
    top_names: Stems = field(default_factory=lambda: TOP)
    """Maps stems outside of layers in GGUF to modules."""
    layers: str = "model.layers"
    """Path of the layers in mlx-lm's module."""
    prefix: str = ""
    """Prefix of mlx-lm's names."""
    interleaved_rope: bool = False
    """Whether GGUF has rows of q and k in the order of interleaved RoPE."""
    rotates_part: bool = False
    """Whether RoPE may rotate a part of each head: `partial_rotary_factor`."""
    own_rope: bool = False
    """Whether `config` also reads rope_freqs.weight."""
    layers_differ: bool = False
    """Whether layers may have different sizes, for which `config` makes keys."""
    states_bias: bool = False
    """Whether config.json has `attention_bias`."""
    norm_offset: float = 0.0
    """Added to norms' weights in GGUF; mlx-lm's model adds it at run time."""
    v_heads_tiled: bool = False
    """Whether GGUF orders linear attention's value heads by index within a key head first."""
    unused: tuple[str, ...] = ()
    """Tensors of a file that config.json replaces."""
    default_dtype: str = "float16"
    """Element type if all matrices of the file are quantized."""
    biased: tuple[str, ...] = ()
    """Stems of tensors that always have a bias."""
    converts: bool = False
    """Whether `vllm-metal convert` supports it, too."""
