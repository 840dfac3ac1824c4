# SPDX-License-Identifier: Apache-2.0
"""A small model with full and windowed attention layers and recurrent layers.

h_t = a * h_{t-1} + x_t, with a decay `a` per channel. The dense reference applies the recurrence
to a whole text, one token at a time.
"""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import base
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache


def recur(x, decay, state):
    """Returns [n, L, D] states after each of [n, L, D] inputs; `state`: [n, D] before them."""
    out = []
    for index in range(x.shape[1]):
        state = decay * state + x[:, index]
        out.append(state)
    return mx.stack(out, axis=1)


class Attention(nn.Module):
    def __init__(self, size, num_heads, num_kv_heads, head_size):
        super().__init__()
        self.heads = num_heads, num_kv_heads, num_kv_heads
        self.head_size = head_size
        self.qkv = nn.Linear(size, (num_heads + 2 * num_kv_heads) * head_size, bias=False)
        self.out = nn.Linear(num_heads * head_size, size, bias=False)
        self.rope = nn.RoPE(head_size)

    def __call__(self, x, mask, cache):
        n, length, _ = x.shape
        ends = np.cumsum(self.heads)[:-1] * self.head_size
        parts = mx.split(self.qkv(x), ends.tolist(), -1)
        q, k, v = (
            part.reshape(n, length, heads, self.head_size).swapaxes(1, 2)
            for part, heads in zip(parts, self.heads, strict=True)
        )
        q, k = self.rope(q, offset=cache.offset), self.rope(k, offset=cache.offset)
        k, v = cache.update_and_fetch(k, v)
        scale = self.head_size**-0.5
        out = base.scaled_dot_product_attention(q, k, v, cache=cache, scale=scale, mask=mask)
        return self.out(out.swapaxes(1, 2).reshape(n, length, -1))


class Decay(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.inner = nn.Linear(size, size, bias=False)
        self.decay = mx.linspace(0.5, 0.99, size)

    def __call__(self, x, mask, cache):
        x = self.inner(x)
        before = mx.zeros((len(x), x.shape[-1])) if cache[0] is None else cache[0]
        states = recur(x, self.decay, before)
        cache[0] = states[:, -1]
        return states


class HybridModel(nn.Module):
    """Full and windowed attention layers between recurrent ones."""

    WINDOW = 24

    def __init__(self, vocab=64, size=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, size)
        attention = [Attention(size, 4, 2, 64) for _ in range(2)]
        decays = [Decay(size) for _ in range(2)]
        self.layers = [attention[0], decays[0], attention[1], decays[1]]

    def make_cache(self):
        return [KVCache(), ArraysCache(1), RotatingKVCache(self.WINDOW), ArraysCache(1)]

    def __call__(self, inputs, cache=None):
        x = self.embed(inputs)
        caches = cache or self.make_cache()
        masks = [
            base.create_attention_mask(x, caches[0]),
            None,
            base.create_attention_mask(x, caches[2], window_size=self.WINDOW),
            None,
        ]
        for layer, mask, of_layer in zip(self.layers, masks, caches, strict=True):
            x = x + layer(mx.fast.rms_norm(x, None, 1e-5), mask, of_layer)
        return self.embed.as_linear(x)
