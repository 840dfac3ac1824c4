# SPDX-License-Identifier: Apache-2.0
"""Lists all kernels to check; Case is a kind of layer, Outcome the result of one check."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from math import exp, log
from statistics import fmean
from typing import Any, NamedTuple

import mlx.core as mx

from metal_kernels.kv_write import RotationKind
from metal_kernels.op_common import QUANTIZED_DTYPES, SCALE_DTYPE
from metal_kernels.paged_attention import AttentionShape

#: In the order of the checks. All others read what kv_write wrote. Three are not kernels: `graph`
#: runs a step's writes and attention in a graph that MLX traced and rebuilds; `gathered` is MLX's
#: attention of prompts over contexts read by `kv_gather`; `rotation` is kv_write with rotation of
#: keys and queries.
KERNELS = (
    "kv_write",
    "kv_gather",
    "kv_blocks",
    "kv_states",
    "decode",
    "prefill",
    "reduce",
    "graph",
    "gathered",
    "convolution",
    "recurrence",
    "rotation",
)
#: Checked after the kernels: the fastest backend for attention, and for long prompts through the
#: delta rule. Their outcomes have the times of each backend.
CHOICES = ("decode_way", "prefill_way", "recurrence_way")
#: Our kernels; or MLX's fused attention over contexts read by `kv_gather`, and its
#: chunked delta rule between a read and a write by `kv_states`.
BACKENDS = ("metal", "mlx")
#: The first of BACKENDS is only replaced by one that is faster by more than this share: repeated
#: runs differ by a few percent.
TIE = 0.05
_DTYPES = ("dtype", "cache_dtype")


@dataclass(frozen=True)
class StateKind:
    """States of recurrent layers, and the rule that updates them."""

    #: (HK, DK, HV, DV) of `RecurrenceInputs`; None: no recurrence.
    heads: tuple[int, int, int, int] | None = None
    delta: bool = False
    decays: str = "heads"  # one per head, per key element ("keys"), or computed from "rates"
    dtype: mx.Dtype = mx.float32  # of recurrent states; a convolution's states have the rows' dtype
    channels: int = 0  # of the convolution; 0: no convolution
    taps: int = 4

    @property
    def has_chunks(self) -> bool:
        """Whether MLX has a function that advances such states in chunks."""
        by_heads = self.delta and self.decays == "heads" and self.dtype == mx.float32
        return self.heads is not None and by_heads

    def to_json(self) -> dict[str, Any]:
        return vars(self) | {"dtype": dtype_name(self.dtype)}

    @staticmethod
    def from_json(fields: dict[str, Any]) -> StateKind:
        heads = fields["heads"] and tuple(fields["heads"])
        return StateKind(**fields | {"dtype": getattr(mx, fields["dtype"]), "heads": heads})

    def __str__(self) -> str:
        parts = [f"{self.channels} channels"] if self.channels else []
        if self.heads is not None:
            num_keys, key_size, num_heads, value_size = self.heads
            rule = "by the delta rule" if self.delta else "in a state-space model"
            parts.append(
                f"{num_heads}/{num_keys} heads of {value_size} x {key_size} {rule}, decays of "
                f"{self.decays}, {dtype_name(self.dtype)}"
            )
        return "states of " + " and ".join(parts)


@dataclass(frozen=True)
class Case:
    """One kind of layer over one kind of pool."""

    shape: AttentionShape
    dtype: mx.Dtype  # of queries, keys and values
    cache_dtype: mx.Dtype  # of the pool: `dtype`, or uint8 (fp8 e4m3) or int8
    block_size: int
    window: int | None = None  # positions a query sees, including its own; None: all before it
    sinks: bool = False  # in every other step
    softcap: float | None = None
    extent: int | None = None  # distances with a relative bias; None: no bias
    kernels: tuple[str, ...] = KERNELS  # subset of KERNELS and CHOICES to check
    states: StateKind | None = None  # of recurrent layers that share the pool
    rotation: RotationKind | None = None  # supported by writes

    @property
    def row_bytes(self) -> int:
        """Bytes of one position's K or V, over all heads."""
        scale = SCALE_DTYPE.size if self.cache_dtype in QUANTIZED_DTYPES else 0
        row = self.shape.head_size * self.cache_dtype.size + scale
        return self.shape.num_kv_heads * row

    def to_json(self) -> dict[str, Any]:
        dtypes = {name: dtype_name(getattr(self, name)) for name in _DTYPES}
        states = None if self.states is None else self.states.to_json()
        shape = dataclasses.asdict(self.shape)
        return vars(self) | dtypes | {"shape": shape, "states": states}

    @staticmethod
    def from_json(fields: dict[str, Any]) -> Case:
        dtypes = {name: getattr(mx, fields[name]) for name in _DTYPES}
        shape, kernels = AttentionShape(**fields["shape"]), tuple(fields["kernels"])
        states, rotation = fields.get("states"), fields.get("rotation")
        of_states = None if states is None else StateKind.from_json(states)
        of_rotation = None if rotation is None else RotationKind(*rotation)
        whole = {"shape": shape, "kernels": kernels, "states": of_states, "rotation": of_rotation}
        return Case(**fields | dtypes | whole)

    def __str__(self) -> str:
        size = self.shape.head_size
        parts = [
            f"{self.shape.num_heads}/{self.shape.num_kv_heads} heads of "
            + (
                f"{size} (values {self.shape.value_size})"
                if self.shape.value_size != size
                else f"{size}"
            ),
            dtype_name(self.dtype),
            f"{dtype_name(self.cache_dtype)} cache in blocks of {self.block_size}",
        ]
        if self.window is not None:
            parts.append(f"window {self.window}")
        if self.softcap is not None:
            parts.append(f"soft cap {self.softcap}")
        if self.extent is not None:
            parts.append(f"bias of {self.extent} distances")
        if self.states is not None:
            parts.append(str(self.states))
        if self.rotation is not None:
            parts.append(str(self.rotation))
        return ", ".join(parts)


class Check(NamedTuple):
    """One kernel of a case, with one size of tile if it uses tiles."""

    kernel: str  # of KERNELS or CHOICES
    rows: int | None = None  # packed rows of a tile; None: no tiles
    wide: bool = False  # for decode: threadgroups of 512 threads

    def __str__(self) -> str:
        size = "" if self.rows is None else f" of {self.rows} rows"
        return self.kernel + size + (" in 512 threads" if self.wide else "")


@dataclass(frozen=True)
class Outcome:
    """The result of one check of one case."""

    kernel: str
    case: Case
    ok: bool
    detail: str = ""  # the error and its location
    #: Error of the element nearest to, or furthest past, its tolerance. None: nothing was computed.
    largest_error: float | None = None
    tolerance: float | None = None  # of that element, likewise
    seconds: float = 0.0  # including compilation
    rows: int | None = None  # packed rows of the checked tile; None: no tiles
    wide: bool = False  # as in its check
    log: str = ""  # an exception's full message; `detail` is a line of it
    #: For one of CHOICES: median seconds by backend, then call. Empty: not timed.
    times: dict[str, dict[str, float]] = field(default_factory=dict)
    #: For "decode_way": by call, our kernels' share of the machine's peak, see
    #: `contiguous.decode_shares`.
    shares: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def check(self) -> Check:
        return Check(self.kernel, self.rows, self.wide)

    def gain(self, backend: str) -> float:
        """Speedup of `backend` ("mlx") over our kernels: geometric mean over the timed calls."""
        first = self.times[BACKENDS[0]]
        return exp(
            fmean(log(first[call] / seconds) for call, seconds in self.times[backend].items())
        )

    @property
    def fastest(self) -> str:
        """The faster of "metal" (our kernels) and "mlx"; "metal" in a tie or without timings."""
        best = max(self.times, key=self.gain) if self.ok and self.times else BACKENDS[0]
        return best if best in self.times and self.gain(best) > 1 + TIE else BACKENDS[0]

    @property
    def fewest_rows(self) -> int | None:
        """Smallest row count from which "mlx" is always faster, by more than TIE; None: never.

        Reads row counts from the names of the timed calls, "1 x ROWS of ...".
        """
        fewest = None
        ours, others = (self.times.get(backend, {}) if self.ok else {} for backend in BACKENDS)
        rows = sorted((int(call.split()[2]), call) for call in ours if call in others)
        for count, call in reversed(rows):
            if ours[call] <= others[call] * (1 + TIE):
                break
            fewest = count
        return fewest

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "case": self.case.to_json()}

    @staticmethod
    def from_json(fields: dict[str, Any]) -> Outcome:
        return Outcome(**fields | {"case": Case.from_json(fields["case"])})


def dtype_name(dtype: mx.Dtype) -> str:
    """Returns a name such as ``bfloat16``."""
    return str(dtype).rpartition(".")[2]
