# SPDX-License-Identifier: Apache-2.0
"""Defines scripts of turns, and the text of each turn."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

END_OF_REASONING = "</think>"


@dataclass(frozen=True)
class Call:
    """One tool call.

    Attributes:
        name: the tool's name in the client.
        arguments: an object; or text instead of one, for invalid JSON.
    """

    name: str
    arguments: Mapping[str, Any] | str

    @property
    def text(self) -> str:
        """The call as Qwen and Hermes models write it, for vLLM's `hermes` parser."""
        object_ = self.arguments
        arguments = object_ if isinstance(object_, str) else json.dumps(object_, ensure_ascii=False)
        name = json.dumps(self.name)
        return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'


@dataclass(frozen=True)
class Turn:
    """An answer of the model: reasoning, then text, then calls; text or calls are required.

    Attributes:
        text: its text.
        calls: its tool calls, in order.
        reasoning: its reasoning.
        results: number of tool results that the client sends for it; None: one per call.
    """

    text: str = ""
    calls: tuple[Call, ...] = ()
    reasoning: str = ""
    results: int | None = None

    @property
    def answer(self) -> str:
        """The answer after the reasoning."""
        return "\n".join([*([self.text] if self.text else []), *(call.text for call in self.calls)])

    @property
    def counted(self) -> int:
        """Number of tool results that this turn adds to the prompt."""
        return len(self.calls) if self.results is None else self.results


@dataclass(frozen=True)
class Script:
    """Turns in order. The number of tool results in a prompt selects the next turn; after the
    last one, the last again.

    Attributes:
        turns: the turns; all but the last have tool results, which distinguish them.
        marker: text that selects this script, anywhere in the prompt; of
            several scripts the first wins. None: the default script.
    """

    turns: tuple[Turn, ...]
    marker: str | None = None

    def starts(self) -> list[int]:
        """Number of tool results in the prompt before each turn."""
        counts = [0]
        for turn in self.turns[:-1]:
            counts.append(counts[-1] + turn.counted)
        return counts


def check(scripts: tuple[Script, ...], max_scripts: int, max_results: int) -> None:
    """Rejects scripts that no checkpoint can say.

    Args:
        scripts: all scripts of a checkpoint.
        max_scripts: maximum number of scripts.
        max_results: maximum number of tool results in a prompt.

    Raises:
        ValueError: a script is invalid; the message has its name and the reason.
    """
    if [script.marker for script in scripts].count(None) != 1:
        raise ValueError("scripts: one has to be without a marker, and one only")
    if len(scripts) > max_scripts:
        raise ValueError(f"scripts: {len(scripts)} of them; there is room for {max_scripts}")
    for script in scripts:
        where = f"script {script.marker!r}" if script.marker else "the script without a marker"
        starts = script.starts() if script.turns else []
        if not starts or not all(turn.answer for turn in script.turns):
            raise ValueError(f"{where}: it needs turns, and each a text or a call")
        if len(set(starts)) < len(starts):
            raise ValueError(f"{where}: a turn without tool results is not its last")
        if starts[-1] > max_results:
            raise ValueError(f"{where}: {starts[-1]} tool results; {max_results} can be counted")
