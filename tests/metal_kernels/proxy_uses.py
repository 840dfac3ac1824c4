# SPDX-License-Identifier: Apache-2.0
"""Lists servers' kernel launches, by size and cache, in the dtypes of served models.

Excludes float32 pools, which no fast server has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import mlx.core as mx
from metal_interpreter import proxy

from metal_kernels import kernel
from metal_kernels.kv_write import RotationKind
from metal_kernels.paged_attention import AttentionShape
from metal_kernels.paged_attention.op import HEAD_SIZES, LATENT_SIZES, SIZES_APART
from tests.metal_kernels.launches import attend, convolve, gather, move, recur, rotate, write

F16, BF16, F32, FP8, INT8 = mx.float16, mx.bfloat16, mx.float32, mx.uint8, mx.int8
#: Dtypes of rows and pool by bits of the pool's elements.
DTYPES = {16: ((F16, F16), (BF16, BF16)), 8: ((BF16, FP8), (F16, INT8))}
_LONG = [(2000, 1)]  # a context that is split
_MANY = [(20, 1)] * 40  # more than have 512 threads each


@dataclass(frozen=True)
class Use:
    """A purpose of kernel launches, by size and bits of the pool's elements."""

    what: str
    size: str
    bits: int
    #: Functions that launch it with different dtypes or variants.
    runs: tuple[Callable[[], None], ...]
    apart: tuple[str, ...] = ()  # other launched kernels, which are uses of their own

    def calls(self, most: int | None = None) -> list[proxy.Call]:
        """Returns the launches of the first `most` runs; None: all."""
        recorder = proxy.Recorder()
        with kernel.using(recorder.metal_kernel):
            for run in self.runs[:most]:
                run()
        return [call for call in recorder.calls if call.kernel not in self.apart]

    def __str__(self) -> str:
        return f"{self.what}, {self.size}, {self.bits} bit"


def uses() -> Iterator[Use]:
    """Yields all uses in table order."""
    yield from _attention()
    yield from _caches()
    yield from _states()


def _attention() -> Iterator[Use]:
    shapes = [(f"{size}", AttentionShape(8, 1, size, size)) for size in HEAD_SIZES]
    shapes += [(f"{k}/{v}", AttentionShape(16, 1, k, v)) for k, v in LATENT_SIZES]
    few = [("128", AttentionShape(group, 1, 128, 128)) for group in (1, 4)]
    apart = [(f"{k}/{v}", AttentionShape(8, 1, k, v)) for k, v in SIZES_APART]
    # Tiles of 16 and 32 rows have as many simdgroups per walk, and the most registers.
    many = [
        (f"{size}", AttentionShape(group, 1, size, size))
        for group, size in ((16, 128), (32, 64), (32, 128), (16, 192), (16, 256))
    ]
    for size, shape in (*few, *shapes, *apart, *many):
        heads = f"{shape.group} heads" if shape.group > 1 else "1 head"
        for bits, dtypes in DTYPES.items():
            runs = [partial(attend, [(20, 1)], shape, *pair) for pair in dtypes]
            runs += [partial(attend, requests, shape, *dtypes[0]) for requests in (_LONG, _MANY)]
            yield Use(f"decode, {heads}", size, bits, tuple(runs), apart=("reduce",))
    for size, shape in shapes:
        for bits, dtypes in DTYPES.items():
            runs = [partial(attend, [(0, 64)], shape, *pair) for pair in dtypes]
            yield Use("prompt", size, bits, tuple(runs), apart=("reduce",))
    for size, shape in (shapes[3], shapes[-1]):
        runs = [partial(attend, _LONG, shape, dtype) for dtype in (F16, BF16)]
        yield Use("parts joined", size, 16, tuple(runs), apart=("decode", "prefill"))


def _caches() -> Iterator[Use]:
    rows = (("128", 128, 128), ("512", 512, 512), ("576", 576, None))
    for (size, *sizes), (bits, dtypes) in product(rows, DTYPES.items()):
        runs = [partial(write, *pair, *sizes) for pair in dtypes]
        yield Use("K/V written", size, bits, tuple(runs))
    kinds = (
        ("128", 128, RotationKind(128), True),
        ("256, of them 64", 256, RotationKind(64), True),
        ("576, of them 64", 576, RotationKind(64, 512, True, True), False),
    )
    for (size, key_size, kind, values), (bits, dtypes) in product(kinds, DTYPES.items()):
        runs = [partial(rotate, *pair, kind, key_size, values) for pair in dtypes]
        yield Use("K/V written, rotated", size, bits, tuple(runs))
    for bits, dtypes in DTYPES.items():
        runs = [partial(gather, *pair, 128) for pair in dtypes]
        yield Use("contexts gathered", "128", bits, tuple(runs))
    moves = {
        "kv_blocks": "blocks copied, cleared",
        "read_states": "states read",
        "write_states": "states written",
    }
    for (name, what), (bits, dtypes) in product(moves.items(), DTYPES.items()):
        runs = [partial(move, cache) for _, cache in dtypes]
        yield Use(what, "any", bits, tuple(runs), apart=tuple(moves.keys() - {name}))


def _states() -> Iterator[Use]:
    yield Use("convolution", "4 taps", 16, tuple(partial(convolve, *pair) for pair in DTYPES[16]))
    rules = (
        ("delta rule", (64, 128, 256), 0, True, F32),
        ("delta rule, decays of keys", (128,), 1, True, F32),
        ("state space", (64, 128, 256), 0, False, F32),
        ("selective scan", (16,), 2, False, None),  # states have the dtype of rows
    )
    for what, sizes, *rule in rules:
        for size in sizes:
            runs = [partial(recur, *pair, size, *rule) for pair in DTYPES[16]]
            yield Use(what, f"{size}", 16, tuple(runs))
