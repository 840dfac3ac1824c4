# SPDX-License-Identifier: Apache-2.0
"""Draft checkpoints that cannot serve, as far as that shows before any weights are loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vllm_metal.engine.spec_decode.registry import method_of
from vllm_metal.identity.model_files import is_gguf

if TYPE_CHECKING:
    from vllm.config import VllmConfig

#: Files that weights come in.
WEIGHTS = ("*.safetensors", "*.bin", "*.pt")


def refusals(config: VllmConfig) -> dict[str, bool]:
    """Faults of the checkpoint that --speculative-config names: a message, and whether it holds.

    Looks into a local folder and config.json. A checkpoint may still fail to load.

    Raises:
        ValueError: the method is not served.
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
    return found
