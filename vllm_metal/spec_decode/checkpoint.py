# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a draft checkpoint can often be told before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

#: Files that weights come in.
WEIGHTS = ("*.safetensors", "*.bin", "*.pt")


def refusals(config: VllmConfig) -> dict[str, bool]:
    """What of the checkpoint that --speculative-config names cannot be: why, and whether it is so.

    Looks at local folders and at config.json; what only the weights tell is left to loading.
    """
    speculation = config.speculative_config
    if speculation is None or speculation.draft_model_config is None:
        return {}
    draft = speculation.draft_model_config
    if draft.model is None or draft.model == config.model_config.model:
        return {}
    named = f"--speculative-config model {draft.model!r}"
    folder = Path(draft.model)
    found = {
        f"{named} (the folder holds no weights, {', '.join(WEIGHTS)}: fetch them, or name another "
        "folder)": folder.is_dir() and not any(any(folder.glob(kind)) for kind in WEIGHTS)
    }
    if speculation.method in ("eagle", "eagle3"):
        given = draft.hf_config.to_dict()
        size = given.get("target_hidden_size") or given.get("hidden_size")
        wanted = config.model_config.get_hidden_size()
        found[
            f"{named} (made for hidden states of {size}, those of {config.model_config.model!r} "
            f"are of {wanted}: choose a head that was made for this model)"
        ] = size != wanted
    return found
