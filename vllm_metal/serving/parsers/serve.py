# SPDX-License-Identifier: Apache-2.0
"""Sets the parsers of `vllm serve` where its user has set none; the user's own flags stay."""

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
    """Completes the arguments of a server by what its model's files say, and logs the choice.

    Args:
        args: as vLLM has parsed them, for `vllm serve` or one of its kind. They are changed.
        folder_of: the folder that stands for a model, given whether its own tokenizer is used.

    Raises:
        EndlessTemplate: the chat template has no end, so neither would the start have one.
    """
    tools = args.tool_call_parser is None
    thoughts = not (args.reasoning_parser or _of_structured_outputs(args.structured_outputs_config))
    chooses = (tools or thoughts) and not _is_turned_off(args.additional_config)
    try:
        found = files.read(
            folder_of(getattr(args, "model_tag", None) or args.model, args.tokenizer is None),
            args.revision,
            args.chat_template,
            args.tokenizer,
        )
    except Exception as error:  # the start goes on, and says of the model what there is to say
        if chooses:
            logger.info("No parsers are chosen, as the model's files cannot be read: %s", error)
        return
    found.check_templates()
    if not chooses:
        return
    choice = choose(found)
    if choice.tool is BY_TOKENIZER and not (tools and thoughts):
        return  # it goes with none but itself
    if tools and choice.tool is not None:
        args.tool_call_parser, args.enable_auto_tool_choice = choice.tool.parser, True
    if thoughts and choice.reasoning is not None:
        args.reasoning_parser = choice.reasoning.parser
    sampling = choice.of_sampling if args.generation_config == "auto" else ""
    said = (choice.of_tools if tools else "", choice.of_reasoning if thoughts else "", sampling)
    for line in filter(None, said):
        logger.info("%s", line)


def _is_turned_off(additional_config: Any) -> bool:
    """Whether --additional-config says so; what else is wrong with it is said where it is read."""
    given = additional_config if isinstance(additional_config, Mapping) else {}
    return given.get("choose_parsers") is False


def _of_structured_outputs(config: Any) -> str:
    """The parser that --structured-outputs-config names."""
    named = config.get if isinstance(config, Mapping) else partial(getattr, config)
    return str(named("reasoning_parser", "") or "")
