# SPDX-License-Identifier: Apache-2.0
"""Stores the results of each client's last test, for docs/agents.md."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from agents.answers import Answer
from agents.tasks import TITLE

FILE = Path(__file__).parent / "results.json"


@dataclass
class Result:
    """A client's row.

    Attributes:
        version: tested version.
        did: tasks that ended as scripted, among `edit`, `cut`, `broken` and `steps`.
        turns: answers in the longest conversation.
        first, last: tokens of its first and last prompt.
        least: lowest cached share from its second turn on, 0 to 1.
    """

    version: str
    did: list[str] = field(default_factory=list)
    turns: int = 0
    first: int = 0
    last: int = 0
    least: float = 0.0


def note(file: Path, client: str, version: str, task: str, answers: Sequence[Answer] = ()) -> None:
    """Records in a file that a client completed a task.

    Args:
        file: results file; created if missing.
        client: its name.
        version: its version.
        task: the completed task.
        answers: the conversation, if its cached share is to be recorded.
    """
    results = load(file) if file.exists() else {}
    result = results.setdefault(client, Result(version))
    if result.version != version:
        result = results[client] = Result(version)
    result.did = sorted({*result.did, task})
    shares = shares_of(answers)
    if shares:
        turns = [answer for answer in answers if answer.text != TITLE]
        result.turns, result.least = len(turns), round(min(shares), 3)
        result.first, result.last = turns[0].prompt or 0, turns[-1].prompt or 0
    kept = {name: asdict(each) for name, each in sorted(results.items())}
    file.write_text(json.dumps(kept, indent=1) + "\n")


def load(file: Path = FILE) -> dict[str, Result]:
    """Returns the results in a file, by client."""
    return {name: Result(**each) for name, each in json.loads(file.read_text()).items()}


def shares_of(answers: Sequence[Answer]) -> list[float]:
    """Returns cached shares from a conversation's second turn on; title requests do not count.

    Raises:
        ValueError: an answer has no cached count.
    """
    turns = [answer for answer in answers if answer.text != TITLE][1:]
    shares = [answer.share for answer in turns]
    if None in shares:
        raise ValueError("an answer has no usage, or no details of it")
    return [share for share in shares if share is not None]
