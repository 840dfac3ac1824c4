# SPDX-License-Identifier: Apache-2.0
"""A kind of layer that keeps a recurrent state, as a double of those that are to come.

h_t = a * h_{t-1} + x_t, with a decay `a` of each channel. A request's state takes one block of its
KV cache group. The dense reference is the same recurrence over a whole text, one token at a time.
"""

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import base
from mlx_lm.models.cache import KVCache, RotatingKVCache
from vllm.v1.kv_cache_interface import MambaSpec

from vllm_metal.attention.layers import PROBES
from vllm_metal.attention.probe import Probe
from vllm_metal.kv_cache import formats
from vllm_metal.kv_cache.layer_state import LayerState, StepScope
from vllm_metal.kv_cache.stateful_layer import StatefulLayer


def recur(x, decay, state):
    """[n, L, D] states after each of L inputs, [n, L, D]; `state`, [n, D], is that before them."""
    out = []
    for index in range(x.shape[1]):
        state = decay * state + x[:, index]
        out.append(state)
    return mx.stack(out, axis=1)


class DecayCache:
    """What the model keeps of such a layer by itself, as mlx-lm's caches do."""

    def __init__(self):
        self.state = None

    def recur(self, x, decay):
        start = mx.zeros((len(x), x.shape[-1])) if self.state is None else self.state
        out = recur(x, decay, start)
        self.state = out[:, -1]
        return out


class DecayProbe(Probe):
    def recur(self, x, decay):
        self._size, self._dtype = x.shape[-1], x.dtype
        return x

    def layer(self, name):
        return RecurrentLayer(name, self._size, self._dtype)


@dataclass(frozen=True)
class RecurrentLayer(StatefulLayer):
    size: int
    dtype: mx.Dtype

    @property
    def kind(self):
        return self.memory

    @property
    def memory(self):
        return self.size, self.dtype

    @property
    def context(self):
        return "a state"

    def spec(self, block_size, elements, whole_context=False):
        dtypes = (formats.pool_format(self.dtype).torch_dtype,)
        return MambaSpec(block_size=block_size, shapes=((self.size,),), dtypes=dtypes)

    def allocate(self, num_blocks, block_size, elements, kv_cache_type):
        return RecurrentState(num_blocks, self.size, self.dtype)

    def scope(self, state):
        return StepScope(RecurrentPlan.of)

    def cache(self, state, scope):
        return RecurrentCache(state, scope)


@dataclass(frozen=True)
class RecurrentPlan:
    """A step's rows, regrouped into a sequence for each request."""

    blocks: mx.array  # [R]
    begun: mx.array  # [R, 1] bool, whether the block holds a state
    rows: mx.array  # [R, L], padded with a request's last row
    places: mx.array  # [T], of each row in the flat [R * L]
    last_rows_np: np.ndarray  # [R]

    @staticmethod
    def of(layout):
        starts, counts = layout.query_start_loc_np[:-1], np.diff(layout.query_start_loc_np)
        offsets = np.minimum(np.arange(counts.max()), counts[:, None] - 1)
        requests = np.repeat(np.arange(len(counts)), counts)
        within = np.arange(counts.sum()) - starts[requests]
        return RecurrentPlan(
            mx.array(layout.block_tables_np[:, 0]),
            mx.array(layout.positions_np[starts] > 0)[:, None],
            mx.array(starts[:, None] + offsets),
            mx.array(requests * counts.max() + within),
            starts + counts - 1,
        )


class RecurrentState(LayerState):
    """By MLX's operations: states are written when the next step begins, as scattered K/V are."""

    pipelined = False
    rolls_back = True

    def __init__(self, num_blocks, size, dtype):
        self._states = mx.zeros((num_blocks, size), dtype)
        # Blocks, states after each row of a step, and each request's row that counts.
        self._pending = []

    @property
    def arrays(self):
        return [self._states]

    @arrays.setter
    def arrays(self, arrays):
        (self._states,) = arrays

    def begin_step(self):
        for blocks, states, last_rows_np in self._pending:
            self._states[blocks] = states[mx.array(last_rows_np)]
        self._pending = []

    def settle(self):
        mx.synchronize()
        self.begin_step()
        mx.eval(self.arrays)

    def restore(self, last_rows_np):
        self._pending = [(blocks, states, last_rows_np) for blocks, states, _ in self._pending]

    def run(self, plan, x, decay):
        """[T, D] rows in, the states after them out."""
        before = mx.where(plan.begun, self._states[plan.blocks], 0.0)
        states = recur(x[plan.rows], decay, before).reshape(-1, x.shape[-1])[plan.places]
        self._pending.append((plan.blocks, states, plan.last_rows_np))
        return states


class RecurrentCache:
    """Stands where the model expects a DecayCache; its rows are sequences of length 1."""

    def __init__(self, state, scope):
        self._state, self._scope = state, scope

    def recur(self, x, decay):
        return self._state.run(self._scope.plan, x[:, 0], decay)[:, None]


RECURRENT_PROBES = {**PROBES, DecayCache: lambda cache: DecayProbe()}


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
        return cache.recur(self.inner(x), self.decay)


class HybridModel(nn.Module):
    """Layers of attention, full and windowed, between recurrent ones."""

    WINDOW = 24

    def __init__(self, vocab=64, size=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, size)
        attention = [Attention(size, 4, 2, 16) for _ in range(2)]
        decays = [Decay(size) for _ in range(2)]
        self.layers = [attention[0], decays[0], attention[1], decays[1]]

    def make_cache(self):
        return [KVCache(), DecayCache(), RotatingKVCache(self.WINDOW), DecayCache()]

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
