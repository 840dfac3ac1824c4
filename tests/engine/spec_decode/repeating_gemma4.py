# SPDX-License-Identifier: Apache-2.0
"""A Gemma 4 that repeats what came PERIOD tokens before, and an assistant fitted to its values.

The model is set by hand: its last layer, with full attention, copies. The layer before, with a
sliding window, adds nothing, but the assistant reads the keys and values that it keeps. So the
text does not depend on them, and the drafts depend on nothing else. Values are random projections
of tokens; the assistant's projection back is a least-squares fit over other texts. It attends by
position alone, a token later in each pass: the hidden states that it passes on count the passes.
"""

from pathlib import Path

import mlx.core as mx
import numpy as np
from engine.spec_decode import assistants
from engine.spec_decode.heads import DenseTarget
from engine.spec_decode.repeating import (
    BASE,
    HEAD,
    MLP,
    OWN,
    PERIOD,
    RIDGE,
    SIZE,
    VOCAB,
    save,
    text,
)
from mlx_lm.models.cache import KVCache

PASSES = 4  # at most
ONE = VOCAB  # an element that all tokens' embeddings have
COUNTS = range(ONE + 1, ONE + PASSES)  # which of the passes after the first one
SHARPNESS = 4.0  # of queries and keys: another position's weight is below 1e-10
KINDS = ["sliding_attention", "full_attention"]
_ROPE = {"rope_type": "default", "rope_theta": BASE}
_SIZES = {
    "hidden_size": SIZE,
    "intermediate_size": MLP,
    "num_hidden_layers": len(KINDS),
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "num_global_key_value_heads": None,
    "attention_k_eq_v": False,
    "head_dim": HEAD,
    "global_head_dim": HEAD,
    "layer_types": KINDS,
    "rope_parameters": dict.fromkeys(KINDS, _ROPE),
    "vocab_size": VOCAB,
    "sliding_window": 2 * PERIOD,
    "max_position_embeddings": 1024,
}
CONFIG = assistants.TARGET | _SIZES
ASSISTANT = assistants.CONFIG | {
    "backbone_hidden_size": SIZE,
    "text_config": assistants.CONFIG["text_config"] | _SIZES | {"num_kv_shared_layers": 2},
}


def _query(back):
    """The query that scores highest the key `back` positions before."""
    angles = BASE ** (-np.arange(HEAD // 2) / (HEAD // 2)) * back
    return np.concatenate([np.cos(angles), -np.sin(angles)])


def _layer(index, **attention):
    """A layer that adds nothing but its attention."""
    found = {
        "self_attn.q_proj": np.zeros((HEAD, SIZE)),
        "self_attn.o_proj": np.zeros((SIZE, HEAD)),
        "self_attn.q_norm": np.full(HEAD, SHARPNESS),
        "mlp.gate_proj": np.zeros((MLP, SIZE)),
        "mlp.up_proj": np.zeros((MLP, SIZE)),
        "mlp.down_proj": np.zeros((SIZE, MLP)),
    }
    places = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    found |= {f"{place}_layernorm": np.ones(SIZE) for place in places}
    found |= {f"self_attn.{part}": array for part, array in attention.items()}
    arrays = {f"model.layers.{index}.{part}.weight": array for part, array in found.items()}
    return arrays | {f"model.layers.{index}.layer_scalar": np.ones(1)}


def _embedding():
    found = np.zeros((VOCAB, SIZE))
    found[:, OWN], found[:, ONE] = np.eye(VOCAB), 1
    return found


def write_target(folder: Path) -> Path:
    """The model."""
    keys, copied = np.zeros((HEAD, SIZE)), np.zeros((HEAD, SIZE))
    keys[: HEAD // 2, ONE] = 1
    copied[:VOCAB, OWN] = np.eye(VOCAB)
    queries, mixed = np.zeros((HEAD, SIZE)), np.zeros((HEAD, SIZE))
    queries[:, ONE] = _query(PERIOD - 1)
    mixed[:, OWN] = np.random.default_rng(0).normal(size=(HEAD, VOCAB))
    kept = {"k_proj": keys, "k_norm": np.full(HEAD, SHARPNESS)}
    arrays = {"model.embed_tokens.weight": _embedding(), "model.norm.weight": np.ones(SIZE)}
    arrays |= _layer(0, **kept, v_proj=mixed)
    arrays |= _layer(1, **kept, v_proj=copied, q_proj=queries, o_proj=copied.T)
    louder = "model.layers.1.post_attention_layernorm.weight"
    arrays[louder] = 3 * arrays[louder]  # than the token itself
    return save(folder, arrays, CONFIG)


def write_assistant(folder: Path, target: Path, trained: bool = True) -> Path:
    """The assistant; untrained, it has random weights of the same sizes."""
    rng = np.random.default_rng(1)  # other texts than are served
    model, values, tokens = DenseTarget(target).model, [], []
    for _ in range(12):
        tokens.append(text(rng, 5 * PERIOD))
        caches = [KVCache() for _ in model.layers]
        mx.eval(model.model(mx.array([tokens[-1]]), cache=caches))
        values.append(np.array(caches[0].values[0, 0, : len(tokens[-1])]))
    inputs, codes = np.concatenate(values), np.eye(VOCAB)[np.concatenate(tokens)]
    gram = inputs.T @ inputs + RIDGE * len(inputs) * np.eye(HEAD)
    fit = np.zeros((SIZE, HEAD))
    fit[OWN] = np.linalg.solve(gram, inputs.T @ codes).T
    # Elements are 1 after the first projection, and a token's code has a norm of sqrt(SIZE) after
    # the layer's, so this is what the last norm divides by, in the first pass and later.
    roots = [np.sqrt((count + SIZE) / SIZE) for count in (1, 2)]
    first = np.zeros((SIZE, 2 * SIZE))
    first[ONE, ONE] = SIZE**-0.5  # embeddings are scaled
    onward, queries = np.zeros((SIZE, SIZE)), np.zeros((HEAD, SIZE))
    queries[:, ONE] = _query(PERIOD - 2)  # hidden states are a token behind the newest one
    onward[COUNTS[0], ONE] = roots[0]
    for number, count in enumerate(COUNTS):
        first[count, SIZE + count] = 1
        queries[:, count] = _query(PERIOD - 3 - number) - queries[:, ONE]
        onward[COUNTS[0], count] = -roots[0]
        if number:
            onward[count, count - 1] = roots[1]
    arrays = {
        "model.embed_tokens.weight": _embedding(),
        "model.norm.weight": np.ones(SIZE),
        "pre_projection.weight": first,
        "post_projection.weight": onward,
    }
    arrays |= _layer(0, q_proj=queries, o_proj=fit) | _layer(1)
    if not trained:
        arrays = {name: 0.3 * rng.normal(size=array.shape) for name, array in arrays.items()}
    return save(folder, arrays, ASSISTANT)
