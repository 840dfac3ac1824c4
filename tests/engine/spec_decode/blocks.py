# SPDX-License-Identifier: Apache-2.0
"""Random block drafters, and vLLM's own torch classes as reference."""

from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from engine.spec_decode.heads import HIDDEN, VOCAB, DenseTarget, K, one_process
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding.common import ApplyRotaryEmb
from vllm.model_executor.models.qwen3_dflash import _dflash_layer_causal

from vllm_metal.engine.models import loader

MASK, TAPS = VOCAB - 1, [0, 3, 7]
LAYERS, HEADS, KV_HEADS, SIZE, RANK = 2, 4, 2, 16, 8
CONFIG = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": SIZE,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "block_size": 8,
    "tie_word_embeddings": False,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": TAPS},
}


def shapes(
    num_layers=LAYERS,
    sinks=False,
    bias=False,
    conv=None,
    heads=(HEADS, KV_HEADS),
    size=SIZE,
    num_taps=3,
    hidden=HIDDEN,
):
    """Returns the names and shapes of a drafter's arrays."""
    queries, kept = (count * size for count in heads)
    found = {
        "fc.weight": (hidden, num_taps * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for layer in range(num_layers):
        attention = f"layers.{layer}.self_attn"
        widths = {"q": queries, "k": kept, "v": kept}
        found |= {f"{attention}.{kind}_proj.weight": (n, hidden) for kind, n in widths.items()}
        found |= {f"{attention}.{kind}_norm.weight": (size,) for kind in "qk"}
        found[f"{attention}.o_proj.weight"] = (hidden, queries)
        if bias:
            found |= {f"{attention}.{kind}_proj.bias": (n,) for kind, n in widths.items()}
            found[f"{attention}.o_proj.bias"] = (hidden,)
        if sinks:
            found[f"{attention}.attention_sink_bias"] = (heads[0],)
        for part, shape in (("gate", (96, hidden)), ("up", (96, hidden)), ("down", (hidden, 96))):
            found[f"layers.{layer}.mlp.{part}_proj.weight"] = shape
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"layers.{layer}.{norm}.weight"] = (hidden,)
        if conv is not None:
            taps, group = conv
            for part in ("attention_conv", "mlp_conv"):
                name = f"layers.{layer}.{part}"
                found[f"{name}.base_kernel"] = (2, taps, hidden)
                found[f"{name}.kernel_projection.weight"] = (2 * taps * hidden // group, hidden)
    return found


def laguna_shapes(**options):
    """Returns those of a published Laguna drafter."""
    found = {f"aux_hidden_norms.{tap}.weight": (HIDDEN,) for tap in range(len(TAPS))}
    for name, shape in shapes(**options).items():
        layer, _, part = name.partition("self_attn.")
        if part.startswith(("q_proj", "k_proj", "v_proj")):
            found[f"{layer}self_attn.qkv_proj.weight"] = ((HEADS + 2 * KV_HEADS) * SIZE, HIDDEN)
            found[f"{layer}self_attn.g_proj.weight"] = (HEADS, HIDDEN)
        else:
            found[name] = shape
    return found


def gemma4_shapes():
    """Returns those of a Gemma 4 DSpark drafter, whose one head has keys that are also values."""
    found = shapes(heads=(HEADS, 1), size=2 * SIZE)
    found = {name: shape for name, shape in found.items() if ".v_proj." not in name}
    for layer in range(LAYERS):
        for norm in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
            found[f"layers.{layer}.{norm}.weight"] = (HIDDEN,)
        found[f"layers.{layer}.layer_scalar"] = (1,)
    return found | {f"{end}.weight": (VOCAB, HIDDEN) for end in ("embed_tokens", "lm_head")}


class NaiveAttention(nn.Module):
    """Replaces vLLM's, which needs a cache: one context, and a block behind it."""

    def __init__(
        self,
        num_heads,
        head_size,
        scale,
        num_kv_heads,
        per_layer_sliding_window=None,
        sinks=None,
        **_,
    ):
        super().__init__()
        self.window, self.sinks = per_layer_sliding_window or 10**6, sinks
        self.size, self.scale, self.repeats = head_size, scale, num_heads // num_kv_heads
        self.causal, self.layer_name = True, "layer"
        self.kv_cache = None

    @property
    def impl(self):
        return self

    def do_kv_cache_update(self, layer, keys, values, kv_cache, slots):
        self.context = keys.clone(), values.clone()

    def forward(self, queries, keys, values):
        num_rows = len(queries)
        rows = [x.view(num_rows, -1, self.size) for x in (keys, values)]
        whole = [torch.cat(pair) for pair in zip(self.context, rows, strict=True)]
        keys, values = (x.transpose(0, 1).repeat_interleave(self.repeats, 0) for x in whole)
        queries = queries.view(num_rows, -1, self.size).transpose(0, 1)
        scores = queries @ keys.transpose(1, 2) * self.scale
        length = keys.shape[1]
        ago = torch.arange(length - num_rows, length)[:, None] - torch.arange(length)
        hidden = ago >= self.window
        if self.causal:
            hidden |= ago < 0
        scores = scores.masked_fill(hidden, -1e30)
        if self.sinks is not None:
            sinks = self.sinks[:, None, None].expand(-1, num_rows, 1)
            weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        return (weights @ values).transpose(0, 1).reshape(num_rows, -1)


def _rms_norm(out, x, weight, eps):
    if weight.ndim == 2:  # of each layer
        weight = weight.view(len(weight), *[1] * (x.ndim - 2), -1)
    out.copy_(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight)


def _rotate(positions, rows, _, size, cos_sin, is_neox):
    cos, sin = cos_sin[positions].chunk(2, dim=-1)
    heads, turned = rows.view(len(rows), -1, size), cos_sin.shape[-1]
    found = ApplyRotaryEmb.forward_static(heads[..., :turned], cos, sin, is_neox)
    rows.copy_(torch.cat([found, heads[..., turned:]], dim=-1).flatten(1))


@contextmanager
def vllms():
    """Lets vLLM's classes run in this process, without their kernels."""
    models = "vllm.model_executor.models"
    module = f"{models}.qwen3_dflash"
    with ExitStack() as stack:
        stack.enter_context(one_process())
        for name in ("qwen3_dflash", "laguna", "gemma4_mtp"):
            stack.enter_context(mock.patch(f"{models}.{name}.Attention", NaiveAttention))
        stack.enter_context(mock.patch(f"{module}.ops.rms_norm", _rms_norm))
        stack.enter_context(mock.patch(f"{module}.ops.rotary_embedding", _rotate))
        stack.enter_context(mock.patch.object(VllmConfig, "use_v2_model_runner", True))
        yield


class Judge:
    """Runs vLLM's drafter on a whole text at once."""

    taps = TAPS

    def __init__(self, config, target, family):
        """
        Args:
            config: configuration of an engine with the drafter.
            target: folder of the model, or what gives its states as DenseTarget does.
            family: vLLM's class.
        """
        self.config = config
        self.target = DenseTarget(target) if isinstance(target, Path) else target
        weights = loader.load_weights(config.speculative_config.draft_model_config, config)
        weights = {name: torch.tensor(np.array(array)) for name, array in weights.items()}
        with vllms(), set_current_vllm_config(config), torch.no_grad():
            self.module = family(vllm_config=config)
            self.module.load_weights(weights.items())
        embedding, lm_head = self.target.ends
        if "embed_tokens.weight" not in weights:
            self.module.model.embed_tokens.weight.data[: len(embedding)] = embedding
        if "lm_head.weight" not in weights:
            self.module.lm_head.weight.data[: len(lm_head)] = lm_head
        for index, layer in enumerate(self.module.model.layers):
            layer.self_attn.attn.causal = _dflash_layer_causal(self.module.config, index)
        self.from_anchor = getattr(self.module.config, "sample_from_anchor", None)
        if self.from_anchor is None:
            self.from_anchor = config.speculative_config.method == "dspark"
        given = self.module.config
        nested = getattr(given, "dflash_config", None) or {}
        self.mask = nested.get("mask_token_id", getattr(given, "mask_token_id", None))
        self.num_drafts = config.speculative_config.num_speculative_tokens

    @torch.no_grad()
    def block(self, text):
        """Returns [L, H] states of the block behind a text, and each layer's context K and V."""
        states = self.target.states(text[:-1])
        taps = torch.cat([states[layer + 1] for layer in self.taps], dim=-1)
        count, length = len(taps), self.num_drafts + (0 if self.from_anchor else 1)
        with vllms(), set_current_vllm_config(self.config):
            context = self.module.combine_hidden_states(taps)
            layers = [0] * len(self.module.model.layers)
            self.module.precompute_and_store_context_kv(context, torch.arange(count), layers)
            ids = torch.tensor([text[-1]] + [self.mask] * (length - 1))
            hidden = self.module(ids, torch.arange(count, count + length))
        caches = [layer.self_attn.attn.context for layer in self.module.model.layers]
        return hidden, caches

    def drafting(self, hidden):
        """Returns the [K, H] rows that draft, from [L, H]."""
        return hidden if self.from_anchor else hidden[1:]

    @torch.no_grad()
    def __call__(self, text, drafts):
        """Returns the [len(drafts), V] logits at each draft's place, given earlier drafts."""
        hidden = self.drafting(self.block(text)[0])
        with vllms(), set_current_vllm_config(self.config):
            return self.scores(text, hidden, drafts)[: len(drafts)].numpy()

    def scores(self, text, hidden, drafts):
        return self.module.compute_logits(hidden)


class SelectorJudge(Judge):
    def scores(self, text, hidden, drafts):
        ids, unary = self.module.compute_candidates(hidden)
        selector = self.module.model.candidate_selector
        anchor = torch.tensor([text[-1]])
        pairs = selector(ids[None], unary[None], hidden[None], anchor)[0]  # [K, before, C]
        found = torch.full((K, VOCAB), -1e9)
        for place, before in enumerate([None, *drafts[: K - 1]]):
            row = 0 if before is None else ids[place - 1].tolist().index(before)
            found[place, ids[place]] = pairs[place, row]
        return found


class MarkovJudge(Judge):
    def scores(self, text, hidden, drafts):
        logits = self.module.compute_draft_logits(hidden)
        shown = torch.arange(logits.shape[-1])
        if (d2t := self.module.draft_id_to_target_id) is not None:
            shown = shown + d2t
        top_k = getattr(self.module.config, "dspark_draft_topk", None)
        found = torch.full((K, VOCAB), -1e9)
        for place, before in enumerate([text[-1], *drafts[: K - 1]]):
            bias = self.module.markov_bias(self.module.markov_embed(torch.tensor([before])))[0]
            row = logits[place] + bias[: logits.shape[-1]]
            if top_k is not None:
                kept = logits[place].topk(top_k).indices
                row = torch.full_like(row, -1e9).scatter(0, kept, row[kept])
            found[place, shown] = row
        return found
