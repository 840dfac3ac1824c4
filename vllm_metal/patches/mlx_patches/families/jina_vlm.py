# SPDX-License-Identifier: Apache-2.0
"""Lets each text of a step have its own position in Jina VLM, and reads its published files.

mlx-vlm's module rotates all texts of a step by the largest position, squares activations in their
own dtype in norms (float16 overflows), and has its layers in the module with the head, which here
stays apart from them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from vllm_metal.patches.mlx_patches.families.arrays import Arrays
from vllm_metal.patches.mlx_patches.families.forwards import through
from vllm_metal.patches.mlx_patches.replacing import after_init, wrap

_TEXT = "language_model."
#: Names of the family's own code, and the module's.
_NAMES = (
    (re.compile(r"_lnorm\."), "_norm."),
    (re.compile(r"\.attn\.qkv_w\."), ".attn.qkv."),
    (re.compile(r"\.ffn\.up\."), ".ffn.gate_up."),
)
_BIAS = re.compile(r"(.*\.attn\.)q_b")


def config(module: ModuleType) -> None:
    """Makes keys of the text model that were derived from nested blocks count."""

    def flat(before: Callable[..., Any]) -> Callable[..., Any]:
        def from_dict(keys: dict[str, Any]) -> Any:
            made, text = before(keys), keys.get("text_config") or {}
            for name in vars(made.text_config).keys() & text.keys():
                setattr(made.text_config, name, text[name])
            return made

        return from_dict

    wrap(module.ModelConfig, "from_dict", flat)


def language(module: ModuleType) -> None:
    """Replaces RoPE and norms by MLX's, and separates the layers from the head."""

    def init(self: Any, args: Any) -> None:
        nn.Module.__init__(self)
        self.config, self.model_type = args, args.model_type
        self.model = module.TextModel(args)
        self.lm_head = nn.Linear(args.hidden_size, args.vocab_size, bias=False)

    def logits(self: Any, inputs: mx.array, cache: Any = None) -> Any:
        return module.LanguageModelOutput(logits=self.lm_head(self.model(inputs, cache=cache)))

    def forward(self: Any, inputs: mx.array, cache: Any = None) -> mx.array:
        return through(self.layers, self.embedding(inputs), cache, self.ln_f)

    def add_rope(layer: Any, args: Any) -> None:
        layer.rope = nn.RoPE(args.head_dim, base=args.rope_theta)

    module.LanguageModel.__init__, module.LanguageModel.__call__ = init, logits
    module.LanguageModel.layers = property(lambda self: self.model.layers)
    module.TextModel.__call__ = forward
    module.RMSNorm.__call__ = lambda self, x: mx.fast.rms_norm(x, self.weight, self.eps)
    after_init(module.Attention, add_rope)


def as_published(model: Any, weights: Arrays) -> Arrays:
    """Renames arrays of the family's own code, or of mlx-vlm's module; joins biases of one layer.

    The former always have biases, zeros where config.json has none.
    """
    found = {_renamed(name): array for name, array in weights.items()}
    for path in [match[1] for name in found if (match := _BIAS.fullmatch(name))]:
        names = [f"{path}{kind}_b" for kind in "qkv"]
        if all(name in found for name in names):
            found[f"{path}qkv.bias"] = mx.concatenate([found.pop(name) for name in names])
    return found


def _renamed(name: str) -> str:
    name = name.removeprefix("model.")
    if name.startswith("lm_head."):
        return f"{_TEXT}{name}"
    if not name.startswith(_TEXT):
        return name  # of the tower
    inner = name.removeprefix(_TEXT)
    if not inner.startswith(("lm_head.", "model.")):
        inner = f"model.{inner}"
    for pattern, ours in _NAMES:
        inner = pattern.sub(ours, inner)
    return f"{_TEXT}{inner}"
