# SPDX-License-Identifier: Apache-2.0
"""A model that repeats what came PERIOD tokens before, and a drafter fitted to its hidden states.

The model is set by hand: one layer copies, one moves the copy to where the head reads it. So only
what the layer between knows tells the next token, and only at that layer. The drafter's projection
of hidden states is a least-squares fit over other texts. Its attention is by position alone: one
layer reads the context, and the other the row behind it in the block, so that a row depends on
taps, positions, context and direction.
"""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
from engine.spec_decode.heads import CONFIG as LLAMA
from engine.spec_decode.heads import DenseTarget

PERIOD, VOCAB, SIZE, HEAD, BASE = 12, 32, 128, 64, 10000.0
MASK = VOCAB - 1  # of no text
OWN, COPY, BEFORE, NEXT = (slice(VOCAB * place, VOCAB * (place + 1)) for place in range(4))
LAYERS, TAPS = 4, [0, 1, 2]  # the copy is there after layer 2, and no longer after layer 3
COPIES, MOVES = 2, 3  # layers
SHARPNESS = 16.0  # of queries and keys: another position's weight is below 1e-10
MLP = 16
RIDGE = 1e-4

CONFIG = LLAMA | {
    "hidden_size": SIZE,
    "intermediate_size": MLP,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": HEAD,
    "vocab_size": VOCAB,
    "max_position_embeddings": 1024,
    "attention_bias": True,
}
DRAFTER = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-6,
    "attention_bias": True,
    "block_size": 8,
    "is_causal": False,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": TAPS},
} | {
    key: CONFIG[key]
    for key in (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "max_position_embeddings",
        "rope_theta",
        "tie_word_embeddings",
    )
}


def text(rng, length, period=PERIOD):
    """Tokens that repeat; where there are enough, none twice in a period."""
    once = rng.permutation(MASK)[:PERIOD] if period == PERIOD else rng.integers(0, MASK, period)
    return np.resize(once, length).tolist()


def _looking(back, normed):
    """Biases, and norms' weights, by which every row attends to the one `back` positions before."""
    angles = BASE ** (-np.arange(HEAD // 2) / (HEAD // 2)) * back
    keys = np.concatenate([np.ones(HEAD // 2), np.zeros(HEAD // 2)])
    queries = np.concatenate([np.cos(angles), -np.sin(angles)])
    large = SHARPNESS * (1 if not normed else 1 / np.sqrt(2))  # a norm makes the mean square one
    pad = np.zeros(HEAD)
    found = {
        "k_proj.bias": np.concatenate([keys, pad]) * (1 if normed else large),
        "q_proj.bias": np.concatenate([queries, pad]) * (1 if normed else large),
    }
    if normed:
        found |= {f"{kind}_norm.weight": np.full(HEAD, large) for kind in "qk"}
    return found


def _attention(back, moves, normed=False):
    """Attention that adds (source, target, factor) of the row `back` positions before."""
    found = {f"{kind}_proj.weight": np.zeros((SIZE, SIZE)) for kind in "qkvo"}
    for source, target, factor in moves:
        found["v_proj.weight"][:VOCAB, source] = np.eye(VOCAB)
        found["o_proj.weight"][target, :VOCAB] += factor * np.eye(VOCAB)
    found |= {f"{kind}_proj.bias": np.zeros(SIZE) for kind in "vo"}
    return found | _looking(back, normed)


def _layer(name, attention, rng):
    shapes = {"gate_proj": (MLP, SIZE), "up_proj": (MLP, SIZE), "down_proj": (SIZE, MLP)}
    found = {f"{name}.self_attn.{part}": array for part, array in attention.items()}
    found |= {f"{name}.mlp.{part}.weight": np.zeros(shape) for part, shape in shapes.items()}
    norms = ("input_layernorm", "post_attention_layernorm")
    return found | {f"{name}.{norm}.weight": np.ones(SIZE) for norm in norms}


def save(folder, arrays, config):
    """Writes a checkpoint in float32, and returns its folder."""
    folder.mkdir()
    arrays = {name: mx.array(array.astype(np.float32)) for name, array in arrays.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), arrays, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_target(folder: Path, period: int = PERIOD) -> Path:
    """The model."""
    rng = np.random.default_rng(0)
    embedding, head = np.zeros((VOCAB, SIZE)), np.zeros((VOCAB, SIZE))
    embedding[:, OWN] = head[:, NEXT] = np.eye(VOCAB)
    arrays = {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    arrays["model.norm.weight"] = np.ones(SIZE)
    one, two = np.sqrt(1 / SIZE), np.sqrt(2 / SIZE)  # norms of rows of so many ones
    for layer in range(LAYERS):
        attention = _attention(0, [])
        if layer == COPIES:
            attention = _attention(period - 1, [(OWN, COPY, one)])
        if layer == MOVES:
            attention = _attention(0, [(COPY, NEXT, two), (COPY, COPY, -two)])
        arrays |= _layer(f"model.layers.{layer}", attention, rng)
    return save(folder, arrays, CONFIG)


def write_drafter(
    folder: Path,
    target: Path,
    trained: bool = True,
    period: int = PERIOD,
    num_unknown: int = 0,
    **changes,
) -> Path:
    """The drafter.

    Args:
        folder: of it.
        target: that it is for.
        trained: False: random weights of the same size.
        period: the target's.
        num_unknown: first tokens of the vocabulary that it never drafts.
        changes: of config.json.
    """
    rng = np.random.default_rng(1)  # other texts than are served
    taps, wanted, dense = [], [], DenseTarget(target)
    for _ in range(12):
        tokens = text(rng, 5 * period, period)
        states = dense.states(tokens)
        rows = np.concatenate([states[tap + 1].numpy() for tap in TAPS], axis=1)
        taps.append(rows[period:-1])
        wanted.append(np.eye(VOCAB)[tokens[period + 1 :]])
    inputs, codes = np.concatenate(taps), np.concatenate(wanted)
    gram = inputs.T @ inputs + RIDGE * len(inputs) * np.eye(inputs.shape[1])
    fit = np.zeros((SIZE, inputs.shape[1]))
    fit[COPY] = np.linalg.solve(gram, inputs.T @ codes).T
    fit[COPY][:num_unknown] = 0
    one = np.sqrt(1 / SIZE)
    # Hidden states of position p - period - 2 tell the token of p - period - 1: that of p - 1.
    reads = _attention(period + 2, [(COPY, BEFORE, 2 * one)], normed=True)
    passes = _attention(-1, [(BEFORE, NEXT, 2 * one)], normed=True)
    arrays = {"fc.weight": fit, "hidden_norm.weight": np.ones(SIZE), "norm.weight": np.ones(SIZE)}
    arrays |= _layer("layers.0", reads, rng) | _layer("layers.1", passes, rng)
    if not trained:
        arrays = {name: 0.3 * rng.normal(size=array.shape) for name, array in arrays.items()}
    return save(folder, arrays, DRAFTER | changes)
