# SPDX-License-Identifier: Apache-2.0
"""A few well-known models of different sizes, for machines that have none yet.

Their configurations are kept here, as the hub publishes them, so that no network is needed to say
which of them fits. All are Qwen3 in 4 bits: one family from half a billion parameters to thirty.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from vllm_metal.commands.fit.source import write_hollow

_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "quantization": {"group_size": 64, "bits": 4},
}
_EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_key_value_heads": 4,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_TIED = {"tie_word_embeddings": True}
_SHAPE = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_DTYPES = {mx.bfloat16: "BF16", mx.uint32: "U32"}


@dataclass(frozen=True)
class KnownModel:
    """A model of the hub, and its config.json."""

    name: str
    config: Mapping[str, Any]

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """A folder that the model can be built from, as `source.folder` makes one of the hub's."""
        with TemporaryDirectory(prefix="vllm-metal-fit-") as scratch:
            (Path(scratch) / "config.json").write_text(json.dumps(self.config))
            write_hollow(Path(scratch) / "model.safetensors", self._tensors())
            yield Path(scratch)

    def _tensors(self) -> dict[str, tuple[str, tuple[int, ...], int]]:
        """The tensors of the file that mlx-lm would write of it; no weight is computed."""
        family = importlib.import_module(f"mlx_lm.models.{self.config['model_type']}")
        model = family.Model(family.ModelArgs.from_dict(self.config))
        model.set_dtype(mx.bfloat16)
        nn.quantize(model, **self.config["quantization"])
        arrays = cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))
        return {name: (_DTYPES[array.dtype], array.shape, array.nbytes) for name, array in arrays}


def _model(size: str, shape: tuple[int, int, int, int], **changes: Any) -> KnownModel:
    config = _QWEN3 | dict(zip(_SHAPE, shape, strict=True)) | changes
    return KnownModel(f"mlx-community/Qwen3-{size}-4bit", config)


#: The largest first.
KNOWN = (
    _model("30B-A3B", (2048, 6144, 48, 32), **_EXPERTS),
    _model("14B", (5120, 17408, 40, 40)),
    _model("8B", (4096, 12288, 36, 32)),
    _model("4B", (2560, 9728, 36, 32), **_TIED),
    _model("1.7B", (2048, 6144, 28, 16), **_TIED),
    _model("0.6B", (1024, 3072, 28, 16), **_TIED),
)
