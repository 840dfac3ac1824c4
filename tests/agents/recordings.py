# SPDX-License-Identifier: Apache-2.0
"""Stores clients' requests without their prose, machine names and identities.

Servers depend on the shape: fields, roles, kinds of parts, tools with their schemas, ids,
message order. Prose (instructions, descriptions) belongs to the clients and is replaced by words of
the same length. Equal texts become equal words, so that shared prefixes are preserved.
"""

import hashlib
import json
import lzma
import re
from pathlib import Path
from typing import Any

from agents.proxy import Exchange
from agents.tasks import TITLE_MARKER

FOLDER = Path(__file__).parent / "recordings"
#: Stands for the client's working directory.
PROJECT = "/home/user/project"
_LONGEST = 80  # longer texts are replaced
#: Texts of the script and of the task's files and commands, kept at any length.
_OURS = ("arguments", "input", "output", "command", "file_path", "filePath", "path", "cmd")
_PROSE = ("description", "$comment", "title", "user_id", "x-codex-turn-metadata")
_WORDS = ("the", "of", "and", "to", "in", "is", "it", "for", "with", "that", "from", "not", "can")
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_CHUNK = re.compile(r"Chunk ID: [0-9a-f]+")  # in Codex's commands
_TASK = re.compile(r"\[[a-z]+ [a-z]+\]")
_NO_UUID = "00000000-0000-4000-8000-000000000000"


def save(folder: Path, client: str, exchanges: list[Exchange], project: str) -> None:
    """Writes a client's requests that have a body, oldest first.

    Args:
        folder: target folder.
        client: its name.
        exchanges: exchanges of a whole task.
        project: the client's working directory, which becomes `PROJECT`.
    """
    asked = [[e.path, e.body] for e in exchanges if e.body is not None]
    text = json.dumps(_without_prose(asked)).replace(project, PROJECT)
    text = _CHUNK.sub("Chunk ID: 0", _UUID.sub(_NO_UUID, text))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{client}.json.xz").write_bytes(lzma.compress(text.encode(), preset=9))


def load(client: str) -> list[tuple[str, dict[str, Any]]]:
    """Returns path and body of each of a client's requests, oldest first."""
    path = FOLDER / f"{client}.json.xz"
    return [(path, body) for path, body in json.loads(lzma.decompress(path.read_bytes()))]


def _without_prose(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        if value.get("role") == "tool" or value.get("type") == "tool_result":
            return value
        return {name: _without_prose(part, name) for name, part in value.items()}
    if isinstance(value, list):
        return [_without_prose(part, key) for part in value]
    if not isinstance(value, str) or key in _OURS:
        return value
    return _words(value) if key in _PROSE or len(value) > _LONGEST else value


def _words(text: str) -> str:
    """Replaces `text` by words of the same total length; keeps a script marker at its start."""
    kept = [*_TASK.findall(text), *([TITLE_MARKER] if TITLE_MARKER in text else [])]
    words, seed = kept, hashlib.sha256(text.encode()).digest()
    size = sum(map(len, kept))
    while size < len(text):
        number = len(words)
        words.append(_WORDS[(seed[number % len(seed)] + number) % len(_WORDS)])
        size += len(words[-1]) + 1
    return " ".join(words)
