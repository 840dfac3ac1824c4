# SPDX-License-Identifier: Apache-2.0
"""Small Inkling models with MTP layers, and vLLM's torch class as reference."""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np
import torch
from engine.models.of_mlx_vlm import INKLING
from engine.models.recurrent import Family, config_of, make_model
from engine.spec_decode.heads import VOCAB, one_process, random_arrays
from mlx.utils import tree_flatten
from torch.nn.functional import silu
from vllm.config import set_current_vllm_config
from vllm.models.inkling.nvidia import attention, layernorm, model, mtp, ops, short_conv

from vllm_metal.engine.models.loader import lazy_model

HIDDEN, TAPS, PADDED = INKLING["hidden_size"], 4, VOCAB + 8
#: Windows, distances with a bias and scores that change within the tests' texts; the head and the
#: embedding have rows of padding.
TEXT = INKLING | {
    "model_type": "inkling_model",
    "vocab_size": PADDED,
    "unpadded_vocab_size": VOCAB,
    "sliding_window_size": 11,
    "rel_extent": 19,
    "dense_intermediate_size": 56,
    "intermediate_size": 24,
    "sconv_kernel_size": TAPS,
    "use_embed_norm": True,
    "use_global_scale": True,
    "use_sconv": True,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
}
#: vLLM's processor of images and its renderer of chats need a tokenizer.
TEXT_ALONE = {"tokenizer_mode": "hf", "language_model_only": True}
_LARGE, _ADDS = (".attn.w", "sconv", "rel_logits"), ("wo_ud.weight", "w2_md.weight")
#: Hidden states of planted layers: an embedding, its copy, and a constant.
WIDTH = 19
OWN, COPY, ONE = slice(WIDTH), slice(WIDTH, 2 * WIDTH), 2 * WIDTH
NOISE = 0.2


def mtp_shapes(
    count: int, local: Sequence[int], chained: bool, text: Mapping[str, Any] = TEXT
) -> dict[str, tuple[int, ...]]:
    """Returns the arrays of MTP layers, as in checkpoints."""
    shapes = {"model.mtp.chain_norm.weight": (HIDDEN,)} if chained else {}
    for index in range(count):
        layer = f"model.mtp.layers.{index}"
        block, prefix = f"{layer}.transformer_block", "swa_" if index in local else ""
        heads, kv_heads, size = (
            text[f"{prefix}{key}"]
            for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
        extent = text["sliding_window_size" if index in local else "rel_extent"]
        width, relative = text["dense_intermediate_size"], text["d_rel"]
        shapes |= {f"{layer}.{kind}_norm.weight": (HIDDEN,) for kind in ("embed", "hidden")}
        shapes |= {f"{block}.{kind}_norm.weight": (HIDDEN,) for kind in ("attn", "mlp")}
        shapes |= {f"{block}.attn.{kind}_norm.weight": (size,) for kind in "qk"}
        shapes |= {f"{block}.{kind}_sconv.weight": (HIDDEN, 1, TAPS) for kind in ("attn", "mlp")}
        shapes |= {f"{block}.attn.{kind}_sconv.weight": (kv_heads * size, 1, TAPS) for kind in "kv"}
        shapes |= {
            f"{layer}.input_proj.weight": (HIDDEN, 2 * HIDDEN),
            f"{block}.attn.wq_du.weight": (heads * size, HIDDEN),
            f"{block}.attn.wk_dv.weight": (kv_heads * size, HIDDEN),
            f"{block}.attn.wv_dv.weight": (kv_heads * size, HIDDEN),
            f"{block}.attn.wr_du.weight": (heads * relative, HIDDEN),
            f"{block}.attn.wo_ud.weight": (HIDDEN, heads * size),
            f"{block}.attn.rel_logits_proj.proj": (relative, extent),
            f"{block}.mlp.w13_dn.weight": (2 * width, HIDDEN),
            f"{block}.mlp.w2_md.weight": (HIDDEN, width),
            f"{block}.mlp.global_scale": (1,),
        }
    return shapes


def write_inkling(
    folder: Path,
    count: int = 4,
    local: tuple[int, ...] = (0,),
    chained: bool = False,
    planted: bool = False,
    changes: Mapping[str, Any] = MappingProxyType({}),
    **keys,
) -> Path:
    """Writes a model of random weights, with MTP layers beside it.

    Args:
        folder: folder to write.
        count: number of MTP layers.
        local: those with a window.
        chained: whether a norm follows each of them.
        planted: whether texts mostly repeat with period TAPS, as a convolution of the first layer
            and of each MTP layer knows; see `_planted`.
        changes: of the text's keys.
        keys: further keys of `mtp_config`.
    """
    text = {**TEXT, **changes}
    family = Family("inkling_mm_model", "InklingForConditionalGeneration", {"text_config": text})
    target = dict(tree_flatten(make_model(family, seed=7, drawn=True).parameters()))
    arrays = mtp_arrays(mtp_shapes(count, local, chained, text))
    if planted:
        target |= _planted_target(target)
        arrays |= {
            name: array for index in range(count) for name, array in _planted(arrays, index).items()
        }
    folder.mkdir(parents=True)
    stated = {
        "num_nextn_predict_layers": count,
        "local_layer_ids": list(local),
        "chain_hidden_post_norm": chained,
    }
    content = config_of(family) | {"mtp_config": stated | keys}
    (folder / "config.json").write_text(json.dumps(content))
    mx.save_safetensors(str(folder / "model.safetensors"), target, {"format": "mlx"})
    mx.save_safetensors(str(folder / "mtp.safetensors"), arrays, {"format": "pt"})
    return folder


def mtp_arrays(shapes: dict[str, tuple[int, ...]]) -> dict[str, mx.array]:
    """Returns random weights, so large that drafts depend on single positions.

    The layers' outputs are of order one.
    """
    arrays = {name: mx.array(tensor.numpy()) for name, tensor in random_arrays(shapes).items()}
    for name in arrays:
        arrays[name] *= 3 if any(part in name for part in _LARGE) else 1
        arrays[name] *= 0.1 if name.endswith(_ADDS) else 1
        if name.endswith("global_scale"):
            arrays[name] = mx.array([0.8])
    return arrays


def _attention(heads: int, kv_heads: int, relative: int, size: int = 16) -> dict[str, np.ndarray]:
    """Projections of attention to the own position alone, which copies the values."""
    values = np.zeros((kv_heads * size, HIDDEN))
    values[:WIDTH, OWN] = np.eye(WIDTH)
    out = np.zeros((HIDDEN, heads, size))
    for place in range(WIDTH):  # by the first of the heads that share K and V
        out[COPY][place, place // size * (heads // kv_heads), place % size] = 1
    biased = np.zeros((heads, relative, HIDDEN))
    biased[:, 0, ONE] = 100
    return {
        "q": np.zeros((heads * size, HIDDEN)),
        "k": np.zeros((kv_heads * size, HIDDEN)),
        "v": values,
        "r": biased.reshape(-1, HIDDEN),
        "o": out.reshape(HIDDEN, -1),
    }


def _near(relative: int, extent: int) -> np.ndarray:
    found = np.zeros((relative, extent))
    found[0, 0] = 1
    return found


def _oldest(channels: int) -> np.ndarray:
    """[channels, TAPS] weights that replace a convolution's input by the oldest one."""
    return np.tile([1.0, *[0.0] * (TAPS - 2), -1.0], (channels, 1))


def _planted(arrays: dict[str, mx.array], index: int) -> dict[str, mx.array]:
    """An MTP layer that drafts the token TAPS before the next one."""
    layer = f"model.mtp.layers.{index}"
    attn = f"{layer}.transformer_block.attn"
    relative, extent = arrays[f"{attn}.rel_logits_proj.proj"].shape
    kv_heads, heads = (len(arrays[f"{attn}.w{kind}.weight"]) // 16 for kind in ("k_dv", "q_du"))
    parts = _attention(heads, kv_heads, relative)
    names = {"q": "wq_du", "k": "wk_dv", "v": "wv_dv", "r": "wr_du", "o": "wo_ud"}
    found = {f"{attn}.{names[kind]}.weight": part for kind, part in parts.items()}
    found |= {
        f"{layer}.input_proj.weight": np.concatenate(
            [np.zeros((HIDDEN, HIDDEN)), np.eye(HIDDEN)], axis=1
        ),
        f"{layer}.embed_norm.weight": np.ones(HIDDEN),
        f"{layer}.transformer_block.attn_norm.weight": np.ones(HIDDEN),
        f"{layer}.transformer_block.attn_sconv.weight": np.zeros((HIDDEN, 1, TAPS)),
        f"{attn}.rel_logits_proj.proj": _near(relative, extent),
        f"{attn}.v_sconv.weight": _oldest(kv_heads * 16)[:, None],
        f"{layer}.transformer_block.mlp.w2_md.weight": np.zeros(
            arrays[f"{layer}.transformer_block.mlp.w2_md.weight"].shape
        ),
    }
    return {name: mx.array(array.astype(np.float32)) for name, array in found.items()}


def _planted_target(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """A first layer that does the same, and others that add noise."""
    rng, layer = np.random.default_rng(3), "language_model.model.layers.0"
    vectors = rng.standard_normal((PADDED, WIDTH))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    embedding, head = np.zeros((2, PADDED, HIDDEN))
    embedding[:, OWN], embedding[:, ONE], head[:, COPY] = vectors, 1, 8 * vectors
    parts = _attention(4, 4, TEXT["d_rel"])
    attn, model = f"{layer}.self_attn", "language_model.model"
    found = {
        name: np.array(array) * NOISE
        for name, array in weights.items()
        if name.endswith(("o_proj.weight", "down_proj.weight"))
    }
    found |= {
        f"{model}.embed_tokens.weight": embedding,
        f"{model}.embed_norm.weight": np.ones(HIDDEN),
        f"{model}.norm.weight": np.ones(HIDDEN),
        "language_model.lm_head.weight": head,
        f"{layer}.input_layernorm.weight": np.ones(HIDDEN),
        f"{layer}.attn_sconv.conv.weight": np.zeros((HIDDEN, TAPS, 1)),
        f"{attn}.qkvr_proj.weight": np.concatenate([parts[kind] for kind in "qkvr"]),
        f"{attn}.o_proj.weight": parts["o"],
        f"{attn}.rel_proj": _near(TEXT["d_rel"], TEXT["sliding_window_size"]),
        f"{attn}.v_sconv.conv.weight": _oldest(64)[..., None],
    }
    return {name: mx.array(array.astype(np.float32)) for name, array in found.items()}


def read(folder: Path) -> dict[str, torch.Tensor]:
    """Returns the arrays of the MTP layers, and the target's norm of embeddings."""
    arrays = mx.load(str(folder / "mtp.safetensors"))
    target = mx.load(str(folder / "model.safetensors"))
    (norm,) = (array for name, array in target.items() if name.endswith("embed_norm.weight"))
    arrays["model.llm.embed_norm.weight"] = norm
    return {name: torch.tensor(np.array(array)) for name, array in arrays.items()}


def normed(rows, weight, eps):
    scale = torch.rsqrt((rows * rows).mean(-1, keepdim=True) + eps)
    return rows * scale * weight


def add_and_norm(rows, more, weight, eps):
    return normed(rows + more, weight, eps), rows + more


def embed(input_ids, table, weight, eps):
    return normed(table[input_ids], weight, eps)


def both_normed(
    hidden, of_hidden, of_embeds, eps, embeds=None, input_ids=None, embed_table=None,
    pre_norm_weight=None,
):  # fmt: skip
    if embeds is None:
        embeds = embed(input_ids, embed_table, pre_norm_weight, eps)
    return torch.cat([normed(hidden, of_hidden, eps), normed(embeds, of_embeds, eps)], dim=-1)


def interleaved(rows):
    return silu(rows[:, ::2]) * rows[:, 1::2]


def convolve(self, rows, positions=None):
    """Convolves a whole text, and adds the inputs."""
    before = torch.cat([torch.zeros(TAPS - 1, rows.shape[1]), rows])
    weight = self.weight[:, 0]
    return rows + sum(before[tap : tap + len(rows)] * weight[:, tap] for tap in range(TAPS))


def attend(self, positions, rows, log_scaling=None):
    """Attends within a whole text."""
    assert log_scaling is None  # the target alone has it
    size, heads, kv_heads, count = self.head_dim, self.num_heads, self.num_kv_heads, len(rows)
    sizes = (heads * size, kv_heads * size, kv_heads * size, heads * self.d_rel)
    (found, _) = self.qkvr(rows)
    queries, keys, values, relative = found.split(sizes, dim=-1)
    keys, values = convolve(self.k_sconv, keys), convolve(self.v_sconv, values)
    queries = self.q_norm(queries.view(count, heads, size)).transpose(0, 1)
    keys = self.k_norm(keys.view(count, kv_heads, size)).transpose(0, 1)
    keys, values = (
        each.repeat_interleave(heads // kv_heads, 0)
        for each in (keys, values.view(count, kv_heads, size).transpose(0, 1))
    )
    bias = self.rel_logits_proj(relative.view(count, heads, -1)).transpose(0, 1)
    ago = torch.arange(count)[:, None] - torch.arange(count)
    extent = bias.shape[-1]
    near = bias.gather(-1, ago.clamp(0, extent - 1).expand(heads, -1, -1))
    scores = queries @ keys.transpose(1, 2) * self.scaling + near * (ago < extent)
    hidden = (ago < 0) | (ago >= (self.local_extent or count + 1))
    scores = scores.masked_fill(hidden, -1e30)
    out = (scores.softmax(-1) @ values).transpose(0, 1).reshape(count, -1)
    return self.wo_ud(out)[0]


def conv_state(prefix, **_):
    return SimpleNamespace(prefix=prefix, kv_cache=torch.zeros(0), stream_ranges=((0, 0),) * 4)


@contextmanager
def of_torch(config):
    """Replaces the parts of vLLM's class that need a GPU by formulas over whole texts."""
    replaced = {
        "add_rmsnorm": (model, add_and_norm),
        "InklingConvState": (model, conv_state),
        "get_forward_context": (model, lambda: SimpleNamespace(attn_metadata=None)),
        "get_lamport_rs_conv": (model, lambda *_: None),
        "tensor_model_parallel_reduce_scatter": (model, lambda rows, dim: rows),
        "tensor_model_parallel_all_gather": (model, lambda rows, dim: rows),
        "rmsnorm": (layernorm, normed),
        "embed_dual_rmsnorm_cat": (mtp, both_normed),
        "silu_and_mul_triton": (ops, interleaved),
    }
    with ExitStack() as stack:
        stack.enter_context(one_process())
        stack.enter_context(set_current_vllm_config(config))
        stack.enter_context(torch.no_grad())
        for name, (module, other) in replaced.items():
            stack.enter_context(mock.patch.object(module, name, other))
        stack.enter_context(mock.patch.object(attention.InklingAttention, "forward", attend))
        stack.enter_context(mock.patch.object(short_conv.InklingShortConv, "forward", convolve))
        yield


def module_of(config, folder: Path, embedding: torch.Tensor, head: torch.Tensor):
    """Returns vLLM's class with a checkpoint's MTP layers, and the target's [V, H] ends."""
    with of_torch(config):
        module = mtp.InklingMTP(vllm_config=config)
        loaded = module.load_weights(read(folder).items())
    assert loaded == {name for name, _ in module.named_parameters()}
    module.model.embed_tokens = SimpleNamespace(weight=embedding)
    module.lm_head = SimpleNamespace(weight=head)
    module.logits_processor._gather_logits = lambda logits: logits
    return module


class Judge:
    """Runs vLLM's class of the MTP layers on a whole text at once."""

    def __init__(self, config, folder: Path) -> None:
        self.config = config
        self.target = lazy_model(folder, mx.float32).language_model
        ends = self.target.model.embed_tokens.weight, self.target.lm_head.weight
        self.module = module_of(config, folder, *(torch.tensor(np.array(each)) for each in ends))

    def hidden(self, text: list[int], drafts: list[int]) -> torch.Tensor:
        """Returns each layer's [len(drafts), H] output at its draft's place.

        As in vLLM's MultiModuleMTPSpeculator, layer i reads the tokens i places further.
        """
        hidden = torch.tensor(np.array(self.target.model(mx.array([text]))[0]))[:-1]
        found, positions = [], torch.arange(len(hidden))
        with of_torch(self.config):
            for index in range(len(drafts)):
                tokens = torch.tensor([*text, *drafts][1 + index : 1 + index + len(hidden)])
                hidden = self.module(tokens, positions, hidden, spec_step_idx=index)
                found.append(hidden[-1])
        return torch.stack(found)

    def __call__(self, text: list[int], drafts: list[int]) -> np.ndarray:
        """Returns the layers' [len(drafts), V] logits at each draft's place."""
        hidden = self.hidden(text, drafts)
        with of_torch(self.config):
            return self.module.compute_logits(hidden).numpy()
