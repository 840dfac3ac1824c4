# SPDX-License-Identifier: Apache-2.0
"""Reads the files that show a model's formats of tool calls and reasoning; loads no weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from vllm_metal.serving.parsers import thinking
from vllm_metal.serving.parsers.thinking import Thinking

#: Keys of generation_config.json that vLLM uses as sampling defaults
#: (`ModelConfig.get_diff_sampling_param`).
SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "max_new_tokens"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
#: Files that list a tokenizer's tokens.
_TOKENS = ("tokenizer.json", "tokenizer_config.json", "added_tokens.json")


#: Part of Jinja's error for a tag it does not know; transformers adds one of its own.
_UNKNOWN_TAG = "unknown tag"


@dataclass(frozen=True)
class ModelFiles:
    """Contents of a model's files that parsers are chosen by."""

    model_type: str  # in config.json, or in its text_config
    templates: tuple[str, ...] = ()  # chat templates, the one for chats without tools first
    tokens: str = ""  # content of the files that list tokens
    sampling: Mapping[str, float] = field(default_factory=dict)  # in generation_config.json
    response_template: bool = False  # whether the tokenizer's config has one
    judge: Callable[[str], Thinking] = thinking.of_template

    @cached_property
    def template(self) -> str:
        """All templates, concatenated."""
        return "\n".join(self.templates)

    @cached_property
    def thinking(self) -> Thinking:
        """How the first template handles requests that do not mention reasoning."""
        return self.judge(self.templates[0]) if self.templates else thinking.NEVER

    def check_templates(self) -> None:
        """Renders each template once; raises EndlessTemplate if one exceeds the limits."""
        for template in self.templates[1:]:
            self.judge(template)
        _ = self.thinking

    def has_token(self, token: str) -> bool:
        """Returns whether the tokenizer's files contain `token` as a JSON string."""
        plain, escaped = json.dumps(token, ensure_ascii=False), json.dumps(token)
        return plain in self.tokens or escaped in self.tokens


def read(
    model: str,
    revision: str | None = None,
    chat_template: str | None = None,
    tokenizer: str | None = None,
) -> ModelFiles:
    """Reads a model's files.

    Args:
        model: a folder, or a name on the Hugging Face hub, from which only small files are fetched,
            which vLLM reads, too.
        revision: revision on the hub.
        chat_template: --chat-template, a file or the template itself; replaces the model's own.
        tokenizer: --tokenizer, a folder or a name; replaces the model's own.

    Raises:
        OSError: there is no config.json, or the hub is unreachable.
    """
    path_of = _file_finder(model, revision)
    tokenizer_path = _file_finder(tokenizer, None) if tokenizer else path_of
    config = _read_json(path_of("config.json"))
    if not config:
        raise FileNotFoundError(f"{model} has no config.json that can be read")
    settings = _read_json(tokenizer_path("tokenizer_config.json"))
    text = config.get("text_config")
    inner = text.get("model_type") if isinstance(text, dict) else None
    generation = _read_json(path_of("generation_config.json"))
    return ModelFiles(
        model_type=str(inner or config.get("model_type", "")),
        templates=(_given_template(chat_template),)
        if chat_template
        else _own_templates(tokenizer_path, settings),
        tokens="\n".join(filter(None, (_read_text(tokenizer_path(name)) for name in _TOKENS))),
        sampling={key: generation[key] for key in SAMPLING if generation.get(key) is not None},
        response_template=isinstance(settings.get("response_template"), dict),
        judge=thinking.of_unknown_template,
    )


def _file_finder(model: str, revision: str | None) -> Callable[[str], Path | None]:
    """Returns a function that finds a model's file by name; it returns None if there is none."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return lambda name: folder / name

    def fetched(name: str) -> Path | None:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, HFValidationError

        try:
            return Path(hf_hub_download(model, name, revision=revision))
        except EntryNotFoundError:  # or offline, and not in the cache
            return None
        except HFValidationError as error:
            raise FileNotFoundError(
                f"{model} is neither a folder nor a name on Hugging Face"
            ) from error

    return fetched


def _own_templates(
    path_of: Callable[[str], Path | None], settings: Mapping[str, Any]
) -> tuple[str, ...]:
    if found := _read_text(path_of("chat_template.jinja")):
        return (found,)
    kept = _read_json(path_of("chat_template.json")).get("chat_template")
    named = kept or settings.get("chat_template") or []
    if not isinstance(named, list):
        return (str(named),)
    # A list has a template per purpose: {"name": "default" or "tool_use", "template": ...}.
    by_name = {str(part.get("name")): str(part.get("template", "")) for part in named}
    return tuple(by_name[name] for name in sorted(by_name, key="default".__ne__))


def _given_template(chat_template: str) -> str:
    path = Path(chat_template).expanduser()
    try:
        return path.read_text()
    except OSError:  # not a file: vLLM takes it as the template itself, or rejects it
        return chat_template


def _read_text(path: Path | None) -> str:
    try:
        return "" if path is None else path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _read_json(path: Path | None) -> dict[str, Any]:
    # An unreadable file counts as empty: vLLM reports errors in the files that it needs.
    try:
        found = json.loads(_read_text(path) or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def check_own_templates(model: str) -> None:
    """Raises ValueError if a chat template of a model's folder cannot be parsed.

    vLLM itself reports this only when a request comes.
    """
    for template in read(model).templates:
        check_syntax(template, f"the chat template of {model}")


def check_syntax(template: str, place: str) -> None:
    """Raises ValueError, beginning with `place`, if a chat template cannot be parsed."""
    from jinja2 import Environment, TemplateSyntaxError

    try:
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except TemplateSyntaxError as error:
        if _UNKNOWN_TAG not in str(error):
            why = f"line {error.lineno}: {error.message}"
            raise ValueError(f"{place} is not a template: {why}") from error
