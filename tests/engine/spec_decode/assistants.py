# SPDX-License-Identifier: Apache-2.0
"""Small Gemma 4 models with random assistants, and vLLM's own torch class as reference."""

from contextlib import contextmanager
from unittest import mock

import mlx.core as mx
import numpy as np
import torch
from engine.spec_decode.heads import CONFIG as LLAMA
from engine.spec_decode.heads import (
    HIDDEN,
    VOCAB,
    Gemma4Target,
    one_process,
    write_head,
    write_target,
)
from mlx_lm.models.cache import KVCache
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.models.gemma4_mtp import Gemma4MTP

from vllm_metal.engine.models import loader

WIDTH, HEADS, WINDOW = 32, 4, 24  # of the assistant; the window is the target's, too
KINDS = (["sliding_attention"] * 3 + ["full_attention"]) * 2
ROPES = {
    "full_attention": {
        "rope_type": "proportional",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
}
_TEXT = {
    "model_type": "gemma4_text",
    "head_dim": 16,
    "global_head_dim": 32,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "use_double_wide_mlp": False,
    "enable_moe_block": False,
    "sliding_window": WINDOW,
    "rope_parameters": ROPES,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "vocab_size": VOCAB,
    "tie_word_embeddings": True,
}
#: A small Gemma 4 31B: windows on all but every fourth layer, which has larger heads.
TARGET = (
    LLAMA
    | _TEXT
    | {
        "architectures": ["Gemma4ForCausalLM"],
        "num_kv_shared_layers": 0,
        "layer_types": KINDS,
    }
)
#: A small Gemma 4 E4B: its last layers read K/V of earlier ones.
SHARING = TARGET | {
    "num_kv_shared_layers": 4,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCAB,
    "attention_k_eq_v": False,
    "num_global_key_value_heads": None,
}
CONFIG = {
    "architectures": ["Gemma4AssistantForCausalLM"],
    "model_type": "gemma4_assistant",
    "backbone_hidden_size": HIDDEN,
    "use_ordered_embeddings": False,
    "num_centroids": 16,
    "centroid_intermediate_top_k": 4,
    "tie_word_embeddings": True,
    "text_config": _TEXT
    | {
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_attention_heads": HEADS,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 4,
        "vocab_size_per_layer_input": 0,
        "layer_types": KINDS[:4],
    },
}


def shapes(clusters=0, tied=True, vocab=VOCAB, heads=HEADS, size=16, hidden=HIDDEN):
    """Returns the names and shapes of an assistant's arrays."""
    found = {
        "model.embed_tokens.weight": (vocab, WIDTH),
        "model.norm.weight": (WIDTH,),
        "pre_projection.weight": (WIDTH, 2 * hidden),
        "post_projection.weight": (hidden, WIDTH),
    }
    for index, kind in enumerate(KINDS[:4]):
        layer = f"model.layers.{index}"
        of_head = size if kind == "sliding_attention" else 2 * size
        found[f"{layer}.self_attn.q_proj.weight"] = (heads * of_head, WIDTH)
        found[f"{layer}.self_attn.o_proj.weight"] = (WIDTH, heads * of_head)
        found[f"{layer}.self_attn.q_norm.weight"] = (of_head,)
        for part, shape in (("gate", (48, WIDTH)), ("up", (48, WIDTH)), ("down", (WIDTH, 48))):
            found[f"{layer}.mlp.{part}_proj.weight"] = shape
        for place in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            found[f"{layer}.{place}_layernorm.weight"] = (WIDTH,)
    if clusters:
        found["masked_embedding.centroids.weight"] = (clusters, WIDTH)
    if not tied:
        found["lm_head.weight"] = (vocab, WIDTH)
    return found


#: Factor of each layer's states.
SCALARS = {
    f"model.layers.{index}.layer_scalar": torch.tensor([0.6 + 0.1 * index]) for index in range(4)
}


def ordering(vocab=VOCAB):
    """Returns the tokens by cluster; all clusters have equal sizes."""
    order = np.random.default_rng(5).permutation(vocab)
    return {"masked_embedding.token_ordering": torch.tensor(order)}


def write_pair(folder, vocab):
    """Writes folders of a model and of a clustered assistant with heads that the kernels support.

    `vocab` is a multiple of 4.
    """
    small = {"num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": vocab}
    small |= {"head_dim": 64, "global_head_dim": 128}
    changes = {"use_ordered_embeddings": True, "num_centroids": 4, "centroid_intermediate_top_k": 2}
    config = CONFIG | changes | {"text_config": CONFIG["text_config"] | small}
    arrays = shapes(clusters=4, vocab=vocab, heads=1, size=64), ordering(vocab) | SCALARS
    target = write_target(folder / "gemma4", TARGET | small)
    return target, write_head(folder / "assistant", *arrays, config, "model.safetensors")


class _KeptAttention(nn.Module):
    """Replaces vLLM's, which needs a cache: one query after all that a layer keeps."""

    def __init__(
        self, num_heads, head_size, scale, num_kv_heads, per_layer_sliding_window=None, **_
    ):
        super().__init__()
        self.window, self.scale, self.size = per_layer_sliding_window, scale, head_size
        self.repeats = num_heads // num_kv_heads
        self.kept = None  # [Hkv, S, D] keys and values

    def forward(self, queries, keys, values):
        keys, values = (x.repeat_interleave(self.repeats, 0) for x in self.kept)
        if self.window is not None:
            keys, values = keys[:, -self.window :], values[:, -self.window :]
        scores = queries.view(-1, 1, self.size) @ keys.transpose(1, 2) * self.scale
        return (scores.softmax(-1) @ values).reshape(1, -1)


@contextmanager
def _vllms(config):
    """Lets vLLM's class run in this process, without its kernels."""
    of_attention = mock.patch("vllm.model_executor.models.gemma4_mtp.Attention", _KeptAttention)
    with one_process(), of_attention, set_current_vllm_config(config), torch.no_grad():
        yield


class Judge:
    """vLLM's assistant on mlx-lm's dense hidden states, keys and values."""

    def __init__(self, config, target):
        self.config, self.target = config, Gemma4Target(target)
        weights = loader.load_weights(config.speculative_config.draft_model_config, config)
        weights = {name: torch.tensor(np.array(array)) for name, array in weights.items()}
        with _vllms(config):
            self.module = Gemma4MTP(vllm_config=config)
            self.module.load_weights(weights.items())
            embedding = torch.tensor(np.array(self.target.model.model.embed_tokens.weight))
            self.module.model.embed_tokens = nn.Embedding.from_pretrained(embedding)

    def kept(self, text):
        """Returns keys and values [Hkv, S, D], by kind, of the target's last layer with any."""
        model = self.target.model
        caches = [KVCache() for _ in model.make_cache()]
        hidden = model.model(mx.array([text]), cache=caches)
        found = {}
        for kind, cache in zip(model.args.layer_types, caches, strict=False):
            both = cache.keys, cache.values
            found[kind] = [torch.tensor(np.array(x[0, :, : cache.offset])) for x in both]
        return torch.tensor(np.array(hidden[0, -1:])), found

    @staticmethod
    def stored(kv_caches, blocks_np, count):
        """Returns keys and values by kind as `kept` does, but from the pool, by its layers."""
        found = {}
        for layer, kv_cache in kv_caches.items():
            kind = "full_attention" if layer.window is None else "sliding_attention"
            both = (np.array(x.elements)[:, blocks_np] for x in (kv_cache.keys, kv_cache.values))
            found[kind] = [
                torch.tensor(x.reshape(len(x), -1, x.shape[-1])[:, :count]) for x in both
            ]
        return found

    def passes(self, text, drafts, stored=None):
        """Yields each pass's [1, V] logits and its hidden states for the next one.

        `stored` replaces the keys and values of the dense model.
        """
        hidden, kept = self.kept(text[:-1])
        kept = stored or kept
        with _vllms(self.config):
            for kind, layer in zip(KINDS, self.module.model.layers, strict=False):
                layer.self_attn.attn.kept = kept[kind]
            for token in [text[-1], *drafts][: len(drafts)]:
                place = torch.tensor([len(text) - 2])
                out, hidden = self.module(torch.tensor([token]), place, hidden)
                yield self.module.compute_logits(out), hidden

    def __call__(self, text, drafts):
        """Returns the assistant's [len(drafts), V] logits at each draft's place."""
        return np.concatenate([logits.numpy() for logits, _ in self.passes(text, drafts)])
