# SPDX-License-Identifier: Apache-2.0
"""torch's accelerator caches, which vLLM empties at shutdown."""

from __future__ import annotations

#: The vLLM releases that all of this is true for.
RELEASES = ("0.32",)


def answer_for_torch_accelerator() -> None:
    """Makes torch's functions that empty accelerator caches do nothing, in this process.

    vLLM calls them at engine shutdown on every platform but its own CPU one. Without a device torch
    raises there; with a Mac's (MPS) torch 2.13 follows a null pointer to the allocator of pinned
    memory and ends the process. There is nothing to empty: the model's memory is MLX's, and vLLM's
    own tensors are on the CPU.
    """
    import torch

    for name in ("empty_cache", "empty_host_cache"):
        setattr(torch.accelerator, name, lambda: None)
