# SPDX-License-Identifier: Apache-2.0
"""Sets the parsers of `vllm serve` that its user has not set."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from vllm.logger import init_logger

from vllm_metal.serving.parsers import files
from vllm_metal.serving.parsers.choice import BY_TOKENIZER, choose

logger = init_logger(__name__)

FolderOf = Callable[[str, bool], str]


def set_parsers(args: Namespace, folder_of: FolderOf = lambda model, tokenizer: model) -> None:
    """Chooses parsers that `args` of `vllm serve` lack by the model's files; logs the choice.

    `folder_of` maps a model, and whether its own tokenizer is used, to the folder to read. Raises
    EndlessTemplate if the chat template exceeds the limits, since it would hang the server.
    """
    tools = args.tool_call_parser is None
    reasoning = not (
        args.reasoning_parser or _structured_outputs_parser(args.structured_outputs_config)
    )
    chooses = (tools or reasoning) and not _is_turned_off(args.additional_config)
    try:
        found = files.read(
            folder_of(getattr(args, "model_tag", None) or args.model, args.tokenizer is None),
            args.revision,
            args.chat_template,
            args.tokenizer,
        )
    except Exception as error:  # the start continues, and reports what is wrong with the model
        if chooses:
            logger.info("No parsers are chosen, as the model's files cannot be read: %s", error)
        return
    found.check_templates()
    if not chooses:
        return
    choice = choose(found)
    if choice.tool is BY_TOKENIZER and not (tools and reasoning):
        return  # its two parsers must be used together
    if tools and choice.tool is not None:
        args.tool_call_parser, args.enable_auto_tool_choice = choice.tool.parser, True
    if reasoning and choice.reasoning is not None:
        args.reasoning_parser = choice.reasoning.parser
    sampling = choice.of_sampling if args.generation_config == "auto" else ""
    lines = (choice.of_tools if tools else "", choice.of_reasoning if reasoning else "", sampling)
    for line in filter(None, lines):
        logger.info("%s", line)


def _is_turned_off(additional_config: Any) -> bool:
    # Other mistakes in --additional-config are reported when it is read.
    given = additional_config if isinstance(additional_config, Mapping) else {}
    return given.get("choose_parsers") is False


def _structured_outputs_parser(config: Any) -> str:
    named = config.get if isinstance(config, Mapping) else partial(getattr, config)
    return str(named("reasoning_parser", "") or "")
