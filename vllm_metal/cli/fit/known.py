# SPDX-License-Identifier: Apache-2.0
"""Models that `fit` suggests if none is given."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.utils import quantize_model

from vllm_metal.cli.fit.source import write_stub

# The list includes the keys of the published configurations that determine sizes, so that `fit`
# needs no network to choose a model.

#: Date of the list. Names and sizes are the hub's.
AS_OF = "November 2026"
_FOUR_BITS = {"group_size": 64, "bits": 4}
_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "quantization": _FOUR_BITS,
}
_SHAPE = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "head_dim": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
}
_GLM_FLASH = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 47,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "vocab_size": 154880,
    "max_position_embeddings": 202752,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "quantization": _FOUR_BITS,
}
_LFM = {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "vocab_size": 65536,
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128000,
    "norm_eps": 1e-5,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": 2048,
    "block_ff_dim": 12288,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
    "quantization": _FOUR_BITS,
}
#: Text model of Qwen3.5 and 3.6: three of four layers are recurrent.
_DELTA = {
    "head_dim": 256,
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
}
_TOWER = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [],
}
_SMALL_TOWER = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096}
_IMAGE_TOKENS = {
    "image_token_id": 248056,
    "video_token_id": 248057,
    "vision_start_token_id": 248053,
    "vision_end_token_id": 248054,
}
_DTYPES = {mx.bfloat16: "BF16", mx.uint32: "U32", mx.uint8: "U8"}


@dataclass(frozen=True)
class KnownModel:
    """A model on the hub, and its config.json."""

    name: str
    config: Mapping[str, Any]
    size: float | None = None  # GB of its files on the hub

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """Creates a folder that the model can be built from, as `source.folder` does."""
        tensors, config = self._tensors()
        with TemporaryDirectory(prefix="vllm-metal-fit-") as scratch:
            (Path(scratch) / "config.json").write_text(json.dumps(config))
            write_stub(Path(scratch) / "model.safetensors", tensors)
            yield Path(scratch)

    def _tensors(self) -> tuple[dict[str, tuple[str, tuple[int, ...], int]], dict[str, Any]]:
        # Lazy arrays with the shapes and dtypes that mlx-lm would write; nothing is computed.
        family = importlib.import_module(f"mlx_lm.models.{self.config['model_type']}")
        model = family.Model(family.ModelArgs.from_dict(dict(self.config)))
        model.set_dtype(mx.bfloat16)
        given = self.config["quantization"]
        mode = given.get("mode", "affine")
        predicate = _mxfp4_experts if mode == "mxfp4" else None
        with redirect_stdout(StringIO()):  # it prints bits per weight
            _, config = quantize_model(
                *(model, dict(self.config), given["group_size"], given["bits"], mode),
                quant_predicate=predicate,
            )
        arrays = cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))
        tensors = {name: (_DTYPES[one.dtype], one.shape, one.nbytes) for name, one in arrays}
        if "vision_config" in config:
            tensors |= {name: ("BF16", shape, 2 * prod(shape)) for name, shape in _tower(config)}
        return tensors, config


def _tower(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    # The modules are in mlx-vlm, which is not imported for planning.
    vision = config["vision_config"]
    width, inner = vision["hidden_size"], vision["intermediate_size"]
    merged = width * vision["spatial_merge_size"] ** 2
    side = vision["patch_size"]
    patch = (vision["temporal_patch_size"], side, side, vision["in_channels"])
    linears = {
        "merger.linear_fc1": (merged, merged),
        "merger.linear_fc2": (vision["out_hidden_size"], merged),
        "patch_embed.proj": (width, *patch),
    }
    norms = {"merger.norm": width}
    for layer in range(vision["depth"]):
        block = f"blocks.{layer}."
        norms |= {f"{block}norm1": width, f"{block}norm2": width}
        linears |= {
            f"{block}attn.qkv": (3 * width, width),
            f"{block}attn.proj": (width, width),
            f"{block}mlp.linear_fc1": (inner, width),
            f"{block}mlp.linear_fc2": (width, inner),
        }
    shapes = {f"{name}.weight": (size,) for name, size in norms.items()}
    shapes |= {f"{name}.weight": shape for name, shape in linears.items()}
    shapes |= {f"{name}.bias": (size,) for name, size in norms.items()}
    shapes |= {f"{name}.bias": shape[:1] for name, shape in linears.items()}
    yield "vision_tower.pos_embed.weight", (vision["num_position_embeddings"], width)
    for name, shape in shapes.items():
        yield f"vision_tower.{name}", shape


def _mxfp4_experts(path: str, module: nn.Module) -> bool | dict[str, Any]:
    # Experts in MXFP4 as OpenAI publishes them, the rest in 8 bits as in mlx-community's
    # conversion.
    return True if isinstance(module, SwitchLinear) else {"group_size": 64, "bits": 8}


def _gpt_oss(size: str, gb: float, layers: int, experts: int) -> KnownModel:
    types = ["sliding_attention", "full_attention"] * (layers // 2)
    sizes = {"num_hidden_layers": layers, "num_local_experts": experts, "layer_types": types}
    return KnownModel(f"mlx-community/gpt-oss-{size}-MXFP4-Q8", _OSS | sizes, gb)


def _delta(
    name: str, gb: float, text: Mapping[str, Any], tower: Mapping[str, int] | None = None
) -> KnownModel:
    experts = "num_experts" in text
    kind = "qwen3_5_moe" if experts else "qwen3_5"
    vision = {**_TOWER, **(tower or {}), "out_hidden_size": text["hidden_size"]}
    config = {
        "architectures": [f"Qwen3_5{'Moe' if experts else ''}ForConditionalGeneration"],
        "model_type": kind,
        "text_config": _DELTA | {"model_type": f"{kind}_text"} | dict(text),
        "vision_config": vision | {"model_type": kind},
        "tie_word_embeddings": text.get("tie_word_embeddings", False),
        "torch_dtype": "bfloat16",
        "quantization": _FOUR_BITS,
    }
    return KnownModel(f"mlx-community/{name}", config | _IMAGE_TOKENS, gb)


def _shape(*sizes: int, kv_heads: int, value_heads: int, **more: Any) -> dict[str, Any]:
    heads = {"num_key_value_heads": kv_heads, "linear_num_value_heads": value_heads}
    return dict(zip(_SHAPE, sizes, strict=True)) | heads | more


_QWEN_35B = {
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "linear_num_value_heads": 32,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}

#: Sorted by size, the largest first.
KNOWN = (
    _gpt_oss("120b", 63.4, layers=36, experts=128),
    _delta("Qwen3.6-35B-A3B-4bit", 20.4, _QWEN_35B),
    KnownModel("mlx-community/GLM-4.7-Flash-4bit", _GLM_FLASH, 16.9),
    _delta("Qwen3.6-27B-4bit", 16.1, _shape(5120, 17408, 64, 24, kv_heads=4, value_heads=48)),
    _gpt_oss("20b", 12.1, layers=24, experts=32),
    _delta("Qwen3.5-9B-MLX-4bit", 6.0, _shape(4096, 12288, 32, 16, kv_heads=4, value_heads=32)),
    _delta(
        "Qwen3.5-4B-MLX-4bit",
        3.06,
        _shape(2560, 9216, 32, 16, kv_heads=4, value_heads=32, tie_word_embeddings=True),
        _SMALL_TOWER,
    ),
    KnownModel("LiquidAI/LFM2.5-1.2B-Instruct-MLX-4bit", _LFM, 0.66),
    KnownModel("mlx-community/Qwen3-0.6B-4bit", _QWEN3, 0.34),
)
