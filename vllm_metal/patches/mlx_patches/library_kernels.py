# SPDX-License-Identifier: Apache-2.0
"""Compares mlx-lm's own Metal kernels with its operations on this GPU; a wrong one is not used.

mlx-lm launches them wherever there is a GPU. Each has a twin in MLX's operations, which mlx-lm
takes elsewhere. The kernel runs on the GPU, the twin in float32 on the CPU, over the shapes that a
model has, once for a machine, in a process of its own. Where the kernel is wrong, hangs or ends its
process, its twin takes its place.

    python -m vllm_metal.patches.mlx_patches.library_kernels < call.json

Reads a call and prints its outcome, as JSON.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from types import MappingProxyType, ModuleType
from typing import Any

import mlx.core as mx
import numpy as np

from metal_kernels.selfcheck import dtype_name
from vllm_metal.device.record import Record
from vllm_metal.patches.mlx_patches.replacing import replaced

RELEASES = ("mlx-lm 0.32",)
COMMAND = (sys.executable, "-m", "vllm_metal.patches.mlx_patches.library_kernels")
#: Seconds for one kernel. Importing mlx-lm takes the most of what it needs; only a hang takes more.
TIME_LIMIT = 90.0
_KIND = "library kernel"  # of rows in the record
_SEQUENCES = 2
#: Share of the largest element of a result by which float32 sums over a head, and the GPU's fast
#: exponential, may be off; on top of the rounding to the result's own dtype.
_ROUNDING = 2e-4

Arguments = tuple[Any, ...]  # arrays, or None and JSON values as they are


@dataclass(frozen=True)
class Entry:
    """A kernel of mlx-lm's: a function whose place in its module another one may take."""

    module: str  # of mlx_lm.models
    kernel: str  # name of the function that launches it
    twin: str | None  # name of the same in MLX's operations; None: `operations`
    state: int  # place among the arguments; the second result is the state after them
    factors: tuple[int, ...]  # places of arguments between 0 and 1
    lengths: tuple[int, ...]  # of sequences that it takes

    @property
    def name(self) -> str:
        return f"{self.module}.{self.kernel}"

    def loaded(self) -> ModuleType | None:
        """Its module, if mlx-lm has imported it."""
        return sys.modules.get(f"mlx_lm.models.{self.module}")

    def operations(self, module: ModuleType) -> Callable[..., Any]:
        """The twin."""
        if self.twin is not None:
            twin: Callable[..., Any] = getattr(module, self.twin)
            return twin
        return lambda *arguments: _stepwise(module, *arguments)


#: All that models which are served launch with a state.
ENTRIES = (
    Entry("ssm", "ssm_update_kernel", "ssm_attn", state=7, factors=(), lengths=(1,)),
    Entry(
        *("gated_delta", "gated_delta_kernel", "gated_delta_ops"),
        state=5,
        factors=(3, 4),
        lengths=(1, 16),
    ),
    Entry("rwkv7", "wkv7_kernel", None, state=6, factors=(1,), lengths=(1, 16)),
)
_BY_NAME: Mapping[str, Entry] = MappingProxyType({entry.name: entry for entry in ENTRIES})


@dataclass(frozen=True)
class Call:
    """A kernel and the arguments of one token that a model gives it."""

    name: str  # of an Entry
    #: For each argument, the shape and the dtype of an array, else the value.
    arguments: tuple[tuple[tuple[int, ...], str] | Any, ...]

    @property
    def takes_texts(self) -> bool:
        """Whether mlx-lm launches the kernel for more than one token at a time."""
        return max(_BY_NAME[self.name].lengths) > 1

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> Call:
        return Call(fields["name"], _as_tuples(fields["arguments"]))


@dataclass(frozen=True)
class Verdict:
    """What a check of a call found."""

    call: Call
    ok: bool
    detail: str = ""  # what is wrong

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> Verdict:
        return Verdict(Call.from_json(fields["call"]), fields["ok"], fields["detail"])


@contextmanager
def noted() -> Iterator[list[Call]]:
    """Within, calls of the kernels, or of their twins, are added to the list, each once."""
    calls: list[Call] = []
    with ExitStack() as stack:
        for entry in ENTRIES:
            if (module := entry.loaded()) is None:
                continue
            for name in filter(None, (entry.kernel, entry.twin)):
                noting = _noting(entry, getattr(module, name), calls)
                stack.enter_context(replaced(module, name, noting))
        yield calls


def _noting(entry: Entry, function: Callable[..., Any], calls: list[Call]) -> Callable[..., Any]:
    def called(*arguments: Any, **named: Any) -> Any:
        results = function(*arguments, **named)
        given = list(arguments)
        if len(given) > entry.state and given[entry.state] is None:
            given[entry.state] = results[1]
        call = Call(entry.name, tuple(map(_described, given)))
        if call not in calls:
            calls.append(call)
        return results

    return called


def replace_wrong(
    calls: Iterable[Call],
    command: Sequence[str] = COMMAND,
    time_limit: float = TIME_LIMIT,
    record: Record | None = None,
) -> list[Verdict]:
    """Checks each call once for a machine; operations take the place of kernels that fail.

    Args:
        calls: that a model makes.
        command: of a process that reads a call and prints a verdict, as this module does.
        time_limit: seconds for a call.
        record: where verdicts are kept; None: in the user's cache folder.

    Returns:
        The verdicts that are failures.
    """
    record = record or Record()
    known = {verdict.call: verdict for verdict in map(Verdict.from_json, record.rows(_KIND))}
    failed = []
    for call in dict.fromkeys(calls):
        verdict = known.get(call)
        if verdict is None:
            verdict = _checked_apart(call, command, time_limit)
            record.add(_KIND, asdict(verdict))
        if not verdict.ok:
            use_operations(_BY_NAME[call.name])
            failed.append(verdict)
    return failed


def use_operations(entry: Entry) -> None:
    """Puts the twin in the place of the kernel, for this process."""
    module = importlib.import_module(f"mlx_lm.models.{entry.module}")
    setattr(module, entry.kernel, entry.operations(module))


def check(call: Call) -> Verdict:
    """Compares kernel and twin in this process, on MLX's default device and on the CPU."""
    entry = _BY_NAME[call.name]
    module = importlib.import_module(f"mlx_lm.models.{entry.module}")
    operations = entry.operations(module)
    worst, detail = 0.0, ""
    for length in entry.lengths:
        arguments = _made(entry, call, length)
        found = getattr(module, entry.kernel)(*arguments)
        mx.eval(found)
        with mx.stream(mx.cpu):
            wanted = operations(*(_exact(argument) for argument in arguments))
            mx.eval(wanted)
        for what, ours, theirs in zip(("output", "state"), found, wanted, strict=True):
            share, said = _compared(ours, theirs)
            if share > worst:
                worst, detail = share, f"{what} of {length} tokens {said}"
    return Verdict(call, worst <= 1, "" if worst <= 1 else detail)


def _compared(found: mx.array, wanted: mx.array) -> tuple[float, str]:
    """The largest error as a share of what rounding allows, and what it is, for people."""
    eps = mx.finfo(found.dtype).eps
    ours, theirs = (np.array(array.astype(mx.float32)) for array in (found, wanted))
    allowed = 2 * eps * np.abs(theirs) + _ROUNDING * np.abs(theirs).max()
    error = np.nan_to_num(np.abs(ours - theirs), nan=np.inf)
    place = np.unravel_index(np.argmax(error / allowed), error.shape)
    said = f"is {ours[place]:.6g}, expected {theirs[place]:.6g} within {allowed[place]:.2g}"
    return float((error / allowed)[place]), said


def _made(entry: Entry, call: Call, length: int) -> Arguments:
    """Random arguments like the call's, for two sequences of so many tokens."""
    rng = np.random.default_rng(0)
    made = []
    for place, described in enumerate(call.arguments):
        if not _is_array(described):
            made.append(described)
            continue
        shape, dtype = described
        if place == entry.state:
            shape = (_SEQUENCES, *shape[1:])
        elif shape[:2] == (1, 1):
            shape = (_SEQUENCES, length, *shape[2:])
        if place in entry.factors:
            values = rng.uniform(0.5, 1.0, shape)
        else:  # rows of length 1, so that states stay small
            values = rng.normal(size=shape) / np.sqrt(shape[-1])
        made.append(mx.array(values.astype(np.float32)).astype(getattr(mx, dtype)))
    return tuple(made)


def _stepwise(module: ModuleType, *arguments: Any) -> tuple[mx.array, mx.array]:
    """The recurrence of RWKV-7, a token at a time, by mlx-lm's own step."""
    *rows, state = arguments
    outputs = []
    for token in range(rows[0].shape[1]):
        output, state = module._wkv7_step_ops(*(row[:, token] for row in rows), state)
        outputs.append(output.squeeze(-1))
    return mx.stack(outputs, axis=1).astype(rows[0].dtype), state


def _checked_apart(call: Call, command: Sequence[str], time_limit: float) -> Verdict:
    try:
        ended = subprocess.run(
            command,
            input=json.dumps(asdict(call)),
            capture_output=True,
            text=True,
            timeout=time_limit,
        )
    except subprocess.TimeoutExpired:
        return Verdict(call, False, f"did not end within {time_limit:g} s")
    last = (ended.stdout.strip().splitlines() or [""])[-1]
    if ended.returncode == 0:
        try:
            return Verdict.from_json(json.loads(last))
        except (ValueError, KeyError, TypeError):
            pass
    said = (ended.stderr.strip().splitlines() or [last])[-1]
    status = ended.returncode
    how = f"signal {-status}" if status < 0 else f"status {status}"
    return Verdict(call, False, f"ended its process with {how}: {said}")


def _described(argument: Any) -> Any:
    if isinstance(argument, mx.array):
        return tuple(argument.shape), dtype_name(argument.dtype)
    return _as_tuples(argument)


def _is_array(described: Any) -> bool:
    return (
        isinstance(described, tuple)
        and len(described) == 2
        and isinstance(described[0], tuple)
        and isinstance(described[1], str)
    )


def _exact(argument: Any) -> Any:
    return argument.astype(mx.float32) if isinstance(argument, mx.array) else argument


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, (list, tuple)) else value


if __name__ == "__main__":
    print(json.dumps(asdict(check(Call.from_json(json.load(sys.stdin))))))
