# SPDX-License-Identifier: Apache-2.0
"""Jamba: the weights of experts, and which layers have experts, as transformers has them.

mlx-lm normalises the weights of the chosen experts; the model was trained with their share of all
(`JambaSparseMoeBlock.route_tokens_to_experts`). It counts `expert_layer_offset` from the other end
of a period (`JambaConfig.layers_num_experts`), which is the same for a period of two.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import mlx.core as mx

from vllm_metal.mlx_patches.patch import replace_method


def jamba(module: ModuleType) -> None:
    """Both."""

    def routed(self: Any, x: mx.array) -> mx.array:
        shares = mx.softmax(self.router(x), axis=-1, precise=True)
        count = self.num_experts_per_tok
        chosen = mx.stop_gradient(mx.argpartition(-shares, kth=count - 1, axis=-1)[..., :count])
        weights = mx.take_along_axis(shares, chosen, axis=-1)[..., None]
        mixed: mx.array = (self.switch_mlp(x, chosen) * weights).sum(axis=-2)
        return mixed

    def built(before: Callable[..., Any]) -> Callable[..., Any]:
        def init(self: Any, args: Any, layer_type: str, layer_idx: int) -> None:
            # mlx-lm asks whether index + offset is a multiple of the period, and nothing else.
            before(self, args, layer_type, -layer_idx)

        return init

    module.JambaSparseMoeBlock.__call__ = routed
    replace_method(module.JambaDecoderLayer, "__init__", built)
