# SPDX-License-Identifier: Apache-2.0
"""What differs between architectures of GGUF models, as a record."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .source import GGUFSource
from .stems import TOP, Stems


def has_experts(source: GGUFSource) -> bool:
    """Whether layers of a file have experts."""
    return bool(source.arch("expert_count", 0))


def has_none(source: GGUFSource) -> bool:
    """Whether layers of a file have no experts."""
    return not has_experts(source)


def has_any(source: GGUFSource) -> bool:
    """Accepts files with and without experts."""
    return True


@dataclass(frozen=True)
class Family:
    """How files of one GGUF architecture are read, or those of them that `when` accepts."""

    architecture: str
    """`general.architecture` of its files."""
    model_type: str
    """`model_type` of config.json; also the module of mlx_lm.models that runs it."""
    hf_class: str
    """Entry of `architectures` in config.json."""
    layer_names: Stems
    """Stem under `blk.N.` in GGUF -> module under a layer."""
    when: Callable[[GGUFSource], bool] = has_none
    """Which files of the architecture are meant."""
    keys: Mapping[str, str | tuple[str, Any]] = field(default_factory=dict)
    """Key of config.json -> key of the file without the architecture, or that and a default."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Keys of config.json that all files of the family have alike."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Key of config.json that all families have -> the family's name of it; empty: left out."""
    config: Callable[[GGUFSource, dict[str, Any]], dict[str, Any]] | None = None
    """Makes further keys of config.json (family_config.py)."""
    top_names: Stems = field(default_factory=lambda: TOP)
    """Stem outside of layers in GGUF -> module."""
    layers: str = "model.layers"
    """Where mlx-lm's module has its layers."""
    prefix: str = ""
    """What mlx-lm's names have before them."""
    interleaved_rope: bool = False
    """GGUF holds rows of q and k in the order of the interleaved form of RoPE."""
    rotates_part: bool = False
    """A part of each head may be rotated: `partial_rotary_factor`."""
    own_rope: bool = False
    """`config` reads rope_freqs.weight, too."""
    layers_differ: bool = False
    """Layers may have different sizes, of which `config` makes keys."""
    states_bias: bool = False
    """config.json says whether attention has biases (`attention_bias`)."""
    norm_offset: float = 0.0
    """GGUF stores norms' weights with this added; mlx-lm's model adds it when it runs."""
    v_heads_tiled: bool = False
    """GGUF has value heads of linear attention by their number within a key head first."""
    unused: tuple[str, ...] = ()
    """Tensors of a file that config.json has instead."""
    default_dtype: str = "float16"
    """Element type where all matrices of the file are quantized."""
    biased: tuple[str, ...] = ()
    """Stems of tensors that always have a bias."""
    converts: bool = False
    """Whether `vllm-metal convert` knows it, too."""
