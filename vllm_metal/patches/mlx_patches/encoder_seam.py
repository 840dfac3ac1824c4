# SPDX-License-Identifier: Apache-2.0
"""Routes attention of mlx-vlm's encoders to a cache passed as their mask."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from vllm_metal.patches.mlx_patches.replacing import check_release
from vllm_metal.patches.mlx_patches.seam import AttendingCache, Scoring

RELEASES = ("mlx-vlm 0.7",)
_NAME = "scaled_dot_product_attention"
_MARK = "_vllm_metal_encoder"


def install(module: ModuleType) -> None:
    """Makes a module's attention call the mask if it is an `AttendingCache`; idempotent.

    module: module of an encoder that has imported mlx-vlm's attention.

    Raises ValueError: this mlx-vlm release has not been compared with transformers.
    """
    check_release("mlx-vlm", RELEASES, "its encoders")
    dense = getattr(module, _NAME)
    if hasattr(dense, _MARK):
        return

    @functools.wraps(dense)
    def dispatch(
        queries: Any, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: Any = None
    ) -> Any:
        # mlx-vlm's encoders pass one mask to all layers of a kind, and each layer passes it on with
        # its queries, keys and values.
        if isinstance(mask, AttendingCache):
            return mask.attend(queries, keys, values, Scoring(scale, sinks))
        return dense(queries, keys, values, cache, scale, mask, sinks)

    setattr(dispatch, _MARK, True)
    setattr(module, _NAME, dispatch)
