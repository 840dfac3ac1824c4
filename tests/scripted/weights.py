# SPDX-License-Identifier: Apache-2.0
"""Weights of a Llama of one layer that says scripts: all by formula, none learned.

The residual stream of a token has, by column: a one; what makes all tokens equally long; whether
it opens a prompt, or a tool result, or is a script's marker; whether a turn may start behind it, or
an answer behind reasoning; and, as one-hot digits, the place that follows it in its script. Two
heads of attention add to it how many tool results the prompt has, and which script is asked for.
The MLP adds nothing. The head reads either the digits, or, behind a token of text, which turn is to
start.
"""

import math
from typing import Any

import numpy as np

from scripted.vocabulary import Vocabulary

#: Scripts of a checkpoint, the one without a marker among them; and tool results of a prompt.
MAX_SCRIPTS, MAX_RESULTS = 24, 64

_DIGITS, _RADIX = 4, 16  # so that 65536 places have a code
_HEAD_DIM = 32
_LENGTH = 3.0  # of each token's vector, the same for all: so RMSNorm only scales by a known factor
_ONE, _FILLER, _BEGIN, _RESULT, _TURN, _ANSWER, _COUNT = range(7)
_MARKER = 8  # MAX_SCRIPTS columns: is this script's marker
_ASKED = _MARKER + MAX_SCRIPTS  # MAX_SCRIPTS columns: this script is asked for
_CODE = _ASKED + MAX_SCRIPTS  # _DIGITS * _RADIX columns
_HIDDEN = 128
_SLOWEST = _HEAD_DIM // 2 - 1  # the dimension that RoPE turns least: 6e-12 a token
_FOUND = 40.0  # a score beside which 10^6 tokens with a score of 0 weigh 4e-12
_FIRST_WINS = 40.0  # by how much one script's marker outweighs the next one's
_MIDDLE = 0.75  # of 0.5 to 1, the values of _COUNT
#: So large that the best token is certain at any temperature up to one. A power of two is exact.
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
    """The weights by the names of transformers, all float32.

    Args:
        vocabulary: ids of what the weights know.
        unmarked: the script that is asked for where no marker is.
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
    """One head counts tool results, one finds the marker; every row asks the same of both."""
    normed = _LENGTH / math.sqrt(_HIDDEN)  # undoes the norm before
    query, key, value = (np.zeros((2 * _HEAD_DIM, _HIDDEN), np.float32) for _ in range(3))
    out = np.zeros((_HIDDEN, 2 * _HEAD_DIM), np.float32)
    counts, finds = 0, _HEAD_DIM  # where each head begins
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
    """Behind a place its successor has 4, another place at most 3; a start at most 1.2."""
    rows = np.zeros((vocabulary.size, _HIDDEN), np.float32)
    rows[vocabulary.end_of_turn] = _code(None)
    rows[vocabulary.end_of_reasoning] = _code(-1)
    for index, place in enumerate(vocabulary.places):
        rows[place.token] = _code(index) if place.start is None else _start(*place.start)
    return rows * np.float32(_CERTAIN)


def _start(script: int, results: int, behind_reasoning: bool) -> np.ndarray:
    """The row of a turn's first place.

    Of -(x - g)^2 + x^2 over all g, the largest is that of the g nearest to x.
    """
    row = np.zeros(_HIDDEN, np.float32)
    row[_ANSWER if behind_reasoning else _TURN] = 0.5
    row[_ASKED + script] = 0.5
    g = MAX_RESULTS / (MAX_RESULTS + results) - _MIDDLE
    row[_COUNT] = 2 * g
    row[_ONE] = -(2 * g * _MIDDLE + g * g)
    return row


def _code(index: int | None) -> np.ndarray:
    """One-hot digits of a place: of the end of a turn, 0; of reasoning, 1; of place i, i + 2."""
    number = 0 if index is None else index + 2
    vector = np.zeros(_HIDDEN, np.float32)
    for digit in range(_DIGITS):
        vector[_CODE + digit * _RADIX + number // _RADIX**digit % _RADIX] = 1
    return vector
