# SPDX-License-Identifier: Apache-2.0
"""torch's accelerator caches, which vLLM empties at shutdown."""

from __future__ import annotations

#: The vLLM releases that all of this is true for.
RELEASES = ("0.32", "0.33")


def answer_for_torch_accelerator() -> None:
    """Makes vLLM's clean-up pass on machines where torch itself has no accelerator.

    At engine shutdown vLLM empties torch's accelerator caches on every platform but its CPU one;
    torch raises there without a device. There is nothing to empty: the model's memory is MLX's.
    """
    import torch

    if torch.accelerator.is_available():
        return
    for name in ("empty_cache", "empty_host_cache"):
        setattr(torch.accelerator, name, lambda: None)
