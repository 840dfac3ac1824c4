# SPDX-License-Identifier: Apache-2.0
"""Chooses a model's parsers by its files, and explains the choice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from vllm_metal.serving.parsers.files import ModelFiles
from vllm_metal.serving.parsers.table import REASONING, TOOLS, Rule
from vllm_metal.settings.extras import pip_install

TOOL_FLAGS = "--enable-auto-tool-choice --tool-call-parser"
REASONING_FLAG = "--reasoning-parser"
#: vLLM's parsers for a tokenizer's `response_template`. They must be used together.
BY_TOKENIZER = Rule("hf")


@dataclass(frozen=True)
class Choice:
    """The parsers chosen for a model, and the files they were chosen by."""

    files: ModelFiles
    tool: Rule | None  # rule of the chosen parser, if any
    reasoning: Rule | None  # rule of the chosen parser, if any
    unusable: tuple[Rule, ...] = ()  # rules that match, but whose parsers cannot be used

    @property
    def flags(self) -> tuple[str, ...]:
        """Arguments of `vllm serve` for the choice."""
        found: list[str] = []
        if self.tool is not None:
            found += [*TOOL_FLAGS.split(), self.tool.parser]
        if self.reasoning is not None:
            found += [REASONING_FLAG, self.reasoning.parser]
        return tuple(found)

    def lines(self) -> Iterator[str]:
        """Yields explanations for the log, which contain no text from the model's files."""
        yield from filter(None, (self.of_tools, self.of_reasoning, self.of_sampling))

    @property
    def of_tools(self) -> str:
        """Explains how tool calls are parsed."""
        template = self.files.template
        if self.tool is not None:
            return _explain_chosen(TOOL_FLAGS, self.tool, self.files)
        if (rule := self._first_unusable(TOOLS)) is not None:
            return _explain_unusable(TOOL_FLAGS, rule)
        if not template:
            return (
                "The model's files have no chat template: chats need --chat-template FILE, and "
                f"tool calls {TOOL_FLAGS} NAME."
            )
        if "tool" not in template:
            return "The chat template has no tools, so requests with tools are rejected."
        return (
            "No tool-call parser is known for this chat template: to serve them, pass "
            f"{TOOL_FLAGS} NAME (`vllm serve --help=tool-call-parser` lists the names)."
        )

    @property
    def of_reasoning(self) -> str:
        """Explains how reasoning is parsed; "" if the chat template has none."""
        if self.reasoning is not None:
            return _explain_chosen(REASONING_FLAG, self.reasoning, self.files)
        if (rule := self._first_unusable(REASONING)) is not None:
            return _explain_unusable(REASONING_FLAG, rule)
        if "think" not in self.files.template:
            return ""
        return (
            "No reasoning parser is chosen, as this model does not reason by default, or "
            "its format is unknown: reasoning is part of the content unless "
            f"{REASONING_FLAG} NAME is given."
        )

    @property
    def of_sampling(self) -> str:
        """Lists sampling defaults, which vLLM itself reads from the model's files."""
        if not (sampling := self.files.sampling):
            return ""
        named = ", ".join(f"{key} {value}" for key, value in sampling.items())
        return f"Default sampling parameters from generation_config.json: {named}."

    def _first_unusable(self, rules: Sequence[Rule]) -> Rule | None:
        return next((rule for rule in self.unusable if rule in rules), None)


def _explain_chosen(flags: str, rule: Rule, files: ModelFiles) -> str:
    defect = f" Known problem of this vLLM parser: it {rule.defect}." if rule.defect else ""
    return f"Chose {flags} {rule.parser}: {_why(rule, files)}.{defect}"


def _explain_unusable(flags: str, rule: Rule) -> str:
    if rule.chosen:
        package = rule.module.replace("_", "-")
        return (
            f"{flags} {rule.parser} is for this model and needs a package: {pip_install(package)}"
        )
    return f"{flags} {rule.parser} is for this model but is not chosen, because it {rule.defect}."


def _why(rule: Rule, files: ModelFiles) -> str:
    if rule is BY_TOKENIZER:
        return "the tokenizer's response_template says how to read answers"
    reasons = []
    if rule.markers:
        reasons.append(f"the chat template has {_listed(rule.markers)}")
    if rule.families:
        reasons.append(f"the model is of the family {files.model_type}")
    if rule.tokens and not rule.markers:
        reasons.append(f"the tokenizer has {_listed(rule.tokens)}")
    return " and ".join(reasons)


def _listed(parts: Sequence[str]) -> str:
    return ", ".join(parts)


def choose(files: ModelFiles) -> Choice:
    """Chooses the first matching rule for each of the two parsers."""
    found = _first(TOOLS, files), _first(REASONING, files)
    # Our rules come first: they are specific to what the chat template writes.
    if files.response_template and found == (None, None):
        return Choice(files, BY_TOKENIZER, BY_TOKENIZER)
    tool, reasoning = (rule if rule and _is_usable(rule) else None for rule in found)
    unusable = tuple(rule for rule in found if rule and not _is_usable(rule))
    return Choice(files, tool, reasoning, unusable)


def _is_usable(rule: Rule) -> bool:
    return rule.chosen and (not rule.module or find_spec(rule.module) is not None)


def _first(rules: Sequence[Rule], files: ModelFiles) -> Rule | None:
    return next((rule for rule in rules if _matches(rule, files)), None)


def _matches(rule: Rule, files: ModelFiles) -> bool:
    return (
        (not rule.families or files.model_type in rule.families)
        and all(marker in files.template for marker in rule.markers)
        and not any(part in files.template for part in rule.absent_markers)
        and all(map(files.has_token, rule.tokens))
        and _matches_thinking(rule, files)
    )


def _matches_thinking(rule: Rule, files: ModelFiles) -> bool:
    if rule.reasoning is None:
        return True
    return files.thinking.by_default if rule.reasoning == "by_default" else files.thinking.opened
