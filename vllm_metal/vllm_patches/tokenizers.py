# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of closed engines, which vLLM's caches keep in memory."""

from __future__ import annotations

#: The vLLM releases that all of this is true for.
RELEASES = ("0.32",)


def forget_tokenizers() -> None:
    """Lets go of closed engines' tokenizers: vLLM remembers 128 functions that hold copies of them.

    What is still in use is looked up once more.
    """
    from vllm.utils import func_utils

    func_utils._supports_kw.cache_clear()
