# SPDX-License-Identifier: Apache-2.0
"""Reads AMD GPU assembly: registers, spills, loads before each wait, and issue slots."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

#: Issue slots of one simdgroup instruction, by the kind that `_kind` finds. An 8x8x8 product takes
#: a core's multipliers 16 slots; the rest is near Mesa's cost model of an M1 (agx_performance.c,
#: where a shuffle is 2). Left out: loads, stores and branches, which other units take, and `tanh`,
#: which a kernel computes for models with soft caps only.
SLOTS = {"multiply": 16, "exponential": 4, "shuffle": 1, "plain": 1, "pair": 2}
#: A sum or maximum over a simdgroup takes that many, by Apple's own shuffles and adds; and, as
#: MLX's published timings have it, 10.5.
FAST_SUM, SLOW_SUM = 4.0, 10.5

_EXPONENTIALS = ("exp", "exp2", "log", "log2", "sin", "cos", "sqrt", "rsqrt")
_LABEL = re.compile(r"(\.LBB\w+):")
_INSTRUCTION = re.compile(r"\s+([a-zA-Z]\w+)\b([^;]*)")
_BRANCH = re.compile(r"s_c?branch")
_LOAD = re.compile(r"(?:global|flat)_load_(?:d16_)?(?:hi_)?([a-z]+)(\d+)")
_WAIT = re.compile(r"vmcnt\((\d+)\)")
_REGISTERS = re.compile(r"\bv(?:(\d+)|\[(\d+):(\d+)\])")


@dataclass(frozen=True)
class Instruction:
    """One instruction of the assembly."""

    name: str
    operands: str

    @property
    def loaded_bytes(self) -> int:
        """Bytes that the instruction loads from device memory per lane; 0 if it is not a load."""
        load = _LOAD.match(self.name)
        return int(load[2]) // 8 if load else 0

    @property
    def registers(self) -> Iterator[int]:
        for one, first, last in _REGISTERS.findall(self.operands):
            yield from (int(one),) if one else range(int(first), int(last) + 1)


@dataclass(frozen=True)
class Batch:
    """Number and bytes of the loads that one lane issues between two waits."""

    count: int
    bytes: int


@dataclass(frozen=True)
class Figures:
    """Costs of a kernel that its assembly shows; a *round* is one iteration of its main loop.

    The main loop is the longest loop that loads from device memory, or the innermost loop inside
    it that contains all of its loads and matrix products. Without loops it is the whole kernel.
    """

    registers: int  # of 32 bits a thread, anywhere
    loop_registers: int  # that the main loop names
    scratch: int  # bytes a thread that lie in memory: spills beyond 256, large arrays by an index
    batches: tuple[Batch, ...]  # of a round of the main loop, in order
    kinds: Counter[str]  # instructions of a round: keys of SLOTS, and "sum"
    threads: int  # of a threadgroup

    def slots(self, of_sum: float) -> float:
        """Issue slots of a simdgroup per loop iteration, if a `simd_sum` takes `of_sum` slots."""
        slots = sum(SLOTS[kind] * count for kind, count in self.kinds.items() if kind in SLOTS)
        return slots + of_sum * self.kinds["sum"]

    @property
    def in_flight(self) -> int:
        """Maximum bytes of a threadgroup's loads in flight at a wait; 0 without loads."""
        return max((batch.bytes for batch in self.batches), default=0) * self.threads

    @property
    def loaded(self) -> int:
        """Bytes that a threadgroup loads per iteration of the loop."""
        return sum(batch.bytes for batch in self.batches) * self.threads


def read(assembly: str, name: str) -> Figures:
    """Returns the costs of the kernel `name` in `assembly`, which clang wrote with `-S`.

    Raises:
        ValueError: the assembly has no such kernel.
    """
    function = _Function.of(assembly, name)
    round_ = function.main_loop or function.instructions

    def number(key: str) -> int:
        found = re.search(rf"^\s+\.{key}:\s*(\d+)", assembly, re.MULTILINE)
        if found is None:
            raise ValueError(f"{name}: the assembly has no .{key}")
        return int(found[1])

    registers = {register for instruction in round_ for register in instruction.registers}
    return Figures(
        registers=number("vgpr_count"),
        loop_registers=len(registers),
        scratch=number("private_segment_fixed_size"),
        batches=tuple(_batches(round_)),
        kinds=Counter(kind for kind in map(_kind, round_) if kind),
        threads=number("max_flat_workgroup_size"),
    )


@dataclass(frozen=True)
class _Function:
    lines: tuple[str | Instruction, ...]  # a string is a label

    @staticmethod
    def of(assembly: str, name: str) -> _Function:
        found = re.search(rf"^{name}:(.*?)^\.Lfunc_end", assembly, re.MULTILINE | re.DOTALL)
        if found is None:
            raise ValueError(f"the assembly has no kernel of the name {name}")
        lines: list[str | Instruction] = []
        for line in found[1].splitlines():
            if label := _LABEL.match(line):
                lines.append(label[1])
            elif instruction := _INSTRUCTION.match(line):
                lines.append(Instruction(instruction[1], instruction[2].strip()))
        return _Function(tuple(lines))

    @property
    def instructions(self) -> list[Instruction]:
        return [line for line in self.lines if isinstance(line, Instruction)]

    @cached_property
    def main_loop(self) -> list[Instruction]:
        """Instructions of the main loop (see `Figures`); empty if no loop loads.

        Of nested loops, it is the inner one, unless that only loads for a product outside of it: an
        outer loop without loads or products of its own runs once for many rounds of the inner one.
        """
        loops = [body for body in self._loops if any(x.loaded_bytes for x in body)]
        if not loops:
            return []
        work = _work(max(loops, key=len))
        return min((body for body in loops if _work(body) == work), key=len)

    @property
    def _loops(self) -> list[list[Instruction]]:
        """Loop bodies, one per label that is branched back to, up to the last such branch."""
        labels = {line: at for at, line in enumerate(self.lines) if isinstance(line, str)}
        ends: dict[int, int] = {}  # by the label's place
        for at, line in enumerate(self.lines):
            if isinstance(line, Instruction) and _BRANCH.match(line.name):
                start = labels.get(line.operands, at)
                if start < at:
                    ends[start] = at
        bodies = [self.lines[start : end + 1] for start, end in ends.items()]
        return [[x for x in body if isinstance(x, Instruction)] for body in bodies]


def _work(body: Sequence[Instruction]) -> list[int]:
    """Returns ids of the instructions that load from device memory or multiply matrices."""
    return [id(x) for x in body if x.loaded_bytes or _kind(x) == "multiply"]


def _batches(round_: Sequence[Instruction]) -> list[Batch]:
    """Returns the loads between waits of a round that follows another round.

    A loop's first instructions may wait for loads of its last ones in the round before.
    """
    found = []
    under_way, count, size = 0, 0, 0  # loads; since the last wait: loads, and their bytes
    for is_first in (True, False):
        for instruction in round_:
            if loaded := instruction.loaded_bytes:
                under_way, count, size = under_way + 1, count + 1, size + loaded
            left = _WAIT.search(instruction.operands)
            if left and under_way > int(left[1]):
                if count and not is_first:
                    found.append(Batch(count, size))
                under_way, count, size = int(left[1]), 0, 0
    return found


def _kind(instruction: Instruction) -> str | None:
    """Returns an instruction's key in SLOTS, or "sum"; None if it takes no slot."""
    name = instruction.name
    if name.startswith("metal_"):
        name = name.removeprefix("metal_")
        if name in ("multiply", "shuffle"):
            return name
        if name.startswith("simd_"):
            return "sum"
        return "exponential" if name in _EXPONENTIALS else None
    if name.startswith(("v_dual", "v_pk")):
        return "pair"
    return "plain" if name.startswith("v_") else None
