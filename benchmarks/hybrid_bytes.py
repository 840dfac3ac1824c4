# SPDX-License-Identifier: Apache-2.0
"""Bytes that a step of a published hybrid moves by the number of drafts, reckoned and not measured.

One stream that verifies k drafts, weights of 4 bits in groups of 64 with a scale and a bias of 16
bits each (4.5 bits a weight), all else in 16 bits but the states. Two ways of computing the layers
that go from token to token: *by runs*, where the module is called for the certain row and again for
each draft, and the state after each is kept; and *in one call*, where the state is read and written
once, and the small inputs of the recurrence are kept of each draft instead. Decode is bound by what
it reads, so tokens a second follow from a Mac's bandwidth, as an upper bound. Prints the tables of
docs/performance.md as Markdown: `python benchmarks/hybrid_bytes.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from _macs import BY_NAME, GB

DRAFTS = (0, 1, 3, 5)
#: GB/s of memory.
BANDWIDTHS = {name: BY_NAME[name].bandwidth for name in ("M4 Pro", "M4 Max", "M3 Ultra")}
ACCEPTANCE = 0.7  # of each draft whose predecessors were accepted
CONTEXT = 4096  # tokens, whose K and V a step reads
WEIGHT_BYTES = 4.5 / 8
_HALF, _FLOAT = 2, 4  # bytes of a number


@dataclass(frozen=True)
class Experts:
    """MLPs of which a token takes a few."""

    count: int
    chosen: int  # of a token
    width: int
    shared_width: int  # of the one that every token takes

    def touched(self, rows: int) -> float:
        """How many so many rows take in expectation, each choosing by itself: rows of one text
        choose alike more often than that."""
        return self.count * (1 - (1 - self.chosen / self.count) ** rows)


@dataclass(frozen=True)
class Shape:
    """What config.json says of a hybrid of the gated delta rule."""

    name: str
    layers: int
    attending: int  # of them
    hidden: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_size: int
    key_heads: int  # of the recurrent layers, as the next
    value_heads: int
    width: int = 0  # of dense MLPs
    experts: Experts | None = None
    recurrent_size: int = 128  # of their keys and values
    taps: int = 4  # of the convolution

    @property
    def recurrent(self) -> int:
        """Layers that go from token to token."""
        return self.layers - self.attending

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return (2 * self.key_heads + self.value_heads) * self.recurrent_size

    @property
    def projections(self) -> int:
        """Weights of a recurrent layer: of queries, keys and values, of the gate, of rates and
        decays, and of what comes out."""
        values = self.value_heads * self.recurrent_size
        return self.hidden * (self.channels + values + 2 * self.value_heads + values)

    @property
    def attention(self) -> int:
        """Weights of an attending layer, whose queries have a gate each."""
        queries, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        return self.hidden * (2 * queries + 2 * keys + queries)

    def mlp(self, rows: int) -> float:
        """Weights of a layer's MLP that so many rows read."""
        if self.experts is None:
            return 3 * self.hidden * self.width
        experts = self.experts
        routed = 3 * self.hidden * experts.width * experts.touched(rows)
        return routed + self.hidden * (3 * experts.shared_width + experts.count + 1)

    @property
    def head(self) -> int:
        """Weights of the logits, and as many of the embedding, of which a step reads rows."""
        return self.vocabulary * self.hidden

    @property
    def state_bytes(self) -> int:
        """Of a recurrent layer and request: float32 states of the heads, and the convolution's last
        inputs."""
        heads = prod((self.value_heads, self.recurrent_size, self.recurrent_size))
        return _FLOAT * heads + _HALF * (self.taps - 1) * self.channels

    @property
    def kept_bytes(self) -> int:
        """Of a recurrent layer and draft: keys, values, the convolution's inputs, and rates and
        decays in float32."""
        keys_and_values = (self.key_heads + self.value_heads) * self.recurrent_size
        return _HALF * (keys_and_values + self.channels) + _FLOAT * 2 * self.value_heads


QWEN_27B = Shape(
    "Qwen3.5-27B", 64, 16, 5120, 248320, 24, 4, 256, key_heads=16, value_heads=48, width=17408
)
QWEN_35B = Shape(
    "Qwen3.5-35B-A3B",
    40,
    10,
    2048,
    248320,
    16,
    2,
    256,
    key_heads=16,
    value_heads=32,
    experts=Experts(256, 8, 512, 512),
)
SHAPES = (QWEN_27B, QWEN_35B)


@dataclass(frozen=True)
class Moved:
    """Bytes of a step."""

    recurrent: float  # weights of recurrent layers' projections
    others: float  # all other weights, and K and V of the context
    states: float  # read and written, with what is kept of drafts
    drafting: float  # weights that the passes of an MTP layer read

    @property
    def total(self) -> float:
        return self.recurrent + self.others + self.states + self.drafting


def moved(shape: Shape, drafts: int, one_call: bool) -> Moved:
    """What a step of one stream reads and writes.

    Args:
        shape: of the model.
        drafts: that it verifies.
        one_call: whether recurrent layers compute all rows of the step at once; else by runs, where
            each run reads the state before it and writes the one after it, and the next step copies
            the one that holds to its block.
    """
    rows = drafts + 1
    kv = CONTEXT * 2 * shape.kv_heads * shape.head_size * _HALF
    others = shape.attending * (WEIGHT_BYTES * shape.attention + kv)
    others += WEIGHT_BYTES * (shape.layers * shape.mlp(rows) + shape.head)
    weights = WEIGHT_BYTES * shape.recurrent * shape.projections
    if one_call:
        # All drafts were accepted in the worst case: then all that was kept is read.
        states = 2 * shape.state_bytes + 2 * drafts * shape.kept_bytes
    else:
        states, weights = 2 * (rows + 1) * shape.state_bytes, rows * weights
    mtp = shape.attention + shape.mlp(1) + 2 * shape.hidden**2 + shape.head
    return Moved(weights, others, shape.recurrent * states, drafts * WEIGHT_BYTES * mtp)


def tokens_a_step(drafts: int) -> float:
    """Expected tokens where each draft is accepted with `ACCEPTANCE` if those before it were."""
    return sum(ACCEPTANCE**accepted for accepted in range(drafts + 1))


def table(shape: Shape) -> str:
    """Markdown: by number of drafts and way the bytes of a step, and tokens a second."""
    heads = ["weights, recurrent", "others", "states", "MTP", "in all", "tokens", *BANDWIDTHS]
    lines = [
        f"| {shape.name}: drafts | " + " | ".join(heads) + " |",
        "| --- |" + " ---: |" * len(heads),
    ]
    for drafts in DRAFTS:
        for one_call in (False, True):
            found, tokens = moved(shape, drafts, one_call), tokens_a_step(drafts)
            parts = (found.recurrent, found.others, found.states, found.drafting, found.total)
            cells = [f"{part / GB:.2f}" for part in parts] + [f"{tokens:.2f}"]
            cells += [f"{tokens * GB * each / found.total:.0f}" for each in BANDWIDTHS.values()]
            way = "in one call" if one_call else "by runs"
            lines.append(f"| {drafts}, {way} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def kept_table() -> str:
    """Markdown: what a recurrent layer keeps of a request, and of a draft."""
    lines = ["| a recurrent layer | state, kB | kept of a draft, kB | share |"]
    lines.append("| --- | ---: | ---: | ---: |")
    for shape in SHAPES:
        state, kept = shape.state_bytes, shape.kept_bytes
        cells = f"{state / 1e3:,.0f} | {kept / 1e3:.1f} | {kept / state:.2%}"
        lines.append(f"| {shape.name} | {cells} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print("\n\n".join([*map(table, SHAPES), kept_table()]))
