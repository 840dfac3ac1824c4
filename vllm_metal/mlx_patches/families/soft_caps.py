# SPDX-License-Identifier: Apache-2.0
"""Attention with a soft cap on its scores, of families that compute it by themselves."""

from __future__ import annotations

import functools
import sys
from typing import Any

import mlx.core as mx

from vllm_metal.mlx_patches.seam import AttendingCache

_MODULE = "mlx_lm.models.gemma2"
_MARK = "_vllm_metal_original"


def install() -> None:
    """Has Gemma 2's layers ask a cache that attends by itself; idempotent.

    Nothing to do before mlx-lm has imported the family.
    """
    module = sys.modules.get(_MODULE)
    if module is None or hasattr(module.Attention.__call__, _MARK):
        return
    dense = module.Attention.__call__

    @functools.wraps(dense)
    def attend(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if not isinstance(cache, AttendingCache):
            return dense(self, x, mask, cache)
        queries, keys, values = (
            projection(x).reshape(*x.shape[:2], count, -1).swapaxes(1, 2)
            for projection, count in (
                (self.q_proj, self.n_heads),
                (self.k_proj, self.n_kv_heads),
                (self.v_proj, self.n_kv_heads),
            )
        )
        queries = self.rope(queries, offset=cache.offset)
        keys, values = cache.update_and_fetch(self.rope(keys, offset=cache.offset), values)
        softcap = self.attn_logit_softcapping
        out = cache.attend(queries, keys, values, self.scale, None, softcap)
        return self.o_proj(out.swapaxes(1, 2).reshape(*x.shape[:2], -1))

    setattr(attend, _MARK, dense)
    module.Attention.__call__ = attend
