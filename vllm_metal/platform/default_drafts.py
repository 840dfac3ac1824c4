# SPDX-License-Identifier: Apache-2.0
"""Turns on drafts by an MTP layer or an assistant by default, unless a setting conflicts with them.

The worker drops them if they do not suit the loaded model, or take too much memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from vllm_metal.engine.spec_decode import mtp_folders
from vllm_metal.engine.spec_decode.checkpoint import default_mtp_drafts
from vllm_metal.identity.model_files import ModelLoadError
from vllm_metal.kv_transfer.config import is_enabled
from vllm_metal.settings.additional_config import AdditionalConfig
from vllm_metal.settings.draft_methods import OFF_SWITCH

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.engine.arg_utils import EngineArgs

logger = init_logger(__name__)

#: Entry points of logits processors that are installed for every vLLM engine.
_PLUGINS = "vllm.logits_processors"


def default_drafts(args: EngineArgs, model: ModelConfig) -> dict[str, Any] | None:
    """Returns the default of --speculative-config; None: no drafts.

    Args:
        args: the engine's arguments.
        model: configuration of the engine's model.

    Raises:
        ValueError: --additional-config is invalid.
    """
    if AdditionalConfig.of(args).drafts == "off":
        return None
    folder = mtp_folders.folder_of(model.model, model.revision)
    given = {} if folder is None else mtp_folders.published(folder)
    if folder is None or not (mtp_folders.family_of(given) or mtp_folders.is_assisted(given)):
        return None  # no weight file of most models is opened here
    try:
        found = mtp_folders.layers_of(folder)
    except ModelLoadError:  # the weights' loader reports it
        return None
    content = mtp_folders.published(found or folder)
    num_drafts = default_mtp_drafts(content)
    if any(_obstacles(args, model, num_drafts)):
        return None
    if not mtp_folders.is_depth_supported(content) or not _is_supported(content):
        return None
    if found is None:
        if mtp_folders.depth_of(content):
            logger.info(
                "Serving without drafts: config.json declares an MTP layer, but the checkpoint "
                "contains none, and none was found in %s (docs/speculation.md)",
                mtp_folders.places(folder),
            )
        return None
    own = found == folder
    logger.info(
        "Drafts up to %d tokens with the %s %s. %s turns this off",
        num_drafts,
        "assistant" if mtp_folders.is_assistant(content) else "MTP layer",
        "of the model's checkpoint" if own else f"in {found}",
        OFF_SWITCH,
    )
    chosen = {} if own else {"model": str(found)}
    return {"method": "mtp", "num_speculative_tokens": num_drafts, **chosen}


def _is_supported(content: Mapping[str, Any]) -> bool:
    """Whether all keys about the drafter in its config.json are computed; the loader knows some."""
    if (key := mtp_folders.unknown_key(content)) is not None:
        logger.warning(
            "Serving without drafts: %s in config.json is not supported. %s hides this",
            *(key, OFF_SWITCH),
        )
        return False
    if not mtp_folders.is_assistant(content):
        return True
    from vllm_metal.engine.spec_decode.assistant_config import AssistantConfig  # reads it with MLX

    try:
        AssistantConfig.of(content)
    except ModelLoadError as error:
        logger.warning("Serving without drafts: %s %s hides this", error, OFF_SWITCH)
        return False
    return True


def _obstacles(args: EngineArgs, model: ModelConfig, num_drafts: int) -> Iterator[bool]:
    """Yields True for each setting that drafts do not work with, or would change."""
    yield model.runner_type != "generate"
    yield max(args.tensor_parallel_size, args.pipeline_parallel_size) > 1
    yield bool(args.logits_processors) or bool(entry_points(group=_PLUGINS))
    # Pages in a store or a peer were written without drafts: another configuration, another
    # fingerprint, so they would no longer be found. And each step would wait for the one before.
    yield is_enabled(args)
    # vLLM would want room for the drafts of --max-num-seqs requests in each step.
    yield args.enable_lora
    yield args.kv_sharing_fast_prefill
    yield num_drafts + 2 > model.max_model_len
    most = args.max_num_batched_tokens
    yield most is not None and most <= num_drafts
