# SPDX-License-Identifier: Apache-2.0
"""vLLM's environment variables: what this platform sets of them, and its own among them."""

# Remove when a platform may declare its variables and its model runner. Read against vLLM 0.33.

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial

#: Set where their user did not.
DEFAULTS = {
    # vLLM has two contracts between scheduler and worker, and chooses the second where Triton is
    # installed. The worker takes both. The tests run with the first, by which a draft model with a
    # short context does not limit its target's.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    # Requests whose logits are not numbers always fail; with this vLLM's metrics count them.
    "VLLM_COMPUTE_NANS_IN_LOGITS": "1",
    # Of an image that a request brings: 8192 x 8192, which takes 0.2 GB of the memory that a Mac's
    # server and GPU share, more than once. vLLM's own limit is Pillow's, three times as much.
    "VLLM_MAX_IMAGE_PIXELS": str(8192 * 8192),
}


def set_defaults() -> None:
    """Sets DEFAULTS, before vLLM reads its environment; child processes inherit them."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)


def make_known(names: Iterable[str]) -> None:
    """Lets vLLM's check of the environment know variables; it warns of others, or refuses them.

    Args:
        names: of this plugin's variables, which begin with VLLM_ as vLLM's own do.
    """
    from vllm import envs

    for name in names:
        envs.environment_variables.setdefault(name, partial(os.environ.get, name))
