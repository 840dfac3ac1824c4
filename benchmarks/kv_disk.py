# SPDX-License-Identifier: Apache-2.0
"""Measures the benefit and the costs of the disk prefix cache.

Measures transfer rates beside plain files; prefill with and without the disk; a stream while a long
context is loaded; a stream while the disk accepts nothing; and the time to first token by context
length, cold, from memory and from disk. Prints tables, writes JSON, draws a plot:
`python benchmarks/kv_disk.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import _engine  # first, because it configures how vLLM and MLX start
from _engine import Answer, Engine
from _kv_files import LARGE, SMOLLM2, FileBench, Rates
from _kv_streams import beside_loads, beside_stuck_disk
from _shared import Prompts, note, table

from vllm_metal.engine.models.embedded import embedded_model_path

ROOT = Path(__file__).resolve().parents[1]
WAYS = ("cold", "memory", "disk")
_CPU = ("CPU time", "written, B")
PARTS = ("files", "prefill", "streams", "ttft", "toy")


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurement; lengths in tokens."""

    file_bytes: int = 200 << 20
    file_repeats: int = 5
    prefill_len: int = 4000
    prefill_pairs: int = 3
    contexts: tuple[int, ...] = (256, 512, 1024, 2048, 4000)
    toy_contexts: tuple[int, ...] = (1000, 2000, 4000, 8000, 16000, 32000)
    found_repeats: int = 3
    rounds: int = 5
    alone_tokens: int = 40
    stuck_len: int = 1600  # more than staging memory holds
    stuck_prompts: int = 2
    stuck_tokens: int = 120


QUICK = Sizes(
    file_bytes=64 << 20,
    file_repeats=3,
    prefill_len=768,
    prefill_pairs=2,
    contexts=(256, 768),
    toy_contexts=(1000, 4000),
    rounds=3,
    alone_tokens=20,
    stuck_len=256,
    stuck_prompts=1,
    stuck_tokens=40,
)


@dataclass(frozen=True)
class Prefill:
    """A prompt computed with and without the disk; ratios are with over without."""

    tokens: int
    off_tokens_per_s: float
    on_tokens_per_s: float
    seconds_ratio: float  # until the first token
    written_ratio: float  # until all pages are on disk
    cpu_ratio: float  # CPU time of all threads until all pages are on disk
    written_bytes: float


def prefill(off: Engine, on: Engine, prompts: Sequence[list[int]]) -> list[Prefill]:
    """Runs each prompt on both engines; which is first alternates."""
    results = []
    for number, prompt in enumerate(prompts):
        took: dict[str, tuple[float, float, float]] = {}
        before = on.counter("prefix_cache_disk_written_bytes")
        for name in ("off", "on") if number % 2 else ("on", "off"):
            engine = {"off": off, "on": on}[name]
            started, cpu = time.perf_counter(), time.process_time()
            answer = engine.first_token(prompt)
            engine.flush()
            took[name] = (
                answer.seconds,
                time.perf_counter() - started,
                time.process_time() - cpu,
            )
            note(f"{len(prompt)} tokens, disk {name}: {answer.seconds:.1f} s")
        ratios = [b / a for a, b in zip(took["off"], took["on"], strict=True)]
        rates = [len(prompt) / took[name][0] for name in ("off", "on")]
        written = on.counter("prefix_cache_disk_written_bytes") - before
        results.append(
            Prefill(len(prompt), rates[0], rates[1], ratios[0], ratios[1], ratios[2], written)
        )
    return results


@dataclass(frozen=True)
class FirstToken:
    """Median milliseconds to the first token of a context."""

    context: int
    cold: float
    memory: float
    disk: float
    disk_mb_per_s: float  # bytes of pages over the total time from disk


def first_tokens(
    engine: Engine, prompts: Sequence[list[int]], repeats: int, cold: dict[int, float]
) -> list[FirstToken]:
    """Runs each prompt cold, then alternately from memory and from disk.

    Args:
        engine: an engine with a disk.
        prompts: one per length.
        repeats: repeats of cached runs; a cold prompt is computed once.
        cold: seconds by length of prompts that were computed earlier and are on disk.
    """
    results = []
    for prompt in prompts:
        if (cold_s := cold.get(len(prompt))) is None:
            engine.flush()
            cold_s = engine.first_token(prompt).seconds
            engine.flush()
        memory: list[Answer] = []
        disk: list[Answer] = []
        loaded = engine.counter("kv_offload_load_bytes")
        for _ in range(repeats):
            engine.forget()
            disk.append(engine.first_token(prompt))
            memory.append(engine.first_token(prompt))
        loaded = engine.counter("kv_offload_load_bytes") - loaded
        enough = len(prompt) - 2 * 16
        assert all(answer.disk_tokens >= enough for answer in disk), disk
        assert all(answer.cached_tokens >= enough > answer.disk_tokens for answer in memory), memory
        of = {
            way: statistics.median(answer.seconds for answer in answers)
            for way, answers in (("memory", memory), ("disk", disk))
        }
        results.append(
            FirstToken(
                len(prompt),
                1e3 * cold_s,
                1e3 * of["memory"],
                1e3 * of["disk"],
                loaded / repeats / of["disk"] / 1e6,
            )
        )
        note(f"TTFT {results[-1]}")
    return results


def measure(sizes: Sizes, parts: Sequence[str], folder: Path) -> dict[str, object]:
    """Returns the parts' results as in JSON."""
    found: dict[str, object] = {}
    if "files" in parts:
        found["files"] = [asdict(rates) for rates in files(sizes, folder)]
    if {"prefill", "streams", "ttft"} & set(parts):
        found |= of_model(sizes, parts, folder)
    if "toy" in parts:
        found["toy"] = of_toy(sizes, folder)
    return found


def files(sizes: Sizes, folder: Path) -> list[Rates]:
    """Returns transfer rates for pages of two sizes."""
    rates = []
    for page in (SMOLLM2, LARGE):
        note(f"files of {page.nbytes} bytes")
        with tempfile.TemporaryDirectory(dir=folder) as name:
            bench = FileBench(Path(name), page, sizes.file_bytes, sizes.file_repeats)
            rates += bench.run()
    return rates


def of_model(sizes: Sizes, parts: Sequence[str], folder: Path) -> dict[str, object]:
    """Runs the parts that use the embedded model."""
    model, prompts = str(embedded_model_path()), Prompts(40000)
    context = sizes.prefill_len + 600
    pool = 48000 * (sizes.prefill_pairs + 1) * context
    found: dict[str, object] = {}
    note("starting")
    # First, because a new engine removes earlier engines' counters from the process's /metrics.
    off = Engine(model, context, pool, None) if "prefill" in parts else None
    on = Engine(model, context, pool, folder / "model")
    texts = [prompts.new(sizes.prefill_len) for _ in range(sizes.prefill_pairs)]
    on.first_token(prompts.new(256))
    cold: dict[int, float] = {}
    if off is not None:
        off.first_token(prompts.new(256))
        results = prefill(off, on, texts)
        found["prefill"] = [asdict(result) for result in results]
        per_token = statistics.median(result.on_tokens_per_s for result in results)
        cold[sizes.prefill_len] = sizes.prefill_len / per_token
    else:
        for text in texts:
            cold[sizes.prefill_len] = on.first_token(text).seconds
            on.flush()
    if "streams" in parts:
        note("a stream beside loads")
        found["loads"] = beside_loads(on, texts, sizes.rounds, sizes.alone_tokens)
        note(f"{found['loads']}")
        fillers = [prompts.new(sizes.stuck_len) for _ in range(sizes.stuck_prompts)]
        found["stuck"] = beside_stuck_disk(on, fillers, sizes.stuck_tokens)
        note(f"{found['stuck']}")
    if "ttft" in parts:
        by_length = [
            texts[0] if length == sizes.prefill_len else prompts.new(length)
            for length in sizes.contexts
        ]
        results_of = first_tokens(on, by_length, sizes.found_repeats, cold)
        found["ttft"] = [asdict(result) for result in results_of]
    return found


def of_toy(sizes: Sizes, folder: Path) -> list[dict[str, object]]:
    """Measures the time to first token of long contexts with a model that computes little."""
    prompts = Prompts(_engine.TOY_VOCABULARY)
    longest = max(sizes.toy_contexts)
    note("starting the toy model")
    toy = Engine(
        _engine.write_toy(folder / "weights"), longest + 64, 3000 * longest, folder / "toy"
    )
    toy.first_token(prompts.new(256))
    lengths = [prompts.new(length) for length in sizes.toy_contexts]
    return [asdict(result) for result in first_tokens(toy, lengths, sizes.found_repeats, {})]


def report(found: dict[str, object]) -> None:
    """Prints tables of the results."""
    for key, headers in (
        ("files", ("files, GB/s", "page, bytes", "store", "plain", "one plain file", "ratio")),
        (
            "prefill",
            ("prefill, tokens", "off, tok/s", "on, tok/s", "time, ratio", "until written", *_CPU),
        ),
        ("ttft", ("TTFT, context", *(f"{way}, ms" for way in WAYS), "disk, MB/s")),
        ("toy", ("TTFT of the toy, context", *(f"{way}, ms" for way in WAYS), "disk, MB/s")),
    ):
        if key in found:
            table(headers, [list(row.values()) for row in found[key]])  # type: ignore[attr-defined]
    for key, title in (("loads", "beside loads"), ("stuck", "beside a stuck disk")):
        if key in found:
            figures: dict = found[key]  # type: ignore[assignment]
            rows = [[name, *gaps.values()] for name, gaps in figures["ms"].items()]
            table((f"stream {title}, ms between tokens", "number", "p50", "p99", "longest"), rows)
            print(", ".join(f"{k} {v:.3g}" for k, v in figures.items() if k != "ms"), "\n")


def plot(found: dict[str, object], target: Path) -> None:
    """Plots time to first token by context length, for both models."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    titles = {"ttft": "SmolLM2-135M, float32", "toy": "toy model, 2 layers"}
    keys = [key for key in titles if key in found]
    canvas, panels = pyplot.subplots(
        1, len(keys), figsize=(4 * len(keys), 3.2), layout="constrained", squeeze=False
    )
    for panel, key in zip(panels[0], keys, strict=True):
        rows: list[dict] = found[key]  # type: ignore[assignment]
        contexts = [row["context"] for row in rows]
        for way, color in zip(WAYS, ("0.5", "C2", "C0"), strict=True):
            panel.loglog(contexts, [row[way] / 1e3 for row in rows], "o-", color=color, label=way)
        panel.set_xscale("log", base=2)
        panel.set_xticks(contexts, [f"{context:,}" for context in contexts], fontsize=8)
        panel.set_title(titles[key], fontsize=10)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(frameon=False, fontsize=8)
    panels[0][0].set_ylabel("time to first token, s")
    canvas.supxlabel("context, tokens", fontsize=10)
    canvas.savefig(target, dpi=150)
    pyplot.close(canvas)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="short contexts, few repeats")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    parser.add_argument("--pairs", type=int, help="prompts that are computed both ways")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument(
        "--disk", type=Path, help="folder on the disk to measure; default: temporary files'"
    )
    args = parser.parse_args()
    sizes = QUICK if args.quick else Sizes()
    if args.pairs is not None:
        sizes = replace(sizes, prefill_pairs=args.pairs)
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=args.disk, prefix="kv-disk-") as name:
        found = measure(sizes, args.parts, Path(name))
    print()
    report(found)
    args.out.mkdir(parents=True, exist_ok=True)
    target = args.out / "kv_disk.json"
    # Parts can be measured separately, each in a quiet hour.
    kept = json.loads(target.read_text()) if target.exists() else {}
    loads = (before, os.getloadavg()[0])
    kept["machine"] = f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs"
    kept["sizes"] = kept.get("sizes", {}) | dict.fromkeys(found, asdict(sizes))
    kept["load"] = kept.get("load", {}) | dict.fromkeys(found, loads)  # before and after
    found = kept | found
    target.write_text(json.dumps(found, indent=2) + "\n")
    if {"ttft", "toy"} & found.keys():
        plot(found, target.with_suffix(".png"))
    note(f"wrote {target}")


if __name__ == "__main__":
    main()
