# SPDX-License-Identifier: Apache-2.0
"""Prints the proxy's costs of one kernel, from the repository or from another file.

    PYTHONPATH=. .venv/bin/python -m tests.metal_kernels.proxy_figures decode D=128 C=uint8
    ... decode D=128 --file /elsewhere/decode.metal --set STRIPS=2 --threads 128

Template arguments after the kernel's name select among servers' calls; `--set` replaces or adds
arguments.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import mlx.core as mx
from metal_interpreter import proxy
from metal_interpreter.proxy import FAST_SUM, SLOW_SUM, Call

from metal_kernels.kernel import BODY_MARKER
from tests.metal_kernels.budgets import decode_budget, keys_of
from tests.metal_kernels.proxy_uses import uses


def value_of(text: str) -> bool | int | mx.Dtype:
    """Parses a template argument: `true`, `8` or `float16`.

    Raises:
        ValueError: it is none of these.
    """
    if text in ("true", "false"):
        return text == "true"
    if text.lstrip("-").isdigit():
        return int(text)
    found = getattr(mx, text, None)
    if not isinstance(found, mx.Dtype):
        raise ValueError(f"{text}: expected true, false, a number or a dtype of MLX's")
    return found


def arguments(texts: Sequence[str]) -> dict[str, bool | int | mx.Dtype]:
    """Parses template arguments `NAME=VALUE`.

    Raises:
        ValueError: one has another form.
    """
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"{text}: expected NAME=VALUE")
        found[name] = value_of(value)
    return found


@cache
def _launched() -> tuple[Call, ...]:
    return tuple(dict.fromkeys(call for use in uses() for call in use.calls()))


def selected(kernel: str, wanted: dict[str, bool | int | mx.Dtype]) -> Iterator[Call]:
    """Yields a kernel's distinct calls by servers that have these template arguments."""
    for call in _launched():
        if call.kernel != kernel:
            continue
        template = call.template
        if all(name in template and template[name] == value for name, value in wanted.items()):
            yield call


def changed(
    call: Call,
    file: Path | None = None,
    template: dict[str, bool | int | mx.Dtype] | None = None,
    threads: int | None = None,
) -> Call:
    """Returns a call with another text, template arguments or number of threads."""
    signature, header, source = call.signature, call.header, call.source
    if file is not None:
        functions, source = file.read_text().split(BODY_MARKER)
        own = header.index(f'"{call.kernel}.metal"\n')  # after the shared files
        header = header[: header.rindex("#line", 0, own)] + f'#line 1 "{file.name}"\n{functions}'
    mentions = type(signature.mentions).of(source, signature.input_names)
    arguments = {**call.template, **(template or {})}
    return Call(
        dataclasses.replace(signature, template=tuple(arguments.items()), mentions=mentions),
        header,
        source,
        call.threadgroup if threads is None else (threads, 1, 1),
    )


def lines(call: Call, keys: float | None = None) -> Iterator[str]:
    """Yields the costs of a call as text; keys: per round of a simdgroup, if not `keys_of` it."""
    figures, keys = proxy.measure(call), keys or keys_of(call)
    template = ", ".join(
        f"{name}={str(value).rpartition('.')[2]}" for name, value in call.template.items()
    )
    yield f"{call.kernel} of {call.threads} threads: {template}"
    yield (
        f"  registers: {figures.loop_registers} in the loop, {figures.registers} in all; "
        f"scratch: {figures.scratch} bytes"
    )
    loads = ", ".join(f"{batch.count} ({batch.bytes} B)" for batch in figures.batches)
    yield f"  loads of a lane before each wait: {loads}; at most {figures.in_flight} B in flight"
    slots = " / ".join(
        f"{figures.slots(of_sum) / (keys or 1):.1f}" for of_sum in (FAST_SUM, SLOW_SUM)
    )
    yield f"  slots a {'key' if keys else 'round'}, a simd_sum at 4 / 10.5: {slots}"
    if call.kernel == "decode":
        bits = 8 * call.template["C"].size
        rows = 8 * call.template["ROW_GROUPS"]
        budget = decode_budget(str(call.template["D"]), bits, rows)
        over = budget.exceeded(figures, keys, bits)
        yield f"  beyond the budget: {'; '.join(over) or 'nothing'}"


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kernel", help="the name of its .metal file")
    parser.add_argument("select", nargs="*", metavar="NAME=VALUE", help="calls to take")
    parser.add_argument("--file", type=Path, help="a .metal file to take instead")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", dest="template")
    parser.add_argument("--threads", type=int, help="of a threadgroup")
    parser.add_argument("--keys", type=float, help="of a round of the main loop, a simdgroup's")
    options = parser.parse_args(given)
    try:
        wanted, template = arguments(options.select), arguments(options.template)
    except ValueError as error:
        parser.error(str(error))
    found = list(selected(options.kernel, wanted))
    if not found:
        parser.error(f"no server launches {options.kernel} with {' '.join(options.select)}")
    for call in dict.fromkeys(changed(c, options.file, template, options.threads) for c in found):
        print("\n".join(lines(call, options.keys)), flush=True)


if __name__ == "__main__":
    main()
