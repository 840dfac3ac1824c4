# SPDX-License-Identifier: Apache-2.0
"""Tokens a second that a Mac's memory allows one stream, reckoned and not measured.

A step of decode reads the weights that its token takes, K and V of the context, and reads and
writes states; a Mac takes that over its bandwidth at least. Where the decode kernel needs more
issue slots than memory leaves (mac_attention.py), reading K and V takes longer by their quotient.
Weights are counted in mlx-lm's own modules, K, V and states by the engine's layers; no weight is
computed. Prints the tables of docs/performance.md as Markdown, and draws:

    python benchmarks/mac_tokens.py
    python benchmarks/mac_tokens.py --chip "M2 Pro"    # one chip, more contexts
    python benchmarks/mac_tokens.py --write            # into the page, with mac_attention.py's
"""

from __future__ import annotations

import vllm_metal.platform.metal_platform  # noqa: F401  # first: it loads a BLAS before MLX

# isort: split
import argparse
import importlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import mac_attention
import mlx.core as mx
import mlx.nn as nn
from _macs import BY_NAME, GB, Chip
from _published import (
    DEEPSEEK_V3,
    GEMMA_27B,
    GLM_AIR,
    GLM_FLASH,
    GPT_OSS_20B,
    GPT_OSS_120B,
    LLAMA_70B,
    QWEN3,
    QWEN_27B,
    QWEN_35B,
    QWEN_80B,
)
from mac_attention import LATENT, ROOT, Kind, markdown
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from vllm_metal.attention.attention_layer import AttentionLayer
from vllm_metal.attention.layers import attention_layers
from vllm_metal.commands.fit.known import KnownModel
from vllm_metal.commands.fit.machine import GIB, Machine
from vllm_metal.mlx_patches import registry

#: Of the page's tables.
COLUMNS = ("M1", "M4", "M5", "M1 Pro", "M4 Pro", "M5 Pro", "M1 Max", "M4 Max", "M5 Max", "M3 Ultra")
CONTEXTS = (1024, 4096, 16384, 32768, 65536, 131072)
SHORT, LONG = 4096, 65536
#: Of the picture.
_DRAWN = {
    "dense": ("Qwen3-8B, 4 bit", "Qwen3-32B, 4 bit", "Llama-3.3-70B, 4 bit"),
    "with windows": ("Gemma-3-27B, 4 bit",),
    "hybrid": ("Qwen3.5-27B, 4 bit", "Qwen3.5-35B-A3B, 4 bit"),
    "of experts": ("Qwen3-30B-A3B, 4 bit", "gpt-oss-120b, as published"),
    "with latents": ("GLM-4.7-Flash, 4 bit",),
}
_POOL = 2  # bytes of an element of K and V
_TOKEN = "num_experts_per_tok"


@dataclass(frozen=True)
class Read:
    """What a layer's step reads of a request's past, of layers that are alike."""

    key_bytes: int  # K and V of a token
    window: int | None
    kind: Kind

    def tokens(self, context: int) -> int:
        return context if self.window is None else min(context, self.window)


@dataclass(frozen=True)
class Served:
    """A model with its weights in some bits. Sizes are bytes."""

    name: str
    bits: str
    weights: int  # in memory
    read: float  # of them, by one token
    states: int  # of a request
    layers: Mapping[Read, int]  # how many there are of each

    def kv(self, context: int) -> int:
        """K and V that a token reads."""
        return sum(n * one.key_bytes * one.tokens(context) for one, n in self.layers.items())

    def seconds(self, chip: Chip, context: int) -> float:
        """A step of one stream takes that, at least."""
        moved = self.read + 2 * self.states
        for one, count in self.layers.items():
            slower = max(one.kind.share(chip).slow, 1.0)
            moved += slower * count * one.key_bytes * one.tokens(context)
        return moved / (chip.bandwidth * GB)

    def fits(self, chip: Chip, context: int) -> bool:
        """Whether a chip with the most memory holds it, by what macOS lets the GPU have."""
        held = self.weights + self.states + self.kv(context)
        return held < Machine.mac(chip.memory * GIB).total

    def rate(self, chip: Chip, context: int) -> str:
        """Tokens a second, at most; `–` where it does not fit."""
        if not self.fits(chip, context):
            return "–"
        rate = 1 / self.seconds(chip, context)
        return f"{rate:.0f}" if rate >= 10 else f"{rate:.1f}"


def served(known: KnownModel, bits: int | None = None) -> Served:
    """Counts a model's bytes.

    Args:
        known: the model.
        bits: of weights, in groups of 64 with a scale and a bias of 16 bits each, 16: plain; None:
            as it is published.
    """
    registry.install()
    network = _network(known.config, bits)
    read, states, layers = _weights_read(network, known.config), 0, Counter[Read]()
    for layer in attention_layers(network, known.config["model_type"]):
        if not isinstance(layer, AttentionLayer):
            states += layer.state_bytes
            continue
        size = LATENT if layer.latent else str(layer.head_size)
        group = layer.num_heads // layer.num_kv_heads
        elements = layer.head_size + (0 if layer.latent else layer.shape.value_size)
        key_bytes = _POOL * layer.num_kv_heads * elements
        layers[Read(key_bytes, layer.window, Kind(size, 16, group))] += 1
    total = sum(array.nbytes for _, array in tree_flatten(network.parameters()))
    words = f"{bits} bit" if bits else "as published"
    name = known.name.rpartition("/")[2].removesuffix("-4bit")
    return Served(name, words, total, read, states, layers)


def _network(config: Mapping[str, Any], bits: int | None) -> nn.Module:
    family = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    network = family.Model(family.ModelArgs.from_dict(config))
    if config.get("tie_word_embeddings") and "lm_head" in network:
        network.sanitize({})  # Gemma's goes when its files turn out to have none
    network.set_dtype(mx.bfloat16)
    if bits is None:
        mxfp4 = {"group_size": 32, "bits": 4, "mode": "mxfp4"}

        def quantised(path: str, module: nn.Module) -> bool | dict[str, Any]:
            if isinstance(module, SwitchLinear):
                return mxfp4
            return hasattr(module, "to_quantized")

        nn.quantize(network, **config["quantization"], class_predicate=quantised)
    elif bits < 16:
        nn.quantize(network, group_size=64, bits=bits)
    return network


def _weights_read(network: nn.Module, config: Mapping[str, Any]) -> float:
    """All but experts that a token does not choose, and a table of which it reads one row."""
    config = config.get("text_config", config)
    total = 0.0
    heads = any(name.endswith("lm_head") for name, _ in network.named_modules())
    for _, module in network.named_modules():
        own = sum(a.nbytes for a in module.values() if isinstance(a, mx.array))
        if isinstance(module, SwitchLinear | QuantizedSwitchLinear):
            own *= config[_TOKEN] / module.weight.shape[0]
        elif isinstance(module, nn.Embedding | nn.QuantizedEmbedding) and heads:
            own /= module.weight.shape[0]
        total += own
    return total


def _asked() -> Iterator[tuple[KnownModel, int | None]]:
    for size, bits in (("1.7B", 4), ("4B", 4), ("8B", 4), ("8B", 8), ("8B", 16), ("14B", 4)):
        yield QWEN3[size], bits
    for model in (QWEN3["32B"], LLAMA_70B, GEMMA_27B):
        yield model, 4
    yield from ((QWEN_27B, 4), (QWEN3["30B-A3B"], 4), (QWEN_35B, 4), (QWEN_80B, 4))
    yield from ((GPT_OSS_20B, None), (GPT_OSS_120B, None), (GLM_AIR, 4))
    yield from ((GLM_FLASH, 4), (DEEPSEEK_V3, 4))


@dataclass(frozen=True)
class Published:
    """What an engine over MLX was measured at, one stream of few tokens."""

    what: str
    chip: str
    rate: float  # tokens a second
    source: str
    read: float | None = None  # bytes that a token reads, where the source says so
    model: tuple[KnownModel, int] | None = None  # else it is counted

    @property
    def bound(self) -> float:
        """Tokens a second, at most."""
        read = served(*self.model).read if self.model else self.read
        assert read is not None
        return BY_NAME[self.chip].bandwidth * GB / read


PUBLISHED = (
    Published("Qwen3-0.6B, 8 bit", "M4 Pro", 284, "vllm-mlx#531", model=(QWEN3["0.6B"], 8)),
    Published("Qwen3-8B, 4 bit", "M3 Ultra", 113, "Rapid-MLX#636", model=(QWEN3["8B"], 4)),
    Published("Qwen3.5-9B, 4 bit", "M4 Pro", 43.4, "Rapid-MLX#567, with its 5.1 GB", read=5.1e9),
    Published("Qwen3.5-9B, 4 bit", "M3 Ultra", 101, "Rapid-MLX#567, with its 5.1 GB", read=5.1e9),
)


@cache
def models() -> tuple[Served, ...]:
    """Of the tables: dense ones by size, then with windows, hybrids, experts and latents."""
    return tuple(served(known, bits) for known, bits in _asked())


def _label(model: Served) -> str:
    return f"{model.name}, {model.bits}"


def bytes_table() -> str:
    """Markdown: what a model takes, and what a token reads of it."""
    rows = [
        [
            _label(model),
            f"{model.weights / GB:.1f}",
            f"{model.read / GB:.2f}",
            f"{model.kv(SHORT) / GB:.2f}",
            f"{model.kv(LONG) / GB:.2f}",
            f"{2 * model.states / GB:.2f}" if model.states else "–",
        ]
        for model in models()
    ]
    head = ["estimate, GB", "weights", "read by a token", "K/V at 4k", "K/V at 64k", "states"]
    return markdown(head, rows)


def rates_table(names: Sequence[str] = COLUMNS, contexts: Sequence[int] = (SHORT, LONG)) -> str:
    """Markdown: tokens a second of one stream, at most, by model and chip."""
    chips = [BY_NAME[name] for name in names]
    rows = [
        [_label(model)]
        + [_joined([model.rate(chip, context) for context in contexts]) for chip in chips]
        for model in models()
    ]
    return markdown(["estimate, tokens/s", *(chip.name for chip in chips)], rows)


def _joined(rates: Sequence[str]) -> str:
    return "–" if set(rates) == {"–"} else " / ".join(rates)


def chip_table(chip: Chip) -> str:
    """Markdown: tokens a second on one chip by context."""
    rows = [
        [_label(model), *(model.rate(chip, context) for context in CONTEXTS)] for model in models()
    ]
    head = [f"estimate, {chip.name}, tokens/s", *(f"{n // 1024}k" for n in CONTEXTS)]
    return markdown(head, rows)


def check_table() -> str:
    """Markdown: what others measured, over what is reckoned here."""
    rows = [
        [
            f"{one.what}, {one.chip} ({one.source})",
            f"{one.bound:.0f}",
            f"{one.rate:.0f}",
            f"{100 * one.rate / one.bound:.0f} %",
        ]
        for one in PUBLISHED
    ]
    return markdown(["estimate, tokens/s", "at most", "measured", "share"], rows)


def plot(target: Path, chip: Chip) -> None:
    """Tokens a second of some models by context, each kind of model in a colour."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.6))
    contexts = [2**power for power in range(10, 18)]
    by_label = {_label(model): model for model in models()}
    ends = []
    for colour, (kind, names) in zip(("C0", "C4", "C2", "C1", "C3"), _DRAWN.items(), strict=True):
        for number, name in enumerate(names):
            rates = [1 / by_label[name].seconds(chip, context) for context in contexts]
            axes.plot(contexts, rates, colour, label=None if number else kind)
            ends.append((rates[-1], by_label[name].name, colour))
    place = 0.0
    for rate, name, colour in sorted(ends):
        place = max(rate, 1.09 * place)  # names do not cover each other
        axes.text(1.06 * contexts[-1], place, name, fontsize=7, va="center", color=colour)
    axes.set(xscale="log", yscale="log", xlabel="tokens of context", ylabel="tokens/s, at most")
    axes.set_xticks(contexts, [f"{n // 1024}k" for n in contexts], minor=False)
    rates = [5, 10, 20, 50, 100, 200, 400]
    axes.set_yticks(rates, [str(rate) for rate in rates])
    axes.minorticks_off()
    axes.set_xlim(contexts[0], 2.6 * contexts[-1])
    axes.grid(alpha=0.3)
    axes.set_title(f"{chip.name}, {chip.bandwidth:g} GB/s: estimate", fontsize=10)
    axes.legend(fontsize=8, loc="upper right")
    figure.tight_layout()
    figure.savefig(target, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chip", choices=list(BY_NAME), help="prints this chip's table alone")
    parser.add_argument("--write", action="store_true", help="into docs/performance.md")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    if args.chip:
        print(chip_table(BY_NAME[args.chip]))
        return
    tables = [rates_table(), bytes_table(), check_table()]
    print("\n\n".join(tables))
    plot(args.out / "mac_tokens.png", BY_NAME["M4 Max"])
    if args.write:
        of_attention = [mac_attention.shares_table(), mac_attention.check_table()]
        mac_attention.rewrite(mac_attention.PAGE, [*tables, *of_attention])


if __name__ == "__main__":
    main()
