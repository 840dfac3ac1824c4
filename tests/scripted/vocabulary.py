# SPDX-License-Identifier: Apache-2.0
"""A tokenizer with a distinct token for each position of a script."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from scripted.script import END_OF_REASONING, Script, Turn

#: Begins every prompt, once: attention to it is compared with that to tool results.
BEGIN = "<|begin|>"
#: Begins every tool result in a prompt.
RESULT = "<tool_response>"
END_OF_TURN = "<|im_end|>"

# Numbers between these two distinguish equal pieces. The decoder drops them.
_OPEN, _CLOSE = "\ue000", "\ue001"


@dataclass(frozen=True)
class Place:
    """A token of a script.

    Attributes:
        token: its id.
        next: index in `Vocabulary.places` of the next token; None: the turn ends; -1: the
            reasoning ends.
        start: (script, tool results before the turn, whether after the reasoning), for the first
            token of a turn or of its answer after reasoning; otherwise None.
    """

    token: int
    next: int | None
    start: tuple[int, int, bool] | None


@dataclass(frozen=True)
class Vocabulary:
    """Token ids that the weights depend on, and the vocabulary size."""

    size: int
    begin: int
    result: int
    end_of_turn: int
    end_of_reasoning: int
    markers: dict[int, int]  # marker id to script
    places: tuple[Place, ...]


def write(folder: Path, base: Path, scripts: Sequence[Script], reasons: bool) -> Vocabulary:
    """Writes tokenizer.json.

    No merge produces a script's tokens, so text is never encoded to one: a client's
    history consists of base tokens, and a bigram holds only in generated text.

    Args:
        folder: target folder.
        base: folder with a byte-level BPE tokenizer for text.
        scripts: valid scripts.
        reasons: whether turns begin with reasoning, possibly empty.
    """
    spec = json.loads((base / "tokenizer.json").read_text())
    vocab = spec["model"]["vocab"]
    tokens = _Tokens(vocab, Tokenizer.from_file(str(base / "tokenizer.json")))
    first_added = len(vocab)
    places: list[Place] = []
    for number, script in enumerate(scripts):
        for results, turn in zip(script.starts(), script.turns, strict=True):
            if reasons:
                _add(places, tokens.of(f"{turn.reasoning}\n"), (number, results, False), -1)
            text = _behind(turn, reasons)
            _add(places, tokens.of(text), (number, results, reasons), None)
    markers = [script.marker for script in scripts if script.marker]
    added = [BEGIN, RESULT, "<think>", END_OF_REASONING, *markers]
    ids = {content: len(vocab) + index for index, content in enumerate(added)}
    spec["added_tokens"] += [_added_token(content, ids[content]) for content in added]
    numbers = {"type": "Replace", "pattern": {"Regex": f"{_OPEN}[0-9]+{_CLOSE}"}, "content": ""}
    spec["decoder"] = {"type": "Sequence", "decoders": [numbers, spec["decoder"]]}
    (folder / "tokenizer.json").write_text(json.dumps(spec, ensure_ascii=False))
    assert first_added + len(places) == len(vocab)
    return Vocabulary(
        size=len(vocab) + len(added),
        begin=ids[BEGIN],
        result=ids[RESULT],
        end_of_turn=vocab[END_OF_TURN],
        end_of_reasoning=ids[END_OF_REASONING],
        markers={
            ids[script.marker]: number for number, script in enumerate(scripts) if script.marker
        },
        places=tuple(places),
    )


def _behind(turn: Turn, reasons: bool) -> str:
    """Returns the answer after its reasoning, if any."""
    return f"\n\n{turn.answer}" if reasons else turn.answer


def _add(
    places: list[Place], tokens: Iterable[int], start: tuple[int, int, bool], end: int | None
) -> None:
    ids = list(tokens)
    for index, token in enumerate(ids):
        behind = end if index == len(ids) - 1 else len(places) + 1
        places.append(Place(token, behind, start if index == 0 else None))


class _Tokens:
    """Adds a token to the vocabulary for each base token of a text."""

    def __init__(self, vocab: dict[str, int], base: Tokenizer):
        self._vocab, self._base = vocab, base

    def of(self, text: str) -> list[int]:
        """Returns the new ids in order."""
        return [self._new(piece) for piece in self._base.encode(text).tokens]

    def _new(self, piece: str) -> int:
        number = len(self._vocab)
        self._vocab[f"{_OPEN}{number}{_CLOSE}{piece}"] = number
        return number


def _added_token(content: str, token: int) -> dict[str, Any]:
    plain = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return {"id": token, "content": content} | dict.fromkeys(plain, False)
