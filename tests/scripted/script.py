# SPDX-License-Identifier: Apache-2.0
"""What a script checkpoint is to say: scripts of turns, and the text of each."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

END_OF_REASONING = "</think>"


@dataclass(frozen=True)
class Call:
    """One tool call.

    Attributes:
        name: the tool's, as the client has it.
        arguments: an object; or text that stands where the object should, as broken JSON is.
    """

    name: str
    arguments: Mapping[str, Any] | str

    @property
    def text(self) -> str:
        """The call as Qwen's and Hermes's models write it, which vLLM's parser `hermes` reads."""
        object_ = self.arguments
        arguments = object_ if isinstance(object_, str) else json.dumps(object_, ensure_ascii=False)
        name = json.dumps(self.name)
        return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'


@dataclass(frozen=True)
class Turn:
    """One answer of the model: reasoning, then text, then calls; at least one of the latter two.

    Attributes:
        text: what it says.
        calls: its tool calls, in order.
        reasoning: what it thinks first.
        results: how many tool results the client sends for it; None: one a call.
    """

    text: str = ""
    calls: tuple[Call, ...] = ()
    reasoning: str = ""
    results: int | None = None

    @property
    def answer(self) -> str:
        """What stands behind the reasoning."""
        return "\n".join([*([self.text] if self.text else []), *(call.text for call in self.calls)])

    @property
    def counted(self) -> int:
        """How many tool results a prompt has more behind this turn than before it."""
        return len(self.calls) if self.results is None else self.results


@dataclass(frozen=True)
class Script:
    """Turns in their order. The number of tool results in a prompt says which is next; behind the
    last of them, the last again.

    Attributes:
        turns: one after another; each but the last has tool results, by which they are told apart.
        marker: text by which a prompt asks for this script, wherever in the prompt it stands; of
            several scripts the first counts. None: what every other prompt gets.
    """

    turns: tuple[Turn, ...]
    marker: str | None = None

    def starts(self) -> list[int]:
        """How many tool results a prompt has before each turn."""
        counts = [0]
        for turn in self.turns[:-1]:
            counts.append(counts[-1] + turn.counted)
        return counts


def check(scripts: tuple[Script, ...], max_scripts: int, max_results: int) -> None:
    """Refuses what no checkpoint can say.

    Args:
        scripts: all of a checkpoint.
        max_scripts: how many it has room for.
        max_results: how many tool results it can count.

    Raises:
        ValueError: names the script, and what is wrong with it.
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
