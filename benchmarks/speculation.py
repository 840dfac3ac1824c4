# SPDX-License-Identifier: Apache-2.0
"""Measures the speedup of speculation on repetitive and on other text.

Two engines in one process take turns at the same prompts, so each ratio is from one run. Prompts
are cached, so only decoding is compared. Prints a table, writes JSON, draws the plot:
`python benchmarks/speculation.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from vllm_metal.device import blas
from vllm_metal.settings import envs

if envs.requested_device() == "cpu":
    blas.load()  # comes before MLX

from vllm import LLM, SamplingParams

from vllm_metal.engine.models.embedded import embedded_model_path

ROOT = Path(__file__).parents[1]
NUM_DRAFTS = 7
PROSE = (
    "Tell me about the history of lighthouses.",
    "Write a letter to a friend about your new job.",
    "Explain to a child why the sky is blue.",
    "Describe a walk through an old town in winter.",
)


@dataclass(frozen=True)
class Case:
    """Requests that are sent at once."""

    name: str
    prompts: Sequence[str]
    max_tokens: int
    temperature: float


@dataclass(frozen=True)
class Result:
    """Results of one case."""

    case: str
    requests: int
    off_tokens_per_s: float
    on_tokens_per_s: float
    ratio: float  # on / off, median of the repeats
    acceptance: float  # share of verified drafts
    tokens_per_step: float  # per request


def cases(quick: bool) -> list[Case]:
    tokens = 48 if quick else 160
    source = (ROOT / "vllm_metal" / "device" / "mlx_device.py").read_text()
    code = "\n".join(source.splitlines()[39:])
    data = (ROOT / "benchmarks" / "results" / "step_overhead.json").read_text()[:900]
    streams = [f"{PROSE[n % len(PROSE)]} Make it number {n}." for n in range(32)]
    return [
        Case("code edit", [f"Repeat this code, with better comments:\n\n{code}"], tokens, 0.0),
        Case("JSON echo", [f"Repeat this JSON exactly:\n\n{data}"], tokens, 0.0),
        *(Case(f"prose {n}", [text], tokens, 0.8) for n, text in enumerate(PROSE[:2], start=1)),
        Case("32 streams of prose", streams, tokens // 4, 0.8),
    ]


def engine(model: str, method: str | None) -> LLM:
    config = None
    if method is not None:
        config = {"method": method, "num_speculative_tokens": NUM_DRAFTS}
        if method.startswith("ngram"):
            config |= {"prompt_lookup_min": 2, "prompt_lookup_max": 5}
    return LLM(
        model,
        max_model_len=1536,
        max_num_seqs=32,
        kv_cache_memory_bytes=1 << 30,
        disable_log_stats=False,
        speculative_config=config,
        seed=0,
    )


def run(llm: LLM, case: Case, seed: int) -> float:
    """Returns output tokens per second."""
    params = [
        SamplingParams(
            temperature=case.temperature,
            seed=seed + n if case.temperature else None,
            max_tokens=case.max_tokens,
            ignore_eos=True,
        )
        for n in range(len(case.prompts))
    ]
    chats = [[{"role": "user", "content": prompt}] for prompt in case.prompts]
    start = time.perf_counter()
    outputs = llm.chat(chats, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    return sum(len(output.outputs[0].token_ids) for output in outputs) / seconds


def counters(llm: LLM) -> tuple[float, float]:
    """Returns drafts and accepted drafts so far."""
    values = {metric.name: getattr(metric, "value", 0.0) for metric in llm.get_metrics()}
    names = ("num_draft_tokens", "num_accepted_tokens")
    drafted, accepted = (values.get(f"vllm:spec_decode_{name}", 0.0) for name in names)
    return drafted, accepted


def measure(off: LLM, on: LLM, case: Case, repeats: int) -> Result:
    for llm in (off, on):  # put the prompts into the prefix cache
        run(llm, Case(case.name, case.prompts, 1, 0.0), seed=0)
    before = counters(on)
    pairs = []
    for repeat in range(repeats):
        pairs.append((run(off, case, 100 * repeat), run(on, case, 100 * repeat)))
    drafted, accepted = (now - then for now, then in zip(counters(on), before, strict=True))
    num_tokens = repeats * len(case.prompts) * case.max_tokens
    return Result(
        case=case.name,
        requests=len(case.prompts),
        off_tokens_per_s=statistics.median(pair[0] for pair in pairs),
        on_tokens_per_s=statistics.median(pair[1] for pair in pairs),
        ratio=statistics.median(pair[1] / pair[0] for pair in pairs),
        acceptance=accepted / max(drafted, 1.0),
        tokens_per_step=num_tokens / (num_tokens - accepted),
    )


def plot(results: Sequence[Result], target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3))
    axes.barh([result.case for result in results], [result.ratio for result in results])
    axes.axvline(1.0, color="black", linewidth=1)
    axes.invert_yaxis()
    axes.set_xlabel("tokens per second, speculation over none")
    figure.tight_layout()
    figure.savefig(target, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", default="ngram_gpu", help="ngram_gpu (default) or suffix")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="shorter outputs")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    model = str(embedded_model_path())
    off, on = engine(model, None), engine(model, args.method)
    print("| text | requests | off, tok/s | on, tok/s | on / off | accepted | tokens a step |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    results = []
    for case in cases(args.quick):
        result = measure(off, on, case, args.repeats)
        results.append(result)
        print(
            f"| {result.case} | {result.requests} | {result.off_tokens_per_s:.1f} "
            f"| {result.on_tokens_per_s:.1f} | {result.ratio:.2f} | {result.acceptance:.0%} "
            f"| {result.tokens_per_step:.2f} |",
            flush=True,
        )
    args.out.mkdir(parents=True, exist_ok=True)
    report = {"method": args.method, "num_drafts": NUM_DRAFTS, "repeats": args.repeats}
    text = json.dumps({**report, "results": [asdict(result) for result in results]}, indent=2)
    (args.out / "speculation.json").write_text(text + "\n")
    plot(results, args.out / "speculation.png")
    print(f"wrote {args.out / 'speculation.json'} and .png", file=sys.stderr)


if __name__ == "__main__":
    main()
