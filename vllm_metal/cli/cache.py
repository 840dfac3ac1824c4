# SPDX-License-Identifier: Apache-2.0
"""`vllm-metal cache`: lists, removes and verifies the blocks of a prefix cache on disk."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict

from tqdm import tqdm

from vllm_metal.cli import units
from vllm_metal.kv_transfer.disk import maintenance
from vllm_metal.kv_transfer.disk.maintenance import FingerprintSummary, Selection, Summary

#: Facts of a manifest that the table shows.
_SHOWN_FACTS = ("model", "weights", "kv_cache_dtype")
#: Digits of fingerprints and digests that the table shows.
_SHOWN_DIGITS = 12
#: Maximum number of bad files that `verify` lists.
_NAMED_FILES = 20


def ls(args: argparse.Namespace) -> int:
    """Prints the contents of a cache."""
    maintenance.check_is_cache(args.dir)
    found = maintenance.summary(args.dir)
    if args.json:
        print(json.dumps(asdict(found), indent=1))
    else:
        print("\n".join(_table(found)))
    return 0


def rm(args: argparse.Namespace) -> int:
    """Removes blocks after asking for confirmation."""
    maintenance.check_is_cache(args.dir)
    used_before = None if args.older_than is None else time.time() - args.older_than
    selection = Selection(args.fingerprint, args.namespace, used_before)
    selected = maintenance.select(args.dir, selection)
    if not selected and not selection.is_all:
        print("no such blocks")
        return 0
    size = _size(sum(block.room for block in selected))
    if not args.yes and not _confirm(
        f"Remove {units.counted(len(selected), 'block')} ({size}) from {args.dir}?"
    ):
        print("nothing was removed")
        return 1
    number, freed = maintenance.remove(args.dir, selection)
    print(f"removed {units.counted(number, 'block')} ({_size(freed)})")
    return 0


def verify(args: argparse.Namespace) -> int:
    """Reads and checks every block."""
    maintenance.check_is_cache(args.dir)
    size = sum(block.room for block in maintenance.select(args.dir, Selection()))
    with tqdm(total=size, unit="B", unit_scale=True, disable=None, file=sys.stderr) as bar:
        found = maintenance.verify(args.dir, args.remove, bar.update)
    for path in found.bad[:_NAMED_FILES]:
        print(f"bad: {path.relative_to(args.dir)}")
    if len(found.bad) > _NAMED_FILES:
        print(f"bad: {len(found.bad) - _NAMED_FILES} more")
    print(f"{found.num_good} good, {len(found.bad) + found.num_removed} bad", end="")
    print(f", {found.num_removed} of them removed" if args.remove else "")
    if found.bad and not args.remove:
        print("Bad blocks are never served; --remove deletes them now.")
    return 1 if found.bad else 0


ACTIONS = {"ls": ls, "rm": rm, "verify": verify}


def _confirm(question: str) -> bool:
    if not sys.stdin.isatty():
        raise ValueError(
            "there is no terminal to ask for confirmation; add --yes to remove without asking"
        )
    return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")


def _table(found: Summary) -> Iterator[str]:
    header = ["fingerprint", *_SHOWN_FACTS, "namespace", "blocks", "size", "last used"]
    rows = [header]
    for digits, summary in found.fingerprints.items():
        rows += _rows(digits, summary)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    yield f"{_size(found.bytes)} in all files"


def _rows(digits: str, summary: FingerprintSummary) -> Iterator[list[str]]:
    start = [
        digits[:_SHOWN_DIGITS],
        *(_cell(summary.facts.get(name, "-")) for name in _SHOWN_FACTS),
    ]
    for name, blocks in summary.namespaces.items():
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(blocks.last_used))
        yield [*start, name, str(blocks.blocks), _size(blocks.bytes), used]
    if not summary.namespaces:
        yield [*start, "-", "0", _size(0), "-"]


def _cell(fact: object) -> str:
    if isinstance(fact, Mapping):  # several networks; reverse order puts "target" before "draft"
        return " ".join(map(_cell, dict(sorted(fact.items(), reverse=True)).values()))
    text = str(fact)
    return text[:_SHOWN_DIGITS] if re.fullmatch(r"[0-9a-f]{32,}", text) else text


def _size(number: int) -> str:
    return f"{number / 1e9:.2f} GB" if number >= 1e9 else f"{number / 1e6:.2f} MB"
