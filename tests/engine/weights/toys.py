# SPDX-License-Identifier: Apache-2.0
"""Small transformers models with linear layers in a published format."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from engine.models.published import FAMILIES, log_probabilities, make, write
from engine.weights.published_formats import FORMATS
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

#: Sizes that groups and blocks divide, or do not.
SIZES = {
    "hidden_size": 192,
    "intermediate_size": 192,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "q_lora_rank": 64,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "head_dim": 32,
}
OF_FAMILY = {
    "mixtral": {"num_attention_heads": 6, "num_key_value_heads": 2},  # determines head_dim
    "qwen3_moe": {"mlp_only_layers": []},  # otherwise the first layer with experts is the fourth
}
#: Parts that published files keep in the model's dtype.
DENSE = ("embed", "lm_head", "norm", "router", ".gate.", "conv1d", "mlp.gate", "shared_expert_gate")
PROMPT = [1, 5, 9, 33, 77, 12, 4, 8, 90]


def write_quantized(family: str, form: str, folder: Path, **changes: Any) -> np.ndarray:
    """Writes a model in a format.

    Returns:
        [length, V] log-probabilities of PROMPT, by transformers with the stored values.
    """
    return log_probabilities(reference_of(family, form, folder, **changes), [PROMPT])[0]


def reference_of(family: str, form: str, folder: Path, **changes: Any) -> torch.nn.Module:
    """Writes a model in a format; returns transformers' model of the stored values."""
    own = FAMILIES[family]
    layers = {"layer_types": own.config["layer_types"][:3]} if "layer_types" in own.config else {}
    model: Any = make(own, **SIZES | layers | OF_FAMILY.get(family, {}) | changes)
    write(model, folder)
    path = folder / "model.safetensors"
    stored, dense = stored_as(form, load_file(path))
    save_file({n: t.contiguous() for n, t in dense.items()}, path, {"format": "pt"})
    reference: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    write_stored(form, stored, folder)
    return reference.float().eval()


def reference_of_gpt_oss(folder: Path, **changes: Any) -> torch.nn.Module:
    """Writes gpt-oss as OpenAI publishes it; returns transformers' model of its values."""
    model: Any = make(FAMILIES["gpt_oss"], hidden_size=96, intermediate_size=64, **changes)
    write(model, folder)
    path, generator = folder / "model.safetensors", torch.Generator().manual_seed(0)
    stored = {}
    for name, tensor in load_file(path).items():
        if tensor.ndim < 3:
            stored[name] = tensor
            continue
        experts, num_in, num_out = tensor.shape
        shape = (experts, num_out, num_in // 32)
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(122, 126, shape, dtype=torch.uint8, generator=generator)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        dense = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        model.state_dict()[name].copy_(dense)
    save_file(stored, path, {"format": "pt"})
    left_out = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": left_out}
    change_config(folder, quantization_config=settings)
    return model


#: Name parts of arrays that published files of Hy4 do not quantize.
DENSE_IN_HY4 = ("embed_tokens", "hc", "lm_head", "mlp.gate.", "weights_proj")


def reference_of_hy_v4(folder: Path) -> torch.nn.Module:
    """Writes Hy4 in MXFP8, a layer's experts in one array; returns transformers' model."""
    sizes = {name: SIZES[name] for name in SIZES if name not in ("head_dim", "num_hidden_layers")}
    model: Any = make(FAMILIES["hy_v4"], **sizes, index_head_dim=64)
    for name, parameter in model.named_parameters():
        if _is_mxfp8(name, parameter):
            values, scales = _as_mxfp8(parameter.data)
            factors = 2.0 ** (scales.float() - 127).repeat_interleave(32, -1)
            parameter.data = values.float() * factors
    write(model, folder)
    stored = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if _is_mxfp8(name, tensor):
            stored[name], stored[f"{name}_scale"] = _as_mxfp8(tensor)
        else:
            stored[name] = tensor
    stored["model.mtp_layers.0.enorm.weight"] = torch.ones(sizes["hidden_size"])
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    change_config(folder, quantization_config={"quant_method": "mxfp8"})
    return model


#: The same of GLM-5.3, beside DENSE but for its dense MLPs.
DENSE_IN_GLM5 = ("hc_", "indexer", "kv_b_proj", "mlp.gate.", "visual")


def reference_of_glm5_next(folder: Path, form: str) -> torch.nn.Module:
    """Writes GLM-5.3 in a format; returns transformers' model of the stored values."""
    own = FAMILIES["glm5_next"]
    sizes = {name: SIZES[name] for name in SIZES if "head_dim" not in name}
    sizes |= {
        "qk_nope_head_dim": 32,
        "num_hidden_layers": own.config["text_config"]["num_hidden_layers"],
    }
    parts = {
        "text_config": own.config["text_config"] | sizes,
        "vision_config": own.config["vision_config"] | {"out_hidden_size": sizes["hidden_size"]},
    }
    write(make(own, **parts), folder)
    path = folder / "model.safetensors"
    dense_parts = (*(part for part in DENSE if part != "mlp.gate"), *DENSE_IN_GLM5)
    stored, dense = stored_as(form, load_file(path), dense_parts)
    save_file({n: t.contiguous() for n, t in dense.items()}, path, {"format": "pt"})
    reference: Any = AutoModelForImageTextToText.from_pretrained(
        folder, attn_implementation="eager"
    )
    write_stored(form, stored, folder)
    return reference.float().eval()


#: Parts of DeepSeek V4's names, in published files and in transformers'.
_NAMES_OF_DEEPSEEK = (
    ("model.embed_tokens.", "embed."),
    ("model.hc_head.hc_", "hc_head_"),
    ("model.", ""),
)


#: Names of linear layers that published files of DeepSeek V4 quantize.
_QUANTIZED_IN_DEEPSEEK = re.compile(r"(?<!compressor)\.(wq_[ab]|wkv|wo_[ab]|w[123])\.weight")


def reference_of_deepseek_v4(folder: Path) -> torch.nn.Module:
    """Writes DeepSeek V4 as published; returns transformers' model of its values."""
    write(make(FAMILIES["deepseek_v4"], **SIZES), folder)
    path = folder / "model.safetensors"
    stored, dense = as_deepseek(load_file(path), "deepseek fp8 blocks of 128")
    save_file(dense, path, {"format": "pt"})
    reference: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    for transformers, published in _NAMES_OF_DEEPSEEK:
        stored = {name.replace(transformers, published, 1): t for name, t in stored.items()}
    write_stored("deepseek fp8 blocks of 128", stored, folder)
    change_config(folder, expert_dtype="fp4")
    return reference.float().eval()


def as_deepseek(
    tensors: dict[str, torch.Tensor], form: str, of_tables: str = ""
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Returns tensors of published names as DeepSeek stores them, and their stored values.

    Experts are MXFP4; `form` is that of other linear layers, `of_tables` that of n-gram memory.
    """

    def form_of(name: str, tensor: torch.Tensor) -> str | None:
        if name.endswith(".engram.embed.weight"):
            return of_tables
        if not _QUANTIZED_IN_DEEPSEEK.search(name) or tensor.shape[-1] % 32:
            return None
        return "deepseek mxfp4" if ".experts." in name else form

    return _stored_by(form_of, tensors)


def change_config(folder: Path, **changes: Any) -> None:
    """Sets keys of a folder's config.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def _is_mxfp8(name: str, tensor: torch.Tensor) -> bool:
    return tensor.ndim > 1 and not any(part in name for part in DENSE_IN_HY4)


def _as_mxfp8(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns E4M3 values, and a biased exponent per 32 of them; exact if read back."""
    groups = tensor.unflatten(-1, (-1, 32))
    exponents = torch.ceil(torch.log2(groups.abs().amax(-1) / 448))
    values = (groups / 2 ** exponents[..., None]).to(torch.float8_e4m3fn).flatten(-2)
    return values, (exponents + 127).to(torch.uint8)


def stored_as(
    form: str, tensors: dict[str, torch.Tensor], left_out: tuple[str, ...] = DENSE
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Returns a model's tensors with linear layers in a format, and their stored values."""

    def form_of(name: str, tensor: torch.Tensor) -> str | None:
        has_groups = tensor.ndim == 2 and tensor.shape[1] % 64 == 0
        is_dense = not name.endswith(".weight") or any(part in name for part in left_out)
        return form if has_groups and not is_dense else None

    return _stored_by(form_of, _one_by_one(tensors))


def _stored_by(
    form_of: Callable[[str, torch.Tensor], str | None], tensors: dict[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Returns tensors in the format that `form_of` chooses, None: unchanged; and their values."""
    stored: dict[str, torch.Tensor] = {}
    dense: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if (form := form_of(name, tensor)) is None:
            stored[name] = dense[name] = tensor
            continue
        found = FORMATS[form].store(tensor)
        module = name.removesuffix(".weight")
        stored |= {f"{module}.{part}": each for part, each in found.tensors.items()}
        dense[name] = found.dense.float()
    return stored, dense


def write_stored(form: str, stored: dict[str, torch.Tensor], folder: Path) -> None:
    """Writes tensors in a format into a folder that has a config.json."""
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    change_config(folder, quantization_config=FORMATS[form].quantization)


def _one_by_one(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Splits experts into separate arrays, as in checkpoints from before transformers 5."""
    found = {}
    for name, tensor in tensors.items():
        head, _, last = name.rpartition(".")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(last)
        if parts is None or tensor.ndim != 3:
            found[name] = tensor
            continue
        for index, expert in enumerate(tensor):
            for part, rows in zip(parts, expert.chunk(len(parts)), strict=True):
                found[f"{head}.{index}.{part}.weight"] = rows
    return found


def log_probs(model: Any) -> np.ndarray:
    """Returns [length, V] of PROMPT, by an mlx-lm model."""
    logits = model(mx.array([PROMPT]))[0].astype(mx.float32)
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
