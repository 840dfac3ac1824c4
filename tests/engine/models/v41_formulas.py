# SPDX-License-Identifier: Apache-2.0
"""DeepSeek V4.1's forward of a whole text in NumPy and float64, token by token where it chooses."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
from engine.models.further import FAMILIES
from engine.models.recurrent import make_model, write_model
from mlx.utils import tree_flatten

from vllm_metal.patches.mlx_patches.families import engram

_E4M3, _E2M1 = (3, -6, 448.0), (1, 0, 6.0)  # bits of mantissa, least exponent, largest value


def of_v41(**changes):
    """Returns the small model's family with other keys of config.json."""
    family = FAMILIES["deepseek_v41"]
    return replace(family, config={"text_config": family.config["text_config"] | changes})


#: n-gram memory before two layers, whose tables have rows for primes from 50 on.
MEMORY = {
    "engram_layer_ids": [1, 4],
    "engram_num_embeddings": [53 + 59 + 61 + 67, 71 + 73 + 79 + 83],
    "engram_max_ngram_size": 3,
    "engram_vocab_size": 50,
    "engram_n_heads": 2,
    "engram_head_dim": 8,
    "engram_pad_token_id": 2,
    "engram_compressed_vocab_size": 40,
}
TOKEN_MAP = [(7 * token + 3) % 40 for token in range(64)]


def with_memory(seed=1, **changes):
    """Makes the small model with a memory, whose gates are between closed and open."""
    model = make_model(of_v41(**MEMORY | changes), seed, drawn=True)
    for index in model.args.engram_layer_ids:
        module = model.layers[index].engram
        module.q_weight, module.k_weight = 1 + module.q_weight, 1 + module.k_weight
    engram.use_token_map(model, model.args, TOKEN_MAP)
    return model


def write_with_memory(folder, **changes):
    """Writes the small model with a memory as a folder."""
    written = write_model(of_v41(**MEMORY | changes), Path(folder), drawn=True)
    (Path(folder) / "engram_token_map.json").write_text(json.dumps(TOKEN_MAP))
    return written


def primes_from(least, count):
    """Returns the first primes that are not less than `least`."""
    found, number = [], least
    while len(found) < count:
        if all(number % factor for factor in range(2, int(number**0.5) + 1)):
            found.append(number)
        number += 1
    return found


def ngram_rows(args, token_map, layer, tokens, without_order=None):
    """Returns [T, orders * heads] rows of a layer's table (arXiv:2601.07372, section 2.2).

    An n-gram is mixed by odd multipliers and exclusive or, and taken modulo a prime for each head.
    Each order and head has its own range of rows. Before a text is the token that pads it.
    """
    longest, heads = args.engram_max_ngram_size, args.engram_n_heads
    width = (longest - 1) * heads
    number = list(args.engram_layer_ids).index(layer)
    primes = primes_from(args.engram_vocab_size, width * (number + 1))[-width:]
    bound = (2**63 - 1) // args.engram_compressed_vocab_size // 2
    multipliers = 2 * np.random.default_rng(10007 * layer).integers(0, bound, longest) + 1
    ids = [token_map[args.engram_pad_token_id]] * (longest - 1) + [token_map[t] for t in tokens]
    found = np.zeros((len(tokens), width), np.int64)
    for token in range(len(tokens)):
        for order in range(2, longest + 1):
            mixed = 0
            for distance in range(order):
                mixed ^= ids[token + longest - 1 - distance] * int(multipliers[distance])
            for head in range(heads):
                column = (order - 2) * heads + head
                found[token, column] = sum(primes[:column]) + mixed % primes[column]
    return found


def softmax(scores):
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


class Formulas:
    """Logits by the formulas, from the weights of mlx-lm's model.

    Of equal scores the first entries and blocks are chosen, with `last` the last ones.
    """

    def __init__(self, model, last=False, token_map=()):
        self.args, self.last, self.token_map = model.args, last, token_map
        self.weights = {
            name: np.array(array, np.float64) for name, array in tree_flatten(model.parameters())
        }
        #: Smallest distance of a value from a threshold of its rounding, in steps of its format.
        self.closest = np.inf

    def logits(self, tokens):
        """Returns [T, V]."""
        args, count = self.args, len(tokens)
        streams = self.weights["model.embed_tokens.weight"][tokens]
        streams = np.repeat(streams[:, None], args.hc_mult, axis=1)
        mix = np.zeros((count, args.hc_mult))
        mix[:, 0] = 1
        shared = {}
        for index in range(args.num_hidden_layers):
            name = f"model.layers.{index}"
            if index in args.engram_layer_ids:
                rows = ngram_rows(args, self.token_map, index, tokens)
                streams = self.remembered(name, streams, rows)
            for part, norm in (("attn", "input"), ("ffn", "post_attention")):
                before, after, combined = self.connection(f"{name}.{part}_hc", streams)
                x = np.einsum("ts,tsh->th", mix, streams)
                x = self.norm(f"{name}.{norm}_layernorm", x)
                out = self.attention(index, x, shared) if part == "attn" else self.experts(name, x)
                streams = np.einsum("tab,tah->tbh", combined, streams)
                streams, mix = streams + after[..., None] * out[:, None], before
        x = self.norm("model.norm", np.einsum("ts,tsh->th", mix, streams))
        return x @ self.weights["lm_head.weight"].T

    def remembered(self, name, streams, rows):
        """Adds the value of a token's rows to its streams, by gates of their own.

        streams: [T, S, H]. rows: [T, n]. A gate is the sigmoid of the scaled product of a stream
        and its key, both normalized, of which the root is taken with its sign.
        """
        (count, size), eps = streams.shape[1:], self.args.rms_norm_eps
        embedded = self.weights[f"{name}.engram.embed.weight"][rows].reshape(len(rows), -1)
        found = self.linear(f"{name}.engram.wkv", self.rounded(embedded, _E4M3, 32, 1e-4))
        keys, value = found[:, :-size].reshape(-1, count, size), found[:, -size:]
        keys = keys / np.sqrt((keys * keys).mean(-1, keepdims=True) + eps)
        normed = streams / np.sqrt((streams * streams).mean(-1, keepdims=True) + eps)
        weight = self.weights[f"{name}.engram.q_weight"] * self.weights[f"{name}.engram.k_weight"]
        product = (normed * weight * keys).sum(-1) / np.sqrt(size)
        roots = np.copysign(np.sqrt(np.maximum(np.abs(product), 1e-6)), product)
        return streams + sigmoid(roots)[..., None] * value[:, None]

    def linear(self, name, x):
        return x @ self.weights[f"{name}.weight"].T

    def norm(self, name, x):
        root = np.sqrt((x * x).mean(-1, keepdims=True) + self.args.rms_norm_eps)
        return x / root * self.weights[f"{name}.weight"]

    def connection(self, name, streams):
        """Weights of the streams before a part, of its output, and of streams among themselves."""
        size, eps = self.args.hc_mult, self.args.hc_eps
        flat = streams.reshape(len(streams), -1)
        flat = flat / np.sqrt((flat * flat).mean(-1, keepdims=True) + self.args.rms_norm_eps)
        scale = np.repeat(self.weights[f"{name}.scale"], [size, size, size * size])
        mix = flat @ self.weights[f"{name}.fn"].T * scale + self.weights[f"{name}.base"]
        before, after, combined = np.split(mix, [size, 2 * size], axis=-1)
        combined = softmax(combined.reshape(-1, size, size)) + eps
        for turn in range(2 * self.args.hc_sinkhorn_iters - 1):
            axis = -1 if turn % 2 else -2
            combined = combined / (combined.sum(axis, keepdims=True) + eps)
        return sigmoid(before) + eps, 2 * sigmoid(after), combined

    def experts(self, name, x):
        args, name = self.args, f"{name}.mlp"
        logits = self.linear(f"{name}.gate", x) / args.gate_temp
        assert args.scoring_func == "sqrtsoftplus"
        scores = np.sqrt(np.log1p(np.exp(logits)))
        biased = scores + self.weights[f"{name}.gate.e_score_correction_bias"]
        out = self.mlp(f"{name}.shared_experts", x)
        for token, order in enumerate(np.argsort(-biased, axis=-1, kind="stable")):
            chosen = order[: args.num_experts_per_tok]
            shares = scores[token, chosen]
            for share, expert in zip(shares / shares.sum(), chosen, strict=True):
                found = self.mlp(f"{name}.experts.switch_mlp", x[token], expert)
                out[token] += args.routed_scaling_factor * share * found
        return out

    def mlp(self, name, x, expert=...):
        gate, up, down = (
            self.weights[f"{name}.{part}_proj.weight"][expert] for part in ("gate", "up", "down")
        )
        limit = self.args.swiglu_limit
        gate, up = np.minimum(x @ gate.T, limit), np.clip(x @ up.T, -limit, limit)
        return (gate * sigmoid(gate) * up) @ down.T

    def rotated(self, x, positions, ratio, sign=1):
        """Rotates neighboring pairs of the last elements of [n, ..., D] rows."""
        args, size = self.args, self.args.qk_rope_head_dim
        pairs = np.arange(0, size, 2) / size
        base = args.compress_rope_theta if ratio else args.rope_theta
        speeds = base**-pairs
        if ratio:  # YaRN (arXiv:2309.00071), without a factor for attention
            scaling = args.rope_scaling
            trained = scaling["original_max_position_embeddings"]
            first, last = (
                size * np.log(trained / (turns * 2 * np.pi)) / (2 * np.log(base))
                for turns in (scaling["beta_fast"], scaling["beta_slow"])
            )
            first, last = max(np.floor(first), 0), min(np.ceil(last), size - 1)
            slow = np.clip((np.arange(size // 2) - first) / ((last - first) or 0.001), 0, 1)
            speeds = speeds * (1 - slow) + speeds / scaling["factor"] * slow
        angles = sign * positions[:, None] * speeds
        angles = angles.reshape(len(x), *[1] * (x.ndim - 2), size // 2)
        even, odd = x[..., -size::2], x[..., x.shape[-1] - size + 1 :: 2]
        out = x.copy()
        out[..., -size::2] = even * np.cos(angles) - odd * np.sin(angles)
        out[..., x.shape[-1] - size + 1 :: 2] = even * np.sin(angles) + odd * np.cos(angles)
        return out

    def rounded(self, x, kind, block=None, least=0.0, exact=False):
        """Rounds to fp8 (e4m3) or fp4 (e2m1); by blocks that have a scale of their own.

        exact: whether scales are rounded to e4m3, otherwise up to a power of two.
        """
        bits, lowest, most = kind
        if block is not None:
            if x.shape[-1] % block:
                return x
            blocks = x.reshape(*x.shape[:-1], -1, block)
            scale = np.maximum(np.abs(blocks).max(-1, keepdims=True), least) / most
            scale = self.rounded(scale, _E4M3) if exact else 2 ** np.ceil(np.log2(scale))
            return (self.rounded(blocks / scale, kind) * scale).reshape(x.shape)
        x = np.clip(x, -most, most)
        _, exponents = np.frexp(x)
        steps = 2.0 ** (np.maximum(exponents - 1, lowest) - bits)
        self.closest = min(self.closest, np.abs(x / steps % 1 - 0.5).min(initial=1))
        return np.rint(x / steps) * steps

    def attention(self, index, x, shared):
        args, name, positions = self.args, f"model.layers.{index}.self_attn", np.arange(len(x))
        ratio = (*args.compress_ratios, *[0] * args.num_hidden_layers)[index]
        heads, size = args.num_attention_heads, args.head_dim
        low = self.norm(f"{name}.q_a_norm", self.linear(f"{name}.q_a_proj", x))
        queries = self.linear(f"{name}.q_b_proj", low).reshape(-1, heads, size)
        queries = self.rotated(queries, positions, ratio)
        keys = self.norm(f"{name}.kv_norm", self.linear(f"{name}.kv_proj", x))
        keys = self.rounded(self.rotated(keys, positions, ratio), _E4M3, 32, 1e-4)
        if ratio and index in args.kv_source_layer_ids:
            self.compress(name, x, ratio, shared)
        if ratio and index in args.index_source_layer_ids:
            self.choose(index, x, low, ratio, shared)
        distance = positions[:, None] - positions
        seen = (distance >= 0) & (distance < args.sliding_window)
        if ratio and "chosen" in shared:
            keys = np.concatenate([keys, shared["entries"]])
            seen = np.concatenate([seen, shared["chosen"]], axis=1)
        scores = np.einsum("thd,sd->ths", queries, keys) * size**-0.5
        scores = np.where(seen[:, None], scores, -np.inf)
        sinks = np.broadcast_to(self.weights[f"{name}.sinks"][:, None], (*scores.shape[:2], 1))
        shares = softmax(np.concatenate([scores, sinks], axis=-1))[..., :-1]
        out = self.rotated(shares @ keys, positions, ratio, sign=-1)
        out = np.einsum(
            "tgi,gri->tgr",
            out.reshape(len(x), args.o_groups, -1),
            self.weights[f"{name}.o_a_proj.weight"],
        )
        return self.linear(f"{name}.o_b_proj", out.reshape(len(x), -1))

    def compress(self, name, x, ratio, shared):
        """Computes the entries of all whole groups, and their index keys."""
        latents = self.linear(f"{name}.compressor.kv_proj", x)
        firsts = np.arange(len(x) // ratio) * ratio
        if ratio > 1:
            gates = self.linear(f"{name}.compressor.gate_proj", x)
            groups = firsts[:, None] + np.arange(ratio)
            shares = softmax(gates[groups].swapaxes(1, 2)).swapaxes(1, 2)
            latents = (latents[groups] * shares).sum(1)
        latents = self.norm(f"{name}.compressor.kv_norm", latents)
        entries = self.rotated(latents, firsts, ratio)
        shared["entries"] = self.rounded(entries, _E2M1, 16, 6 * 2.0**-9, exact=True)
        keys = self.norm(f"{name}.indexer.k_norm", self.linear(f"{name}.indexer.k_proj", latents))
        keys = self.rotated(keys, firsts, ratio)
        shared["keys"] = self.rounded(keys, _E2M1, 32, 6 * 2.0**-126)

    def choose(self, index, x, low, ratio, shared):
        """Chooses entries, and at one layer blocks of them for later layers."""
        args, name = self.args, f"model.layers.{index}.self_attn.indexer"
        heads, size = args.index_n_heads, args.index_head_dim
        queries = self.linear(f"{name}.q_b_proj", low).reshape(-1, heads, size)
        queries = self.rotated(queries, np.arange(len(x)), ratio)
        queries = self.rounded(queries, _E2M1, 32, 6 * 2.0**-126)
        weights = self.linear(f"{name}.weights_proj", x) * (heads * size) ** -0.5
        products = np.maximum(np.einsum("thd,gd->thg", queries, shared["keys"]), 0)
        scores = np.einsum("th,thg->tg", weights, products)
        chosen = np.zeros(scores.shape, bool)
        own = index == args.candidate_source_layer_id
        blocks = shared["blocks"] = [None] * len(x) if own else shared.get("blocks")
        for token, of_token in enumerate(scores):
            numbers = np.arange((token + 1) // ratio)
            if own:
                blocks[token] = self.best_blocks(of_token[numbers])
            elif blocks is not None:
                numbers = numbers[np.isin(numbers // args.candidate_block_size, blocks[token])]
            chosen[token, numbers[self.first(of_token[numbers], args.index_topk)]] = True
        shared["chosen"] = chosen

    def best_blocks(self, scores):
        size = self.args.candidate_block_size
        best = [scores[first : first + size].max() for first in range(0, len(scores), size)]
        return self.first(
            np.array([*best[:-1], *[np.inf] * bool(best)]), self.args.candidate_topk_blocks
        )

    def first(self, scores, count):
        """Returns the indices of the `count` highest scores."""
        if self.last:
            return len(scores) - 1 - np.argsort(-scores[::-1], kind="stable")[:count]
        return np.argsort(-scores, kind="stable")[:count]
