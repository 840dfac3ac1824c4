# SPDX-License-Identifier: Apache-2.0
"""Draft checkpoints that cannot serve, as far as that shows before any weights are loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_metal.engine.spec_decode import block_config
from vllm_metal.engine.spec_decode.registry import BLOCK_DRAFTERS, method_of
from vllm_metal.identity.model_files import ModelLoadError, is_gguf

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig, VllmConfig

#: Files that weights come in.
WEIGHTS = ("*.safetensors", "*.bin", "*.pt")


def default_drafts(given: Mapping[str, Any]) -> int | None:
    """How many tokens a block drafter drafts where --speculative-config does not say.

    Args:
        given: the option's value.

    Returns:
        None: another method drafts.
    """
    method = given.get("method")
    if method not in BLOCK_DRAFTERS:
        return None
    most = block_config.most_drafts(_published(str(given.get("model"))), method)
    return min(block_config.DEFAULT_DRAFTS, most or block_config.DEFAULT_DRAFTS)


def _published(model: str) -> dict[str, Any]:
    """The config.json of a local folder; empty where there is none."""
    path = Path(model) / "config.json"
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def refusals(config: VllmConfig) -> dict[str, bool]:
    """Faults of the checkpoint that --speculative-config names: a message, and whether it holds.

    Looks into a local folder and config.json. A checkpoint may still fail to load.

    Raises:
        ValueError: the method is not served, or config.json of a block drafter has a key, or a
            value, that is not computed.
    """
    speculation, method = config.speculative_config, method_of(config)
    if speculation is None or method is None or speculation.draft_model_config is None:
        return {}
    draft = speculation.draft_model_config
    if draft.model is None or draft.model == config.model_config.model:
        return {}
    named = f"--speculative-config model {draft.model!r}"
    folder = Path(draft.model)
    found = {
        f"{named} (the folder holds no weights, {', '.join(WEIGHTS)}: fetch them, or name another "
        "folder)": folder.is_dir()
        and not is_gguf(folder)
        and not any(any(folder.glob(kind)) for kind in WEIGHTS)
    }
    if method.hidden_size_keys:
        given = draft.hf_config.to_dict()
        size = next((given[key] for key in method.hidden_size_keys if given.get(key)), None)
        wanted = config.model_config.get_hidden_size()
        found[
            f"{named} (made for hidden states of size {size}, but those of "
            f"{config.model_config.model!r} are of {wanted}: choose a head that was made "
            "for this model)"
        ] = size != wanted
    if method.names[0] in BLOCK_DRAFTERS:
        found |= _of_block_drafter(speculation)
    return found


def _of_block_drafter(speculation: SpeculativeConfig) -> dict[str, bool]:
    draft = speculation.draft_model_config
    given = draft.hf_config.to_dict()
    published = _published(draft.model)
    (architecture, *_) = draft.architectures
    if published and architecture in block_config.MODULES:  # all others are rejected beside
        try:
            block_config.BlockConfig.of(given, published, architecture)
        except ModelLoadError as error:
            raise ValueError(str(error)) from error
    most = block_config.most_drafts(published or given, speculation.method or "")
    asked = speculation.num_speculative_tokens or 0
    return {
        f"--speculative-config num_speculative_tokens {asked} (the drafter {draft.model!r} was "
        f"trained to draft {most} tokens at once: choose {most} or fewer)": most is not None
        and asked > most
    }
