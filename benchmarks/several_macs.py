# SPDX-License-Identifier: Apache-2.0
"""What several Macs bring a model, reckoned and not measured: by layers, by heads, shared prefixes.

Weights and K/V are those of mac_tokens.py; links and formulas are in `_links.py`. Prints the tables
of docs/several-macs.md as Markdown:

    python benchmarks/several_macs.py
    python benchmarks/several_macs.py --write    # into the page
"""

from __future__ import annotations

import vllm_metal.platform.metal_platform  # noqa: F401  # first: it loads a BLAS before MLX

# isort: split
import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from _links import (
    LINKS,
    MESH,
    RDMA,
    Link,
    bubble,
    by_heads_bytes,
    by_heads_seconds,
    by_layers_bytes,
    by_layers_seconds,
)
from _macs import BY_NAME, Chip
from _published import DEEPSEEK_V3, GLM_AIR, GPT_OSS_120B, LLAMA_70B, QWEN3
from mac_attention import ROOT, markdown, rewrite
from mac_tokens import Served, served

from vllm_metal.commands.fit.known import KnownModel
from vllm_metal.commands.fit.machine import GIB, Machine

PAGE = ROOT / "docs" / "several-macs.md"
CONTEXT = 4096
PREFIX = 8000  # tokens, of the table of shared prefixes


@dataclass(frozen=True)
class Desk:
    """Equal Macs with one model."""

    known: KnownModel
    bits: int | None  # of weights; None: as published
    chip: Chip
    memory: int  # GB of each
    macs: int

    @property
    def model(self) -> Served:
        return _counted(self.known.name, self.bits)

    @property
    def hidden(self) -> int:
        return int(self.known.config["hidden_size"])

    @property
    def layers(self) -> int:
        return int(self.known.config["num_hidden_layers"])

    @property
    def words(self) -> str:
        """The Macs."""
        return f"{self.macs} × {self.chip.name}, {self.memory} GB"

    def fits(self, macs: int) -> bool:
        """Whether so many hold the model, each an equal part, and K/V of a context."""
        held = (self.model.weights + self.model.states + self.model.kv(CONTEXT)) / macs
        return held < Machine.mac(self.memory * GIB).total

    def alone(self) -> float:
        """Seconds of a step of one stream on one Mac whose memory holds all."""
        return self.model.seconds(self.chip, CONTEXT)

    def by_layers(self, link: Link) -> float:
        """Tokens a second of one stream: the ranks compute one after another."""
        return 1 / (self.alone() + by_layers_seconds(link, self.macs, self.hidden))

    @property
    def heads_divide(self) -> bool:
        """Whether each Mac can have as many query heads and, but for latents, K/V heads."""
        config = self.known.config
        latent = "kv_lora_rank" in config
        kv_heads = self.macs if latent else config["num_key_value_heads"]
        return config["num_attention_heads"] % self.macs == 0 == kv_heads % self.macs

    def by_heads(self, link: Link) -> float:
        """Tokens a second of one stream: each Mac reads its part, all at once."""
        added = by_heads_seconds(link, self.macs, self.hidden, self.layers)
        return 1 / (self.alone() / self.macs + added)


_KNOWN = {
    model.name: model
    for model in (QWEN3["8B"], QWEN3["32B"], LLAMA_70B, GPT_OSS_120B, GLM_AIR, DEEPSEEK_V3)
}


@cache
def _counted(name: str, bits: int | None) -> Served:
    return served(_KNOWN[name], bits)


def desks() -> Iterator[Desk]:
    """The desks of the tables, from small models to large ones."""
    for known, bits, chip, memory, macs in (
        (QWEN3["8B"], 4, "M4", 16, 2),
        (QWEN3["8B"], 16, "M5", 24, 2),
        (QWEN3["32B"], 4, "M4", 24, 2),
        (LLAMA_70B, 4, "M4 Pro", 64, 2),
        (LLAMA_70B, 4, "M4 Pro", 24, 4),
        (GPT_OSS_120B, None, "M4 Pro", 64, 2),
        (GLM_AIR, 4, "M4 Max", 64, 2),
        (DEEPSEEK_V3, 4, "M3 Ultra", 256, 3),
        (DEEPSEEK_V3, 4, "M3 Ultra", 512, 2),
        (DEEPSEEK_V3, 4, "M4 Max", 128, 5),
        (DEEPSEEK_V3, 4, "M4 Max", 128, 8),
    ):
        yield Desk(known, bits, BY_NAME[chip], memory, macs)


def _rate(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def _by_heads(desk: Desk, link: Link) -> str:
    """A cell of the table by heads; `–` where there are more Macs than the link joins."""
    return "–" if link is RDMA and desk.macs > MESH else _rate(desk.by_heads(link))


def _whole(desk: Desk) -> list[str]:
    """A row's head: the model, the Macs, whether one holds it."""
    return [f"{desk.model.name}, {desk.model.bits}", desk.words, "yes" if desk.fits(1) else "no"]


_HEAD = ("Macs", "one holds it", "one with all the memory")


def layers_table() -> str:
    """Markdown: tokens a second of one stream by layers, by link."""
    rows = [
        [*_whole(desk), _rate(1 / desk.alone()), *(_rate(desk.by_layers(link)) for link in LINKS)]
        for desk in desks()
    ]
    return markdown(["by layers, tokens/s", *_HEAD, *(link.name for link in LINKS)], rows)


def heads_table() -> str:
    """Markdown: tokens a second of one stream by heads, by link."""
    rows = [
        [*_whole(desk), _rate(1 / desk.alone()), *(_by_heads(desk, link) for link in LINKS)]
        for desk in desks()
        if desk.heads_divide
    ]
    return markdown(["by heads, tokens/s", *_HEAD, *(link.name for link in LINKS)], rows)


def bytes_table() -> str:
    """Markdown: what crosses the link for a token, and for a chunk of a prompt."""
    chunk, seen, rows = 2048, set(), []
    for desk in desks():
        if desk.known.name in seen:
            continue
        seen.add(desk.known.name)
        shape = desk.hidden, desk.layers
        rows.append(
            [
                desk.model.name,
                f"{desk.hidden:,}",
                str(desk.layers),
                f"{by_layers_bytes(desk.hidden):,}",
                f"{by_heads_bytes(*shape, 2):,.0f}",
                f"{by_heads_bytes(*shape, 4):,.0f}",
                f"{by_layers_bytes(desk.hidden, chunk) / 1e6:.0f} MB",
                f"{by_heads_bytes(*shape, 2, chunk) / 1e6:,.0f} MB",
            ]
        )
    head = ["bytes across the link", "hidden", "layers", "by layers: a token and boundary"]
    head += [
        "by heads: a token, of 2 Macs",
        "of 4",
        "a chunk of 2,048, by layers",
        "by heads, of 2",
    ]
    return markdown(head, rows)


def bubble_table() -> str:
    """Markdown: the share of their time that ranks wait, by batches on their way."""
    counts = (1, 2, 3, 4)
    rows = [
        [f"{macs} Macs", *(f"{100 * bubble(macs, count):.0f} %" for count in counts)]
        for macs in (2, 3, 4, 5)
    ]
    return markdown(["ranks wait", *(f"{n} on the way" for n in counts)], rows)


@dataclass(frozen=True)
class Prefill:
    """What an engine was measured to prefill; the page names the source."""

    chip: str
    rate: float  # tokens a second
    known: KnownModel
    bits: int


PREFILLS = (
    Prefill("M4", 225, QWEN3["8B"], 4),
    Prefill("M5", 608, QWEN3["8B"], 4),
    Prefill("M3 Ultra", 1470, QWEN3["8B"], 4),
    Prefill("M3 Ultra", 160, DEEPSEEK_V3, 4),
)


def prefix_table() -> str:
    """Markdown: seconds until a prefix is there, computed and pulled."""
    rows = []
    for one in PREFILLS:
        nbytes = _counted(one.known.name, one.bits).kv(PREFIX)
        pulled = [replace(link, latency=2 * link.latency).seconds(nbytes) for link in LINKS[1:]]
        name = f"{_counted(one.known.name, one.bits).name}, {one.chip}"
        rows.append([name, f"{PREFIX / one.rate:.1f}", *(f"{each:.1f}" for each in pulled)])
    head = [f"{PREFIX:,} tokens, seconds", "computed", *(link.name for link in LINKS[1:])]
    return markdown(head, rows)


def tables() -> Sequence[str]:
    """All of the page's."""
    return [layers_table(), heads_table(), bytes_table(), bubble_table(), prefix_table()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="into docs/several-macs.md")
    args = parser.parse_args()
    found = tables()
    print("\n\n".join(found))
    if args.write:
        rewrite(PAGE, found)


if __name__ == "__main__":
    main()
