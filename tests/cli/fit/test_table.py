# SPDX-License-Identifier: Apache-2.0
"""The well-known models that fit each Mac without a flag.

`PYTHONPATH=tests python tests/cli/fit/test_table.py` prints the table of docs/memory.md.
"""

import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import torch
from cli.fit.published_shapes import QWEN3

from metal_kernels.layout import BLOCK_SIZES
from vllm_metal.cli.fit import engine
from vllm_metal.cli.fit.estimate import Estimate, Model, estimate
from vllm_metal.cli.fit.machine import Machine
from vllm_metal.engine.memory import advice, budget
from vllm_metal.engine.memory.advice import BudgetError
from vllm_metal.engine.memory.pool_limits import settings_of
from vllm_metal.platform import metal_platform

#: One family from half a billion parameters to thirty, the smallest first.
MODELS = tuple(QWEN3[size] for size in ("0.6B", "1.7B", "4B", "8B", "14B", "30B-A3B"))
PAGE = Path(__file__).parents[3] / "docs" / "memory.md"
GIB = 2**30
MEMORIES = (8, 16, 24, 64, 128, 512)
#: Share of a busy Mac's memory held by other programs: a browser, an editor, a video call.
BUSY = 0.5
LARGE = 32  # GB, from where on a busy Mac's programs hold no more than they do there


@dataclass(frozen=True)
class Found:
    """A model on a Mac: the engine's settings, or its error."""

    pool: int = 0
    context: int = 0
    flags: tuple[str, ...] = ()  # any of which makes it start; empty: it starts, or nothing does
    refused: bool = False


def served(known) -> tuple[Estimate, object]:
    """Returns an engine's measurements of a model without flags; equal on every Mac."""
    return _served(known.name)


@cache
def _served(name: str) -> tuple[Estimate, object]:
    (known,) = (each for each in MODELS if each.name == name)
    with known.folder() as path:
        model = Model.read(path, known.config["model_type"], torch.bfloat16)
        config = engine.config(
            model_type=known.config["model_type"],
            dtype=torch.bfloat16,
            cache_dtype="auto",
            block_size=BLOCK_SIZES[0],
            max_model_len=known.config["max_position_embeddings"],
            fitted=True,
            max_num_batched_tokens=metal_platform.MAX_NUM_BATCHED_TOKENS["metal"],
            max_num_seqs=metal_platform.MAX_NUM_SEQS,
        )
        return estimate(model, config, Machine.mac(64 * GIB)), config


def mac(memory: int, busy: bool) -> Machine:
    """Returns a Mac; memory of others beyond what Metal leaves them reduces its share."""
    made = Machine.mac(memory * GIB)
    held = BUSY * min(memory, LARGE) * GIB if busy else 0
    return replace(made, in_use=int(max(held - (memory * GIB - made.total), 0)))


def on(known, machine: Machine) -> Found:
    """Returns the engine's settings or error there."""
    estimated, config = served(known)
    figures = replace(
        estimated.measured, total=machine.total, in_use=machine.in_use, cache=machine.cache
    )
    settings = settings_of(config, machine.kind, estimated.needs, machine.total)
    request = estimated.request()
    try:
        pool = advice.check(figures, settings, request).left
    except BudgetError:
        changes = list(advice.changes(figures, settings, request))
        for change in changes:
            assert budget.fits(change.measured, change.settings, change.request), change.advice
        ours = [change for change in changes if change.advice.startswith("--")]
        return Found(flags=tuple(change.advice for change in ours), refused=True)
    return Found(pool, budget.longest(figures, settings, request))


def table() -> str:
    """Formats pools and shortened contexts by model and Mac; idle / busy if they differ."""
    heads = [f"{memory} GB" for memory in MEMORIES]
    lines = ["| | " + " | ".join(heads) + " |", "| --- |" + " ---: |" * len(heads)]
    for known in MODELS:
        cells = []
        for memory in MEMORIES:
            idle, busy = (cell(on(known, mac(memory, busy)), known) for busy in (False, True))
            cells.append(idle if idle == busy else f"{idle} / {busy}")
        lines.append(f"| {known.name}-4bit | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cell(found: Found, known) -> str:
    if found.refused:
        return "refused" if not found.flags else "flags"
    whole = found.context == known.config["max_position_embeddings"]
    return f"{found.pool / GIB:.1f}" + ("" if whole else f" ({found.context // 1024}k)")


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize(
    "known",
    [
        pytest.param(known, marks=() if known in (QWEN3["0.6B"], QWEN3["8B"]) else pytest.mark.more)
        for known in MODELS
    ],
    ids=lambda known: known.name,
)
def test_a_model_starts_without_a_flag_or_is_refused_with_one_that_works(known, memory, busy):
    found = on(known, mac(memory, busy))  # each change that is named is tried there
    weights = served(known)[0].measured.weights
    if not found.refused:
        assert found.context >= 1024 and found.pool + weights < mac(memory, busy).total
    elif weights < mac(memory, busy).total - mac(memory, busy).in_use - 2 * GIB:
        assert found.flags, "there is room for the weights, and no flag that helps"


def test_the_first_commands_of_the_readme_run_on_the_smallest_macs():
    for busy in (False, True):
        assert not on(QWEN3["0.6B"], mac(8, busy)).refused
    assert not on(QWEN3["8B"], mac(16, False)).refused


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"[\d.]+", text)]


@pytest.mark.more
def test_the_page_has_the_table():
    """The measured memory of sampling may differ by a few MiB."""
    ours = table()
    page = PAGE.read_text().splitlines()
    first = page.index(ours.splitlines()[0])
    theirs = "\n".join(page[first : first + len(ours.splitlines())])
    assert re.sub(r"[\d.]+", "#", theirs) == re.sub(r"[\d.]+", "#", ours), ours
    assert numbers(theirs) == pytest.approx(numbers(ours), abs=1.1, rel=0.04), ours


if __name__ == "__main__":
    print(table())
