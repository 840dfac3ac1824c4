# SPDX-License-Identifier: Apache-2.0
"""Changes between turns that make clients miss the prefix cache, as conversations."""

import json
from dataclasses import dataclass, field
from typing import Any

from vllm_metal.serving.prefix_misses.prompt import Prompt

#: Long enough that a miss is reported.
RULES = "You are a careful assistant for a bakery. " + " ".join(
    f"Rule {number}: ask before you bake batch number {number}." for number in range(6)
)
TALK = [
    {"role": "user", "content": "Which flour is best for a baguette of the French kind?"},
    {"role": "assistant", "content": "A strong white flour of type 65, with little gluten added."},
    {"role": "user", "content": "And how long does the dough have to rest in a cold kitchen?"},
    {
        "role": "assistant",
        "content": "About two hours at eighteen degrees, then one in the basket.",
    },
    {"role": "user", "content": "What do I do when the crust stays pale after half an hour?"},
]
NEXT = [
    {"role": "assistant", "content": "Raise the heat and give it steam in the first ten minutes."},
    {"role": "user", "content": "Thank you. And the oven's door?"},
]


@dataclass(frozen=True)
class Shape:
    """A conversation, the next one, and the expected miss report."""

    before: list[dict[str, Any]]
    now: list[dict[str, Any]]
    cause: str | None  # None: no miss
    message: int | None = None
    role: str | None = None
    tools: tuple[list[dict[str, Any]], list[dict[str, Any]]] = field(default=([], []))


def _system(text: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": text}]


def _tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"path": {"type": "string"}}}
    return {
        "type": "function",
        "function": {"name": name, "description": f"To {name} files", "parameters": parameters},
    }


def _at_head(before: str, now: str, cause: str) -> Shape:
    """Changes a line before the rules in the next turn."""
    first, second = (_system(f"{line}\n{RULES}") + TALK for line in (before, now))
    return Shape(first, second + NEXT, cause, 0, "system")


def _changed(index: int, content: str) -> list[dict[str, Any]]:
    talk = [dict(message) for message in TALK]
    talk[index]["content"] = content
    return talk


_TOOLS = [_tool("read"), _tool("write"), _tool("list")]
PLAIN = _system(RULES) + TALK
SHAPES = {
    "the day": _at_head("Today is 2026-11-25.", "Today is 2026-11-26.", "date"),
    "the time": _at_head("It is 10:32:05 now.", "It is 10:41:40 now.", "date"),
    "a billing header": _at_head(
        "x-billing: version=2.1.330; cch=ab12f901;",
        "x-billing: version=2.1.330; cch=77fe0d1a;",
        "identifier",
    ),
    "a session's UUID": _at_head(
        "Session 7b1c2d3e-1111-2222-3333-444455556666",
        "Session 0c8a4d55-9111-2222-3333-444455556abc",
        "identifier",
    ),
    "tokens left": _at_head("Tokens left: 199500.", "Tokens left: 188211.", "counter"),
    "the number of the turn": _at_head("Turn 9.", "Turn 10.", "counter"),
    "another working folder": _at_head("Folder: bread/rye", "Folder: bread/wheat", "edit"),
    "an edited answer": Shape(
        PLAIN,
        _system(RULES) + _changed(1, "A weak brown flour of type 65, with little gluten added."),
        *("edit", 2, "assistant"),
    ),
    "an edited question": Shape(
        PLAIN,
        _system(RULES) + _changed(0, "Which grain is best for a baguette of the French kind?"),
        *("edit", 1, "user"),
    ),
    "a date within the history": Shape(
        _system(RULES) + _changed(0, "On November 25, 2026 I asked: which flour is best?"),
        _system(RULES) + _changed(0, "On November 26, 2026 I asked: which flour is best?") + NEXT,
        *("date", 1, "user"),
    ),
    "an old turn taken out": Shape(
        PLAIN, _system(RULES) + TALK[2:] + NEXT, "message_removed", 1, "user"
    ),
    "a reminder put in": Shape(
        PLAIN,
        [*_system(RULES), {"role": "user", "content": "Be brief from here on, please."}, *TALK],
        *("message_inserted", 1, "user"),
    ),
    "tools in another order": Shape(
        PLAIN, PLAIN + NEXT, "tools_reordered", tools=(_TOOLS, _TOOLS[::-1])
    ),
    "one tool more": Shape(PLAIN, PLAIN + NEXT, "tools_changed", tools=(_TOOLS, _TOOLS[1:])),
    "another conversation": Shape(
        _system("Answer in French. " + RULES) + TALK,
        [
            *_system("Parle comme un pirate, et jamais autrement. " * 12),
            {"role": "user", "content": "Who wrote Faust?"},
        ],
        "first_seen",
    ),
    "the next turn": Shape(PLAIN, PLAIN + NEXT, None),
    "another question under the same rules": Shape(
        PLAIN, [*_system(RULES), {"role": "user", "content": "Hello?"}], None
    ),
}


def decode(tokens):
    return "".join(map(chr, tokens))


def rendered(messages, tools=(), thoughts=True):
    """Renders a prompt with a simple template, tools first, with characters as tokens."""
    text = json.dumps(tools) * bool(tools)
    for message in messages:
        content = message["content"]
        if not thoughts:
            content = content.partition("</think>")[2] or content
        text += f"<{message['role']}>{content}</>"
    return Prompt.of(list(map(ord, text + "<assistant>")), messages, tools)
