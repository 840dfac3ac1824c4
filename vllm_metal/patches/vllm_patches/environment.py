# SPDX-License-Identifier: Apache-2.0
"""Sets vLLM's environment variables, and makes this plugin's own known to vLLM."""

# Remove when a platform may declare its variables and its model runner. Read against vLLM 0.33.

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial

#: Values for variables that the user did not set.
DEFAULTS = {
    # vLLM has two contracts between scheduler and worker, and chooses the second if Triton is
    # installed. The worker supports both. The tests run with the first, in which a draft model with
    # a short context does not limit its target's.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    # Requests with NaN logits always fail; with this, vLLM's metrics count them.
    "VLLM_COMPUTE_NANS_IN_LOGITS": "1",
    # Pixels of an image in a request: 8192 x 8192 takes 0.2 GB, more than once, of the memory that
    # a Mac's server and GPU share. vLLM's own limit is Pillow's, three times as much.
    "VLLM_MAX_IMAGE_PIXELS": str(8192 * 8192),
    # vLLM rejects LoRA adapters for Inkling beside CUDA's all-reduce of this name.
    "INKLING_MULTIMEM_AR": "0",
}


def set_defaults() -> None:
    """Sets DEFAULTS, before vLLM reads its environment; child processes inherit them."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)


def make_known(names: Iterable[str]) -> None:
    """Registers this plugin's VLLM_ variables, so that vLLM does not warn about or reject them."""
    from vllm import envs

    for name in names:
        envs.environment_variables.setdefault(name, partial(os.environ.get, name))
