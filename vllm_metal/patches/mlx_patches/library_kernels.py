# SPDX-License-Identifier: Apache-2.0
"""Checks mlx-lm's own Metal kernels on this GPU, and replaces wrong ones by MLX's operations.

mlx-lm launches these kernels on any GPU; elsewhere it uses an equivalent function in MLX's
operations. The check runs the kernel on the GPU and the equivalent in float32 on the CPU, with the
model's shapes, once per machine, in its own process. The equivalent replaces a kernel that is
wrong, hangs or crashes.

    python -m vllm_metal.patches.mlx_patches.library_kernels < call.json

reads a call and prints its verdict, as JSON.
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
#: Seconds for one kernel, most of them for importing mlx-lm; only a hang takes longer.
TIME_LIMIT = 90.0
_KIND = "library kernel"  # kind of rows in the record
_SEQUENCES = 2
#: Tolerance relative to a result's largest element, for float32 sums over a head and the GPU's
#: fast exponential; added to the rounding of the result's dtype.
_ROUNDING = 2e-4

Arguments = tuple[Any, ...]  # arrays, None or JSON values


@dataclass(frozen=True)
class Entry:
    """A kernel of mlx-lm: a replaceable function of its module."""

    module: str  # module in mlx_lm.models
    kernel: str  # function that launches it
    counterpart: str | None  # function with the same result in MLX's operations; None: `operations`
    state: int  # index of the state argument; the second result is the new state
    factors: tuple[int, ...]  # indices of arguments between 0 and 1
    lengths: tuple[int, ...]  # supported sequence lengths

    @property
    def name(self) -> str:
        return f"{self.module}.{self.kernel}"

    def loaded(self) -> ModuleType | None:
        """Returns the kernel's module if it has been imported."""
        return sys.modules.get(f"mlx_lm.models.{self.module}")

    def operations(self, module: ModuleType) -> Callable[..., Any]:
        """Returns the kernel's equivalent in MLX's operations."""
        if self.counterpart is not None:
            counterpart: Callable[..., Any] = getattr(module, self.counterpart)
            return counterpart
        return lambda *arguments: _stepwise(module, *arguments)


#: All kernels with a state that served models launch.
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
    """A kernel, and shapes and dtypes of its arguments for one token of a model."""

    name: str  # name of an Entry
    #: Shape and dtype of each array argument, else the value.
    arguments: tuple[tuple[tuple[int, ...], str] | Any, ...]

    @property
    def takes_texts(self) -> bool:
        """Whether mlx-lm launches the kernel for several tokens at once."""
        return max(_BY_NAME[self.name].lengths) > 1

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> Call:
        return Call(fields["name"], _as_tuples(fields["arguments"]))


@dataclass(frozen=True)
class Verdict:
    """The result of checking a call."""

    call: Call
    ok: bool
    detail: str = ""  # the error

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> Verdict:
        return Verdict(Call.from_json(fields["call"]), fields["ok"], fields["detail"])


@contextmanager
def noted() -> Iterator[list[Call]]:
    """Collects distinct calls of the kernels, or of their equivalents, within the block."""
    calls: list[Call] = []
    with ExitStack() as stack:
        for entry in ENTRIES:
            if (module := entry.loaded()) is None:
                continue
            for name in filter(None, (entry.kernel, entry.counterpart)):
                recording = _recording(entry, getattr(module, name), calls)
                stack.enter_context(replaced(module, name, recording))
        yield calls


def _recording(entry: Entry, function: Callable[..., Any], calls: list[Call]) -> Callable[..., Any]:
    def called(*arguments: Any, **named: Any) -> Any:
        results = function(*arguments, **named)
        given = list(arguments)
        if len(given) > entry.state and given[entry.state] is None:
            # Without a state, take the shape of the one it returned.
            given[entry.state] = results[1]
        call = Call(entry.name, tuple(map(_describe, given)))
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
    """Checks each call once per machine; replaces kernels that fail by their equivalents.

    Args:
        command: starts a process that reads a call and prints a verdict, as this module does.
        time_limit: seconds per call.
        record: stores verdicts; None: in the user's cache folder.

    Returns:
        The failed verdicts.
    """
    record = record or Record()
    known = {verdict.call: verdict for verdict in map(Verdict.from_json, record.rows(_KIND))}
    failed = []
    for call in dict.fromkeys(calls):
        verdict = known.get(call)
        if verdict is None:
            verdict = _check_in_process(call, command, time_limit)
            record.add(_KIND, asdict(verdict))
        if not verdict.ok:
            use_operations(_BY_NAME[call.name])
            failed.append(verdict)
    return failed


def use_operations(entry: Entry) -> None:
    """Replaces the kernel by its equivalent in this process."""
    module = importlib.import_module(f"mlx_lm.models.{entry.module}")
    setattr(module, entry.kernel, entry.operations(module))


def check(call: Call) -> Verdict:
    """Compares the kernel on MLX's default device with its equivalent on the CPU."""
    entry = _BY_NAME[call.name]
    module = importlib.import_module(f"mlx_lm.models.{entry.module}")
    operations = entry.operations(module)
    worst, detail = 0.0, ""
    for length in entry.lengths:
        arguments = _make_arguments(entry, call, length)
        found = getattr(module, entry.kernel)(*arguments)
        mx.eval(found)
        with mx.stream(mx.cpu):
            wanted = operations(*(_to_float32(argument) for argument in arguments))
            mx.eval(wanted)
        for what, ours, theirs in zip(("output", "state"), found, wanted, strict=True):
            share, message = _compare(ours, theirs)
            if share > worst:
                worst, detail = share, f"{what} of {length} tokens {message}"
    return Verdict(call, worst <= 1, "" if worst <= 1 else detail)


def _compare(found: mx.array, wanted: mx.array) -> tuple[float, str]:
    """Returns the largest error relative to the tolerance, and a message about it."""
    eps = mx.finfo(found.dtype).eps
    ours, theirs = (np.array(array.astype(mx.float32)) for array in (found, wanted))
    allowed = 2 * eps * np.abs(theirs) + _ROUNDING * np.abs(theirs).max()
    error = np.nan_to_num(np.abs(ours - theirs), nan=np.inf)
    index = np.unravel_index(np.argmax(error / allowed), error.shape)
    message = f"is {ours[index]:.6g}, expected {theirs[index]:.6g} within {allowed[index]:.2g}"
    return float((error / allowed)[index]), message


def _make_arguments(entry: Entry, call: Call, length: int) -> Arguments:
    """Creates random arguments like the call's, for two sequences of `length` tokens."""
    rng = np.random.default_rng(0)
    made = []
    for index, described in enumerate(call.arguments):
        if not _is_array(described):
            made.append(described)
            continue
        shape, dtype = described
        if index == entry.state:
            shape = (_SEQUENCES, *shape[1:])
        elif shape[:2] == (1, 1):
            shape = (_SEQUENCES, length, *shape[2:])
        if index in entry.factors:
            values = rng.uniform(0.5, 1.0, shape)
        else:  # norm about 1 per row, so that states stay small
            values = rng.normal(size=shape) / np.sqrt(shape[-1])
        made.append(mx.array(values.astype(np.float32)).astype(getattr(mx, dtype)))
    return tuple(made)


def _stepwise(module: ModuleType, *arguments: Any) -> tuple[mx.array, mx.array]:
    """Runs RWKV-7's recurrence one token at a time with mlx-lm's own step."""
    *rows, state = arguments
    outputs = []
    for token in range(rows[0].shape[1]):
        output, state = module._wkv7_step_ops(*(row[:, token] for row in rows), state)
        outputs.append(output.squeeze(-1))
    return mx.stack(outputs, axis=1).astype(rows[0].dtype), state


def _check_in_process(call: Call, command: Sequence[str], time_limit: float) -> Verdict:
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
    message = (ended.stderr.strip().splitlines() or [last])[-1]
    status = ended.returncode
    how = f"signal {-status}" if status < 0 else f"status {status}"
    return Verdict(call, False, f"ended its process with {how}: {message}")


def _describe(argument: Any) -> Any:
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


def _to_float32(argument: Any) -> Any:
    return argument.astype(mx.float32) if isinstance(argument, mx.array) else argument


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, (list, tuple)) else value


if __name__ == "__main__":
    print(json.dumps(asdict(check(Call.from_json(json.load(sys.stdin))))))
