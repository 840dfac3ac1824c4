# SPDX-License-Identifier: Apache-2.0
"""Measures the perplexity of models on a fixed text.

    python benchmarks/gguf_perplexity.py MODEL.gguf FOLDER ...

The text is the description in transformers' package metadata, without lines of HTML, cut at a
number of tokens. Packed
weights are dequantized first, so that the CPU takes seconds for a model and not minutes: the values
are those that are served in float32. `--bits` quantizes the first model anew, as mlx-lm does.
"""

import argparse
from importlib.metadata import metadata
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from transformers import AutoTokenizer

from vllm_metal.device import blas
from vllm_metal.engine.models.loader import lazy_model
from vllm_metal.engine.weights.folders import folder_of

GROUP_SIZE = 64


def dense_model(folder: Path) -> nn.Module:
    """Loads the model with its weights dequantized to float32."""
    model = lazy_model(folder, mx.float32)
    for path, module in model.named_modules():
        if not isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding):
            continue
        weight = mx.dequantize(
            module.weight,
            module.scales,
            module.get("biases"),
            group_size=module.group_size,
            bits=module.bits,
            mode=module.mode,
            dtype=mx.float32,
        )
        rows, columns = weight.shape
        is_linear = isinstance(module, nn.QuantizedLinear)
        plain = nn.Linear(columns, rows, "bias" in module) if is_linear else nn.Embedding(1, 1)
        plain.weight = weight
        if "bias" in module:
            plain.bias = module.bias
        model.update_modules(tree_unflatten([(path, plain)]))
    return model


def rounded(model: nn.Module, bits: int) -> None:
    """Rounds matrices as mlx-lm's conversion to `bits` does."""
    for path, value in tree_flatten(model.parameters()):
        if value.ndim == 2 and value.shape[-1] % GROUP_SIZE == 0:
            parts = mx.quantize(value, group_size=GROUP_SIZE, bits=bits)
            value = mx.dequantize(*parts, group_size=GROUP_SIZE, bits=bits)
            model.update(tree_unflatten([(path, value)]))


def perplexity(model: nn.Module, tokens: list[int]) -> float:
    """Returns exp of the mean negative log-probability of all tokens but the first."""
    logits = model(mx.array([tokens[:-1]]))[0].astype(mx.float32)
    losses = nn.losses.cross_entropy(logits, mx.array(tokens[1:]))
    return float(mx.exp(losses.mean()).item())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--bits", type=int, nargs="*", default=[])
    args = parser.parse_args()
    blas.load()
    lines = str(metadata("transformers").get_payload()).splitlines()
    text = "\n".join(line for line in lines if "<" not in line)
    for name in args.models:
        folder = Path(folder_of(name))
        tokens = AutoTokenizer.from_pretrained(folder).encode(text)[: args.tokens]
        print(f"{Path(name).name}: {perplexity(dense_model(folder), tokens):.3f}", flush=True)
    folder = Path(folder_of(args.models[0]))
    for bits in args.bits:
        model = dense_model(folder)
        rounded(model, bits)
        print(f"{bits} bits: {perplexity(model, tokens):.3f}", flush=True)


if __name__ == "__main__":
    main()
