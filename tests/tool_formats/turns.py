# SPDX-License-Identifier: Apache-2.0
"""Makes model turns from chat templates, and parses them with vLLM's parsers."""

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

#: Two tools with the kinds of arguments in vLLM's own parser tests.
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
    """A turn's meaning, intended or parsed."""

    reasoning: str | None
    content: str | None
    calls: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Turn:
    """A model's output in one turn, and its meaning."""

    text: str
    meant: Read
    prompt: str = ""


def render(template: str, messages: list[dict[str, Any]], *, prompt: bool, **options: Any) -> str:
    """Renders messages with transformers as vLLM does for each request."""
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
    """Returns the template's text of an assistant turn, from the generation prompt to its end.

    Args:
        template: the family's template.
        ends: tokens that end the turn; vLLM stops there, and excludes them from the text.
        thought: the turn's reasoning.
        content: the turn's text.
        calls: name and arguments of each call.
        arguments_as_text: pass the arguments to the template as JSON text.
        options: more template variables.

    Returns:
        The turn; None if a model cannot write it because the prompt begins it otherwise,
        for example with reasoning.
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
    """Makes a byte tokenizer in which each of `tokens` is one token."""
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
    """vLLM's parsers for one choice, created and called as in its chat endpoint."""

    def __init__(self, choice: Choice, tokens: Sequence[str]) -> None:
        """Takes the choice, and the family's special tokens."""
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
        """Returns the text's tokens, grouped by character."""
        special = "|".join(map(re.escape, self._tokens)) or "(?!)"
        parts = re.findall(f"{special}|.", text, re.DOTALL)
        for part in {*parts} - self._ids.keys():
            self._ids[part] = self._tokenizer.encode(part, add_special_tokens=False)
        return [(part, self._ids[part]) for part in parts]

    def whole(self, turn: Turn) -> Read:
        """Parses a complete answer."""
        parser, request = self._made()
        ids = [token for _, tokens in self.units(turn.text) for token in tokens]
        reasoning, content, calls = parser.parse(
            turn.text, request, enable_auto_tools=True, model_output_token_ids=ids
        )
        return _read(reasoning, content, [(call.name, call.arguments) for call in calls or ()])

    def streamed(self, turn: Turn, cuts: Iterable[int]) -> Read:
        """Parses an answer streamed in parts, cut after these units."""
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
    """Strips surrounding whitespace, which is markup of the template."""
    texts = ((text or "").strip() or None for text in (reasoning, content))
    return Read(*texts, tuple((name, _object(text)) for name, text in calls))


def _object(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text  # which equals no object
