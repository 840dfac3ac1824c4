# SPDX-License-Identifier: Apache-2.0
"""Turns as a model writes them, cut out of its own chat template, and vLLM's parsers on them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser import ParserManager

from vllm_metal.serving.parsers.choice import Choice

#: Two tools, with the kinds of arguments that vLLM's own tests of its parsers ask for.
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "A city"},
                    "days": {"type": "integer", "description": "How many days"},
                },
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "write_file",
            "description": "Writes a file",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string", "description": "Where"},
                    "text": {"type": "string", "description": "What"},
                },
                "required": ["path", "text"],
            },
        },
    },
]
WEATHER = ("get_weather", {"city": "Łódź", "days": 3})
FILE = ("write_file", {"path": "a/b.py", "text": 'if x < 3 and y > "2":\n    print([1, {"a": 2}])'})
QUESTION = "What is the weather in Łódź?"
THOUGHT = "The user asks for a city, so I look it up."
ANSWER = "It rains; take an umbrella."


@dataclass(frozen=True)
class Read:
    """What a turn means, as it was meant or as a parser takes it."""

    reasoning: str | None
    content: str | None
    calls: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Turn:
    """What a model writes in one turn, and what it means."""

    text: str
    meant: Read
    prompt: str = ""


def render(template: str, messages: list[dict[str, Any]], *, prompt: bool, **options: Any) -> str:
    """What transformers makes of messages, as vLLM has it do for each request."""
    given = {"bos_token": "", "eos_token": "", **options}
    ((text,), _) = render_jinja_template(
        [messages], chat_template=template, add_generation_prompt=prompt, **given
    )
    return text


def turn(
    template: str,
    ends: Sequence[str],
    *,
    thought: str | None = None,
    content: str | None = None,
    calls: Sequence[tuple[str, dict[str, Any]]] = (),
    arguments_as_text: bool = False,
    **options: Any,
) -> Turn | None:
    """What the template writes of an assistant's turn, between the generation prompt and its end.

    Args:
        template: of the family.
        ends: tokens that end the turn; vLLM stops there, and they are no part of the text.
        thought: of the turn.
        content: likewise.
        calls: name and arguments of each call.
        arguments_as_text: hand the template arguments as JSON, not as an object.
        options: more variables of the template.

    Returns:
        The turn; None where a model cannot write it, as its prompt begins otherwise: with a
        thought, say, and the turn has none.
    """
    question = {"role": "user", "content": QUESTION}
    answer: dict[str, Any] = {"role": "assistant", "content": content or ""}
    if thought:
        answer["reasoning_content"] = answer["reasoning"] = answer["thinking"] = thought
    if calls:
        answer["tool_calls"] = [
            {
                "id": f"call{place:05d}",
                "type": "function",
                "function": {
                    "name": name,
                    "arguments": json.dumps(given, ensure_ascii=False)
                    if arguments_as_text
                    else given,
                },
            }
            for place, (name, given) in enumerate(calls)
        ]
    tools = TOOLS
    prompt = render(template, [question], prompt=True, tools=tools, **options)
    whole = render(template, [question, answer], prompt=False, tools=tools, **options)
    if not whole.startswith(prompt):
        return None
    text = whole[len(prompt) :]
    for end in ends:
        text = text.partition(end)[0] if end in text else text
    return Turn(text, Read(thought, content, tuple(calls)), prompt)


def tokenizer(tokens: Sequence[str], template: str) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes in which each of `tokens` is one token."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {letter: place for place, letter in enumerate(sorted(alphabet))}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_tokens([AddedToken(token, normalized=False, special=False) for token in tokens])
    fast = PreTrainedTokenizerFast(tokenizer_object=made)
    fast.chat_template = template
    return fast


class Reader:
    """vLLM's parsers of one choice, as its chat endpoint makes and calls them."""

    def __init__(self, choice: Choice, tokens: Sequence[str]) -> None:
        """Takes the choice, and what the family's tokenizer has as one token each."""
        self._tokens = sorted(tokens, key=len, reverse=True)
        self._tokenizer = tokenizer(tokens, choice.files.template)
        self._ids: dict[str, list[int]] = {}
        self._class = ParserManager.get_parser(
            tool_parser_name=choice.tool and choice.tool.parser,
            reasoning_parser_name=choice.reasoning and choice.reasoning.parser,
            enable_auto_tools=choice.tool is not None,
            tokenizer=self._tokenizer,
        )

    def units(self, text: str) -> list[tuple[str, list[int]]]:
        """The text's tokens, with those that make one letter together."""
        special = "|".join(map(re.escape, self._tokens)) or "(?!)"
        parts = re.findall(f"{special}|.", text, re.DOTALL)
        for part in {*parts} - self._ids.keys():
            self._ids[part] = self._tokenizer.encode(part, add_special_tokens=False)
        return [(part, self._ids[part]) for part in parts]

    def whole(self, turn: Turn) -> Read:
        """What it makes of an answer that is there at once."""
        parser, request = self._made()
        ids = [token for _, tokens in self.units(turn.text) for token in tokens]
        reasoning, content, calls = parser.parse(
            turn.text, request, enable_auto_tools=True, model_output_token_ids=ids
        )
        return _read(reasoning, content, [(call.name, call.arguments) for call in calls or ()])

    def streamed(self, turn: Turn, cuts: Iterable[int]) -> Read:
        """What it makes of an answer that comes in parts, cut behind these units."""
        parser, request = self._made()
        units = self.units(turn.text)
        prompt = [token for _, tokens in self.units(turn.prompt) for token in tokens]
        ends = [0, *sorted(set(cuts) - {0, len(units)}), len(units)]
        reasoning, content = "", ""
        names: dict[int, str] = {}
        arguments: dict[int, str] = {}
        for start, end in pairwise(ends):
            delta = parser.parse_delta(
                "".join(text for text, _ in units[start:end]),
                [token for _, tokens in units[start:end] for token in tokens],
                request,
                prompt,
                finished=end == len(units),
            )
            if delta is None:
                continue
            reasoning += delta.reasoning or ""
            content += delta.content or ""
            for call in delta.tool_calls or ():
                function = call.function
                if function is not None and function.name:
                    names[call.index] = names.get(call.index, "") + function.name
                if function is not None and function.arguments:
                    arguments[call.index] = arguments.get(call.index, "") + function.arguments
        calls = [(names.get(index, ""), arguments.get(index, "")) for index in sorted(names)]
        return _read(reasoning, content, calls)

    def _made(self) -> tuple[Any, ChatCompletionRequest]:
        request = ChatCompletionRequest(
            model="m", messages=[{"role": "user", "content": QUESTION}], tools=TOOLS
        )
        parser = self._class(self._tokenizer, request.tools, chat_template_kwargs={})
        return parser, request


def _read(reasoning: str | None, content: str | None, calls: Sequence[tuple[str, str]]) -> Read:
    """Whitespace around a text is markup of the template's, and not compared."""
    texts = ((text or "").strip() or None for text in (reasoning, content))
    return Read(*texts, tuple((name, _object(text)) for name, text in calls))


def _object(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text  # which no object equals
