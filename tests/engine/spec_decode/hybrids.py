# SPDX-License-Identifier: Apache-2.0
"""Small hybrids with an MTP layer, as in published checkpoints, and the layer's formula."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from engine.spec_decode.heads import random_arrays
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.models import qwen3_5, qwen3_5_moe, qwen3_next
from mlx_lm.utils import load_model

HEADS, KV_HEADS, HEAD_SIZE, ROTARY, THETA, EPS = 2, 1, 32, 8, 10000.0, 1e-6
EXPERTS, CHOSEN, WIDTH = 4, 2, 32
_COMMON = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_SIZE,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 1,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "rms_norm_eps": EPS,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
_MOE = {
    "num_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN,
    "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": WIDTH,
    "moe_intermediate_size": WIDTH,
    "norm_topk_prob": True,
}
_LAYERS = ["linear_attention"] * 3 + ["full_attention"]
_NEXT = (
    _COMMON
    | _MOE
    | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "mlp_only_layers": [],
        "layer_types": _LAYERS,
        "rope_theta": THETA,
        "partial_rotary_factor": ROTARY / HEAD_SIZE,
        "num_nextn_predict_layers": 1,
    }
)
_ROPE = {
    "rope_type": "default",
    "rope_theta": THETA,
    "partial_rotary_factor": ROTARY / HEAD_SIZE,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}
_TEXT = _COMMON | {"rope_parameters": _ROPE, "layer_types": _LAYERS, "mtp_num_hidden_layers": 1}
_DENSE = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "text_config": _TEXT | {"model_type": "qwen3_5_text"},
}
_SPARSE = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "text_config": _TEXT | _MOE | {"model_type": "qwen3_5_moe_text"},
}
FAMILIES = {
    "qwen3_next": (qwen3_next, _NEXT),
    "qwen3_5": (qwen3_5, _DENSE),
    "qwen3_5_moe": (qwen3_5_moe, _SPARSE),
}


def _mlp(name: str, size: int, hidden: int = 64) -> dict[str, tuple[int, ...]]:
    return {
        f"{name}.gate_proj.weight": (size, hidden),
        f"{name}.up_proj.weight": (size, hidden),
        f"{name}.down_proj.weight": (hidden, size),
    }


def mtp_shapes(
    family: str,
    heads: int = HEADS,
    kv_heads: int = KV_HEADS,
    head_size: int = HEAD_SIZE,
    size: int = 64,
    intermediate: int = 96,
) -> dict[str, tuple[int, ...]]:
    """Returns the MTP layer's arrays of the family's checkpoints, for hidden size `size`."""
    layer, both = "mtp.layers.0", heads * head_size
    shapes: dict[str, tuple[int, ...]] = {
        "mtp.fc.weight": (size, 2 * size),
        f"{layer}.self_attn.q_proj.weight": (2 * both, size),  # with a gate for each head
        f"{layer}.self_attn.k_proj.weight": (kv_heads * head_size, size),
        f"{layer}.self_attn.v_proj.weight": (kv_heads * head_size, size),
        f"{layer}.self_attn.o_proj.weight": (size, both),
        f"{layer}.self_attn.q_norm.weight": (head_size,),
        f"{layer}.self_attn.k_norm.weight": (head_size,),
    }
    for name in ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"):
        shapes[f"{name}.weight"] = (size,)
    for name in ("input_layernorm", "post_attention_layernorm"):
        shapes[f"{layer}.{name}.weight"] = (size,)
    if family == "qwen3_5":
        return shapes | _mlp(f"{layer}.mlp", intermediate, size)
    shapes |= _mlp(f"{layer}.mlp.shared_expert", WIDTH)
    shapes |= {
        f"{layer}.mlp.gate.weight": (EXPERTS, 64),
        f"{layer}.mlp.shared_expert_gate.weight": (1, 64),
    }
    if family == "qwen3_5_moe":
        return shapes | {
            f"{layer}.mlp.experts.gate_up_proj": (EXPERTS, 2 * WIDTH, 64),
            f"{layer}.mlp.experts.down_proj": (EXPERTS, 64, WIDTH),
        }
    for expert in range(EXPERTS):
        shapes |= _mlp(f"{layer}.mlp.experts.{expert}", WIDTH)
    return shapes


def write_hybrid(
    folder: Path,
    family: str,
    converted: bool = False,
    guessable: bool = False,
    **changes: Any,
) -> Path:
    """A hybrid of random weights, its MTP layer beside it.

    Args:
        folder: folder to write.
        family: one of FAMILIES.
        converted: whether in mlx-lm's form, with the MTP layer in a file that it does not read.
        guessable: whether the newest token mostly determines the next, and the MTP layer reads it
            alone.
        changes: changes of the text model's configuration.
    """
    module, config = FAMILIES[family]
    text = config.get("text_config", config) | changes
    config = config | ({"text_config": text} if "text_config" in config else text)
    mx.random.seed(1)
    model = module.Model(module.ModelArgs.from_dict(config))

    def varied(name: str, array: mx.array) -> mx.array:
        if "norm" in name:
            return array * (1 + 0.3 * mx.random.normal(array.shape))
        # Large weights, so that logits differ and depend on all the tokens before.
        large = array.ndim == 2 and ("attn" in name or "lm_head" in name)
        array = 2 * array if large else array
        return 0.02 * array if guessable and adds(name) else array

    weights = dict(tree_flatten(tree_map_with_path(varied, model.parameters())))
    sizes = (text[f"num_{kind}_heads"] for kind in ("attention", "key_value"))
    shapes = mtp_shapes(family, *sizes, text["head_dim"])
    mtp = {name: mx.array(a.numpy()) for name, a in random_arrays(shapes).items()}
    if guessable:
        mtp = {name: mx.zeros_like(a) if adds(name) else a for name, a in mtp.items()}
        mtp["mtp.fc.weight"] = mx.concatenate([mx.eye(64), mx.zeros((64, 64))], axis=1)
        mtp["mtp.pre_fc_norm_embedding.weight"] = mx.ones(64)
        mtp["mtp.norm.weight"] = next(
            a for n, a in weights.items() if n.endswith("model.norm.weight")
        )
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if converted:
        files = {"model": weights, "mtp": _converted(family, mtp)}
    else:
        mtp = {name: a - 1 if "norm" in name else a for name, a in mtp.items()}
        files = {"model": _published(family, weights) | mtp}
    origin = {"format": "mlx" if converted else "pt"}
    for name, arrays in files.items():
        mx.save_safetensors(str(folder / f"{name}.safetensors"), arrays, origin)
    return folder


def adds(name: str) -> bool:
    """Returns whether a layer adds this array's output to the hidden states."""
    return any(part in name for part in ("o_proj", "out_proj", "down_proj"))


def _converted(family: str, mtp: dict[str, mx.array]) -> dict[str, mx.array]:
    """Returns the MTP layer's arrays with mlx-lm's names and stacked experts."""
    found, layer = dict(mtp), "mtp.layers.0.mlp"
    stacked = f"{layer}.switch_mlp"
    if family == "qwen3_next":
        for kind in ("gate", "up", "down"):
            names = [f"{layer}.experts.{expert}.{kind}_proj.weight" for expert in range(EXPERTS)]
            found[f"{stacked}.{kind}_proj.weight"] = mx.stack([found.pop(name) for name in names])
        return found
    if family == "qwen3_5_moe":
        gate, up = mx.split(found.pop(f"{layer}.experts.gate_up_proj"), 2, axis=1)
        down = found.pop(f"{layer}.experts.down_proj")
        for kind, array in (("gate", gate), ("up", up), ("down", down)):
            found[f"{stacked}.{kind}_proj.weight"] = array
    return {f"language_model.{name}": array for name, array in found.items()}


def _published(family: str, weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Returns mlx-lm's arrays under the published names, which `sanitize` changes."""
    found: dict[str, mx.array] = {}
    for own, array in weights.items():
        name = own
        if family != "qwen3_next":
            name = name.replace("language_model.model", "model.language_model")
            name = name.replace("language_model.lm_head", "lm_head")
        if name.endswith("conv1d.weight"):
            array = array.moveaxis(2, 1)
        if "norm" in name and "linear_attn" not in name:
            array = array - 1
        if ".switch_mlp." not in name:
            found[name] = array
        elif family == "qwen3_next":
            for expert in range(EXPERTS):
                found[name.replace("switch_mlp", f"experts.{expert}")] = array[expert]
        elif name.endswith("down_proj.weight"):
            found[name.replace("switch_mlp.down_proj.weight", "experts.down_proj")] = array
        elif name.endswith("gate_proj.weight"):
            up = weights[own.replace("gate_proj", "up_proj")]
            fused = mx.concatenate([array, up], axis=1)
            found[name.replace("switch_mlp.gate_proj.weight", "experts.gate_up_proj")] = fused
    return found


class NaiveMTP:
    """The MTP layer on a whole text in float64, from the published checkpoint.

    DeepSeek-AI 2024, arXiv:2412.19437, section 2.2, with the layer of Qwen3-Next: norms weigh by
    1 + w, half of what `q_proj` gives is a gate on the heads' outputs, a quarter of a head turns.
    """

    heads, kv_heads, head_size, rotary = HEADS, KV_HEADS, HEAD_SIZE, ROTARY

    def __init__(self, folder: Path, mtp: dict[str, np.ndarray] | None = None) -> None:
        """
        Args:
            folder: folder of the checkpoint.
            mtp: other arrays of the layer, under the checkpoint's names; None: those of `folder`.
        """
        self._model, _ = load_model(folder)
        self.read(folder, mtp)

    def read(self, folder: Path, mtp: dict[str, np.ndarray] | None = None) -> None:
        """Reads the layer's arrays, the embedding and the head of a checkpoint."""
        arrays = mx.load(str(folder / "model.safetensors"))
        self._mtp = mtp or {n: np.array(a, np.float64) for n, a in arrays.items() if "mtp." in n}
        self._embedding = self._find(arrays, "embed_tokens.weight")
        self.lm_head = self._find(arrays, "lm_head.weight")

    @staticmethod
    def _find(arrays: dict[str, mx.array], end: str) -> np.ndarray:
        return np.array(next(a for name, a in arrays.items() if name.endswith(end)), np.float64)

    def __call__(self, text: list[int], drafts: list[int]) -> np.ndarray:
        """Returns the layer's [len(drafts), V] logits at each draft's place."""
        hidden = np.array(self._model.model(mx.array([text])), np.float64)[0, :-1]
        found = []
        for index in range(len(drafts)):
            embeds = self._embedding[np.array([*text[1:], *drafts[:index]])]
            out = self.layer(embeds, hidden, self._angles(len(hidden)))
            found.append(self.lm_head @ out[-1])
            hidden = np.concatenate([hidden, out[-1:]])
        return np.stack(found)

    def _angles(self, count: int) -> np.ndarray:
        """Returns [T, rotary / 2] angles of positions (Su et al. 2021, arXiv:2104.09864)."""
        half = self.rotary // 2
        return np.arange(count)[:, None] * THETA ** (-np.arange(half) / half)

    def layer(self, embeds: np.ndarray, hidden: np.ndarray, angles: np.ndarray) -> np.ndarray:
        """Maps [T, H] embeddings and hidden states, and [T, rotary / 2] angles, to [T, H]."""
        embeds = self._norm(embeds, "pre_fc_norm_embedding")
        rows = np.concatenate([embeds, self._norm(hidden, "pre_fc_norm_hidden")], axis=-1)
        rows = self._linear(rows, "fc")
        rows = rows + self._attention(self._norm(rows, "layers.0.input_layernorm"), angles)
        rows = rows + self._experts(self._norm(rows, "layers.0.post_attention_layernorm"))
        return self._norm(rows, "norm")

    def _norm(self, rows: np.ndarray, name: str) -> np.ndarray:
        size = np.sqrt((rows**2).mean(-1, keepdims=True) + EPS)
        return rows / size * (1 + self._mtp[f"mtp.{name}.weight"])

    def _linear(self, rows: np.ndarray, name: str) -> np.ndarray:
        return rows @ self._mtp[f"mtp.{name}.weight"].T

    def _attention(self, rows: np.ndarray, angles: np.ndarray) -> np.ndarray:
        name, num_rows, size = "layers.0.self_attn", len(rows), self.head_size
        both = self._linear(rows, f"{name}.q_proj").reshape(num_rows, self.heads, 2, size)
        queries = self._turned(self._norm(both[:, :, 0], f"{name}.q_norm"), angles)
        shape = num_rows, self.kv_heads, size
        keys = self._linear(rows, f"{name}.k_proj").reshape(shape)
        keys = self._turned(self._norm(keys, f"{name}.k_norm"), angles)
        values = self._linear(rows, f"{name}.v_proj").reshape(shape)
        scores = np.einsum("qhd,kd->hqk", queries, keys[:, 0]) / np.sqrt(size)
        scores = np.where(np.tri(num_rows, dtype=bool), scores, -np.inf)
        weights = _softmax(scores)
        out = np.einsum("hqk,kd->qhd", weights, values[:, 0]) * _sigmoid(both[:, :, 1])
        return self._linear(out.reshape(num_rows, -1), f"{name}.o_proj")

    def _turned(self, heads: np.ndarray, angles: np.ndarray) -> np.ndarray:
        """Rotates the first elements of heads by [T, rotary / 2] angles."""
        half = self.rotary // 2
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        first, second, rest = np.split(heads, [half, 2 * half], axis=-1)
        turned = [first * cos - second * sin, second * cos + first * sin, rest]
        return np.concatenate(turned, axis=-1)

    def _experts(self, rows: np.ndarray) -> np.ndarray:
        name = "layers.0.mlp"
        if f"mtp.{name}.gate.weight" not in self._mtp:
            return self._swiglu(rows, *self._parts(f"{name}."))
        chances = _softmax(self._linear(rows, f"{name}.gate"))
        kept = np.where(chances >= np.sort(chances)[:, -CHOSEN, None], chances, 0)
        kept = kept / kept.sum(-1, keepdims=True)
        gate = _sigmoid(self._linear(rows, f"{name}.shared_expert_gate"))
        out = gate * self._swiglu(rows, *self._parts(f"{name}.shared_expert."))
        for expert in range(EXPERTS):
            fused = self._mtp.get(f"mtp.{name}.experts.gate_up_proj")
            if fused is None:
                parts = self._parts(f"{name}.experts.{expert}.")
            else:
                down = self._mtp[f"mtp.{name}.experts.down_proj"]
                parts = fused[expert, :WIDTH], fused[expert, WIDTH:], down[expert]
            out = out + kept[:, expert, None] * self._swiglu(rows, *parts)
        return out

    def _parts(self, name: str) -> list[np.ndarray]:
        return [self._mtp[f"mtp.{name}{kind}_proj.weight"] for kind in ("gate", "up", "down")]

    @staticmethod
    def _swiglu(rows: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
        opened = rows @ gate.T
        return (opened * _sigmoid(opened) * (rows @ up.T)) @ down.T


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _softmax(x: np.ndarray) -> np.ndarray:
    raised = np.exp(x - x.max(-1, keepdims=True))
    return raised / raised.sum(-1, keepdims=True)
