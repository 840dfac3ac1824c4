# SPDX-License-Identifier: Apache-2.0
"""Computes the weights of a one-layer Llama that says scripts, without training.

Columns of a token's residual stream: a one; padding to equal length; whether
it opens a prompt or a tool result, or is a script's marker; whether a turn, or an answer after
reasoning, may start after it; and the next position in its script, as one-hot digits. Two
attention heads add the number of tool results in the prompt, and the selected script. The MLP adds
nothing. The head reads the digits or, after a token of text, which turn
starts.
"""

import math
from typing import Any

import numpy as np

from scripted.vocabulary import Vocabulary

#: Maximum number of scripts, including the one without a marker; and of tool results in a prompt.
MAX_SCRIPTS, MAX_RESULTS = 24, 64

_DIGITS, _RADIX = 4, 16  # codes for 65536 positions
_HEAD_DIM = 32
_LENGTH = 3.0  # length of each token's vector: equal, so RMSNorm only scales by a known factor
_ONE, _FILLER, _BEGIN, _RESULT, _TURN, _ANSWER, _COUNT = range(7)
_MARKER = 8  # MAX_SCRIPTS columns: is this script's marker
_ASKED = _MARKER + MAX_SCRIPTS  # MAX_SCRIPTS columns: this script is selected
_CODE = _ASKED + MAX_SCRIPTS  # _DIGITS * _RADIX columns
_HIDDEN = 128
_SLOWEST = _HEAD_DIM // 2 - 1  # the dimension that RoPE rotates least: 6e-12 per token
_FOUND = 40.0  # a score next to which 10^6 tokens with a score of 0 weigh 4e-12
_FIRST_WINS = 40.0  # score difference between one script's marker and the next one's
_MIDDLE = 0.75  # in the range 0.5 to 1 of _COUNT
#: So large that the best token is certain at any temperature up to 1. A power of two is exact.
_CERTAIN = 2.0**21

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float32",
    "hidden_size": _HIDDEN,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": _HEAD_DIM,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-9,
    "rope_theta": 1e12,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
}


def weights(vocabulary: Vocabulary, unmarked: int) -> dict[str, np.ndarray]:
    """Returns float32 weights by transformers' names.

    Args:
        vocabulary: token ids.
        unmarked: the script for prompts without a marker.
    """
    layer = "model.layers.0"
    ones = np.ones(_HIDDEN, np.float32)
    narrow = np.zeros((CONFIG["intermediate_size"], _HIDDEN), np.float32)
    return {
        "model.embed_tokens.weight": _embeddings(vocabulary),
        f"{layer}.input_layernorm.weight": ones,
        f"{layer}.post_attention_layernorm.weight": ones,
        "model.norm.weight": ones,
        **{f"{layer}.self_attn.{name}": array for name, array in _attention(unmarked).items()},
        f"{layer}.mlp.gate_proj.weight": narrow,
        f"{layer}.mlp.up_proj.weight": narrow,
        f"{layer}.mlp.down_proj.weight": np.ascontiguousarray(narrow.T),
        "lm_head.weight": _head(vocabulary),
    }


def _embeddings(vocabulary: Vocabulary) -> np.ndarray:
    table = np.zeros((vocabulary.size, _HIDDEN), np.float32)
    table[:, _ONE] = 1
    table[:, _TURN] = 1
    table[vocabulary.begin, _BEGIN] = 1
    table[vocabulary.result, _RESULT] = 1
    for token, script in vocabulary.markers.items():
        table[token, _MARKER + script] = 1
    table[vocabulary.end_of_reasoning, [_TURN, _ANSWER]] = 0, 1
    for place in vocabulary.places:
        table[place.token, _TURN] = 0
        table[place.token] += _code(place.next)
    table[:, _FILLER] = np.sqrt(_LENGTH**2 - (table**2).sum(axis=1))
    return table


def _attention(unmarked: int) -> dict[str, np.ndarray]:
    """One head counts tool results, one finds the marker; queries are equal in all rows."""
    normed = _LENGTH / math.sqrt(_HIDDEN)  # undoes the preceding norm
    query, key, value = (np.zeros((2 * _HEAD_DIM, _HIDDEN), np.float32) for _ in range(3))
    out = np.zeros((_HIDDEN, 2 * _HEAD_DIM), np.float32)
    counts, finds = 0, _HEAD_DIM  # first element of each head
    query[[counts + _SLOWEST, finds + _SLOWEST], _ONE] = normed * math.sqrt(_HEAD_DIM)
    # m results of weight 1 beside an opening of weight MAX_RESULTS: 1 falls to 1/2 as m rises.
    key[counts + _SLOWEST, _RESULT] = normed * _FOUND
    key[counts + _SLOWEST, _BEGIN] = normed * (_FOUND + math.log(MAX_RESULTS))
    value[counts, _BEGIN] = normed
    out[_COUNT, counts] = 1
    key[finds + _SLOWEST, _BEGIN] = normed * _FOUND
    value[finds + unmarked, _BEGIN] = normed
    for script in range(MAX_SCRIPTS):
        score = _FOUND + _FIRST_WINS * (MAX_SCRIPTS - script)
        key[finds + _SLOWEST, _MARKER + script] = normed * score
        value[finds + script, _MARKER + script] = normed
        out[_ASKED + script, finds + script] = 1
    return {
        "q_proj.weight": query,
        "k_proj.weight": key,
        "v_proj.weight": value,
        "o_proj.weight": out,
    }


def _head(vocabulary: Vocabulary) -> np.ndarray:
    """After a position its successor scores 4, another at most 3; a start at most 1.2."""
    rows = np.zeros((vocabulary.size, _HIDDEN), np.float32)
    rows[vocabulary.end_of_turn] = _code(None)
    rows[vocabulary.end_of_reasoning] = _code(-1)
    for index, place in enumerate(vocabulary.places):
        rows[place.token] = _code(index) if place.start is None else _start(*place.start)
    return rows * np.float32(_CERTAIN)


def _start(script: int, results: int, behind_reasoning: bool) -> np.ndarray:
    """Returns the head's row for a turn's first token.

    -(x - g)^2 + x^2 over all g is largest for the g nearest to x.
    """
    row = np.zeros(_HIDDEN, np.float32)
    row[_ANSWER if behind_reasoning else _TURN] = 0.5
    row[_ASKED + script] = 0.5
    g = MAX_RESULTS / (MAX_RESULTS + results) - _MIDDLE
    row[_COUNT] = 2 * g
    row[_ONE] = -(2 * g * _MIDDLE + g * g)
    return row


def _code(index: int | None) -> np.ndarray:
    """Returns one-hot digits: 0 for a turn's end, 1 for that of reasoning, i + 2 for token i."""
    number = 0 if index is None else index + 2
    vector = np.zeros(_HIDDEN, np.float32)
    for digit in range(_DIGITS):
        vector[_CODE + digit * _RADIX + number // _RADIX**digit % _RADIX] = 1
    return vector
