# SPDX-License-Identifier: Apache-2.0
"""Runs an agent with three tools on a folder of files until it answers without a tool call."""

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import _server
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

FOLDER = Path(__file__).resolve().parent / "invoices"
QUESTION = "What do the invoices in this folder come to, together?"
SYSTEM = "You work on a folder of files with your tools. Answer when you know; do not guess."
_MOST_TURNS = 10


def tools(folder: Path) -> Mapping[str, Callable[..., Any]]:
    """Returns the model's tools by name. They can only read files in `folder`."""

    def list_files() -> list[str]:
        """Lists the files in the folder."""
        return sorted(path.name for path in folder.iterdir() if path.is_file())

    def read_file(name: str) -> str:
        """Reads a file of the folder."""
        if name not in list_files():  # also rejects paths outside of the folder
            raise ValueError(f"there is no file {name!r}; there are {list_files()}")
        return (folder / name).read_text()

    def add_up(numbers: list[float]) -> float:
        """Adds numbers up."""
        return round(sum(numbers), 2)

    return {tool.__name__: tool for tool in (list_files, read_file, add_up)}


PARAMETERS: Mapping[str, dict[str, Any]] = {
    "list_files": {},
    "read_file": {"name": {"type": "string"}},
    "add_up": {"numbers": {"type": "array", "items": {"type": "number"}}},
}


def described(callables: Mapping[str, Callable[..., Any]]) -> list[ChatCompletionToolParam]:
    """Returns the tool descriptions, in a fixed order because they begin the prompt."""
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": tool.__doc__ or "",
                "parameters": {
                    "type": "object",
                    "properties": PARAMETERS[name],
                    "required": list(PARAMETERS[name]),
                },
            },
        }
        for name, tool in callables.items()
    ]


def call(callables: Mapping[str, Callable[..., Any]], name: str, arguments: str) -> str:
    """Returns a call's result as JSON. Errors go to the model, which may try again."""
    try:
        return json.dumps(callables[name](**json.loads(arguments)))
    except (KeyError, TypeError, ValueError) as error:
        return json.dumps({"error": str(error)})


def main(args: argparse.Namespace) -> None:
    client, model = _server.openai_client(args)
    callables = tools(args.folder)
    messages: list[ChatCompletionMessageParam] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": args.question},
    ]
    for _ in range(_MOST_TURNS):
        reply = client.chat.completions.create(
            model=model, messages=messages, tools=described(callables), temperature=0
        )
        answer = reply.choices[0].message
        messages.append(answer.to_dict())  # only append, so that earlier K/V stay cached
        if not answer.tool_calls:
            print(f"\n{(answer.content or '').strip()}")
            return
        for asked in answer.tool_calls:
            if asked.type == "function":
                result = call(callables, asked.function.name, asked.function.arguments)
                print(f"{asked.function.name}({asked.function.arguments}) = {result}")
                messages.append({"role": "tool", "tool_call_id": asked.id, "content": result})
    print(f"There was no answer in {_MOST_TURNS} turns.")


if __name__ == "__main__":
    options = _server.parser(__doc__)
    options.add_argument("question", nargs="?", default=QUESTION, help="default: %(default)s")
    options.add_argument("--folder", type=Path, default=FOLDER, help="default: some invoices")
    sys.exit(_server.run(main, options.parse_args()))
