# SPDX-License-Identifier: Apache-2.0
"""Explains a wrong argument of a command in one line, with the remedy.

argparse prints the whole usage, names vLLM's functions, and lists choices that are not supported.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from vllm_metal.settings.values import did_you_mean

_INVALID = re.compile(r"argument (\S+): invalid (\w+) value: '(.*)'", re.DOTALL)
_NO_CHOICE = re.compile(r"argument (\S+): invalid choice: '?(.*?)'? \(choose from .*", re.DOTALL)
_NOT_CONVERTED = re.compile(r"argument (\S+): Value (.*) cannot be converted to <.*", re.DOTALL)
_NO_VALUE = re.compile(r"argument (\S+): expected .*argument.*")
_NO_ADAPTER = re.compile(r"Invalid (?:JSON format|fields) for --lora-modules: (.*)", re.DOTALL)
_NO_VALUE_WANTED = re.compile(r"argument (\S+): ignored explicit argument '(.*)'", re.DOTALL)
_AMBIGUOUS = re.compile(r"ambiguous option: (\S+) could match (.*)")
#: pydantic's report of a JSON configuration: one line names a field, the next gives the reason.
_CONFIGURATION = re.compile(r"argument (\S+): \d+ validation errors? for \w+\n(.*)", re.DOTALL)
_FIELD = re.compile(
    r"^(?:(\S+)\n)?  (.+?) \[type=(\w+), input_value=(.*), input_type=", re.MULTILINE
)
_MISSING = re.compile(r"the following arguments are required: (.*)")
_UNKNOWN = re.compile(r"unrecognized arguments: (.*)")
#: Descriptions of argument types, by the names of the functions that parse them.
_EXAMPLES = {
    "int": "a whole number",
    "float": "a number, such as 0.9",
    "human_readable_int": "a whole number, such as 8192 or 8k",
    "human_readable_int_or_auto": "a whole number, such as 8192 or 8k",
}
_JSON, _LIST = "JSON, such as '{\"key\": 1}'", "JSON, such as '[\"a\"]'"
#: Examples for options with few keys, in place of _JSON.
_OWN_JSON = {
    "--speculative-config": """JSON, such as '{"method": "ngram", "num_speculative_tokens": 5}'""",
}
_MOST_CHOICES = 12  # longer lists are not printed


def of_command(parser: argparse.ArgumentParser, name: str | None) -> argparse.ArgumentParser:
    """Returns the parser of a command's options, or `parser` if there is no such command."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction) and name in action.choices:
            found: argparse.ArgumentParser = action.choices[name]
            return found
    return parser


def explain(
    parser: argparse.ArgumentParser,
    message: str,
    served: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> str:
    """Returns the line for a message of argparse.

    Args:
        parser: the parser that rejected an argument.
        message: argparse's reason.
        served: maps options to the choices that are supported here, a subset of vLLM's.
    """
    if found := _NO_CHOICE.fullmatch(message):
        return _explain_choices(parser, _first(found[1]), found[2], served)
    if found := _INVALID.fullmatch(message):
        return f"{_first(found[1])}={found[3]} is not {_wanted(parser, found[1], found[2])}"
    if found := _NOT_CONVERTED.fullmatch(message):
        name = _first(found[1])
        wanted = _EXAMPLES["human_readable_int"]
        if "<function loads" in message:
            wanted = _OWN_JSON.get(name, _JSON)
        return f"{name}={found[2]} is not {wanted}"
    if found := _NO_VALUE.fullmatch(message):
        return f"{_first(found[1])} needs a value"
    if found := _NO_VALUE_WANTED.fullmatch(message):
        return f"{_first(found[1])} takes no value: leave out {found[2]}"
    if found := _AMBIGUOUS.fullmatch(message):
        return f"{found[1]} is not an option: did you mean {found[2].replace(', ', ' or ')}?"
    if found := _CONFIGURATION.fullmatch(message):
        return _explain_configuration(_first(found[1]), found[2])
    if found := _MISSING.fullmatch(message):
        choices = getattr(_actions(parser).get(found[1]), "choices", None) or ()
        what = ", ".join(map(str, choices))
        advice = f"choose one of {what}" if what else f"`{parser.prog} --help` says what it is"
        return f"{found[1]} is missing: {advice}"
    if found := _UNKNOWN.match(message):
        return _explain_unknown(parser, found[1])
    if found := _NO_ADAPTER.match(message):
        return f"--lora-modules={found[1]} is neither NAME=PATH nor JSON"
    return message.removeprefix("argument ")


def _wanted(parser: argparse.ArgumentParser, names: str, kind: str) -> str:
    # Describes the value of an option that a function parses.
    if kind == "loads":
        action = _actions(parser).get(_first(names))
        is_list = isinstance(getattr(action, "default", None), list)
        return _LIST if is_list else _OWN_JSON.get(_first(names), _JSON)
    return _EXAMPLES.get(kind, kind)


def _explain_configuration(name: str, report: str) -> str:
    wrong = []
    for field, why, kind, given in _FIELD.findall(report):
        if kind in ("json_invalid", "dataclass_type"):
            return f"{name}={given.strip(chr(39))} is not {_OWN_JSON.get(name, _JSON)}"
        if kind in ("unexpected_keyword_argument", "extra_forbidden"):
            wrong.append(f"there is no key {field!r}")
        else:
            wrong.append(f"{field}={given}: {why.replace('Input should be', 'it must be')}")
    return f"{name}: {'; '.join(wrong) or ' '.join(report.split())}"


def _first(names: str) -> str:
    # argparse joins the names of one option with "/".
    return names.partition("/")[0]


def _explain_choices(
    parser: argparse.ArgumentParser, name: str, given: str, served: Mapping[str, Sequence[str]]
) -> str:
    action = _actions(parser).get(name)
    if not name.startswith("-"):
        name, given = given, ""
    known = [str(choice) for choice in getattr(action, "choices", None) or ()]
    if isinstance(action, argparse._SubParsersAction):
        return f"there is no command {name}" + (
            did_you_mean(name, known) or f": {', '.join(known)}"
        )
    known = list(served.get(name, known))
    refusal = f"{name}={given} is not supported" if given else f"{name} is not supported"
    if len(known) > _MOST_CHOICES:
        return f"{refusal}{did_you_mean(given, known)} `vllm serve --help={name}` lists what is"
    return f"{refusal}: choose one of {', '.join(known)}"


def _explain_unknown(parser: argparse.ArgumentParser, arguments: str) -> str:
    line = f"unknown: {arguments}"
    options = [name for name in _actions(parser) if name.startswith("-")]
    for given in arguments.split():
        if not given.startswith("-"):
            continue
        line += did_you_mean(given.partition("=")[0], options)
    return line


def _actions(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    # By name; options of a command's subcommands are included.
    return dict(_named(parser))


def _named(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.Action]]:
    for action in parser._actions:
        for name in action.option_strings or (action.dest, str(action.metavar)):
            yield name, action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _named(command)
