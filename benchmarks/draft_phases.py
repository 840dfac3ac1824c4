# SPDX-License-Identifier: Apache-2.0
"""Measures the phases of a step with a draft model.

Two extremes of a draft model: the target's first layers alone, small and hardly ever right, and the
target itself, as slow as it gets and always right. One greedy request; each phase is wall time of
the engine's thread, the wait for the device included. On the pool by scatter every pass is awaited
(kv_cache/scatter.py), so phases do not overlap. Prints a table, writes JSON:
`python benchmarks/draft_phases.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from vllm_metal.device import blas
from vllm_metal.settings import envs

if envs.requested_device() == "cpu":
    blas.load()  # comes before MLX

import mlx.core as mx
from vllm import LLM, SamplingParams

from vllm_metal.engine.batch.outputs import StepOutput
from vllm_metal.engine.models.embedded import embedded_model_path
from vllm_metal.engine.models.executor import ModelExecutor
from vllm_metal.engine.sample import Sampler
from vllm_metal.engine.spec_decode.draft_model import DraftModelProposer
from vllm_metal.engine.worker.model_runner import ModelRunner

ROOT = Path(__file__).parents[1]
PROMPT = "Repeat exactly, three times: the quick brown fox jumps over the lazy dog."
#: Maps phases to the calls that they consist of; nested calls count only for themselves.
PHASES = {
    "draft: its passes": [(DraftModelProposer, "propose")],
    "target: layout and graph": [
        (ModelExecutor, "forward_hidden"),
        (ModelExecutor, "compute_logits"),
    ],
    "sampling: graph": [(Sampler, "sample")],
    "device: target and sampling": [
        (mx, "async_eval"),
        (ModelRunner, "wait"),
        (StepOutput, "token_ids"),
    ],
}
REST = "all else: scheduling, detokenizing"


class Stopwatch:
    """Sums the wall time of calls by phase."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._inner = 0.0  # time of nested calls within the current one

    def wrap(self, phase: str, holder: Any, name: str) -> Callable[[], None]:
        """Times calls of `holder.name`; returns a function that undoes it."""
        original = getattr(holder, name)

        def timed(*arguments: Any, **options: Any) -> Any:
            outer, self._inner = self._inner, 0.0
            start = time.perf_counter()
            try:
                return original(*arguments, **options)
            finally:
                spent = time.perf_counter() - start
                self.seconds[phase] += spent - self._inner
                self._inner = outer + spent

        setattr(holder, name, timed)
        return lambda: setattr(holder, name, original)


def first_layers(model: Path, num_layers: int, folder: Path) -> None:
    """Writes a model with another model's first layers, embedding, last norm and head."""
    config = json.loads((model / "config.json").read_text())
    config["num_hidden_layers"] = num_layers
    (folder / "config.json").write_text(json.dumps(config))
    arrays: dict[str, mx.array] = {}
    for path in model.glob("*.safetensors"):
        arrays |= mx.load(str(path))
    layer = "model.layers."
    kept = {
        name: array
        for name, array in arrays.items()
        if not name.startswith(layer) or int(name.removeprefix(layer).split(".")[0]) < num_layers
    }
    mx.save_safetensors(str(folder / "model.safetensors"), kept, {"format": "mlx"})
    for path in model.glob("*token*"):
        (folder / path.name).symlink_to(path)


def run(model: str, speculation: dict[str, Any] | None, num_tokens: int) -> dict[str, float]:
    """Returns one request's seconds by phase and in total, drafts, and accepted drafts."""
    llm = LLM(
        model,
        max_model_len=1024,
        max_num_seqs=1,
        kv_cache_memory_bytes=256 << 20,
        disable_log_stats=False,
        speculative_config=speculation,
        additional_config={"fixed_draft_length": True},
    )
    chat = [{"role": "user", "content": PROMPT}]
    greedy = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    llm.chat(chat, greedy, use_tqdm=False)
    watch = Stopwatch()
    undo = [watch.wrap(phase, *call) for phase, calls in PHASES.items() for call in calls]
    before = counters(llm)
    start = time.perf_counter()
    llm.chat(chat, greedy, use_tqdm=False)
    total = time.perf_counter() - start
    for call in undo:
        call()
    drafted, accepted = (now - then for now, then in zip(counters(llm), before, strict=True))
    llm.llm_engine.engine_core.shutdown()
    phases = watch.seconds | {REST: total - sum(watch.seconds.values())}
    return phases | {"total": total, "drafted": drafted, "accepted": accepted}


def counters(llm: LLM) -> tuple[float, float]:
    """Returns drafts and accepted drafts so far."""
    values = {metric.name: getattr(metric, "value", 0.0) for metric in llm.get_metrics()}
    drafted, accepted = (
        values.get(f"vllm:spec_decode_num_{name}_tokens", 0.0) for name in ("draft", "accepted")
    )
    return drafted, accepted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=6, help="layers of the small draft model")
    parser.add_argument("--drafts", type=int, default=3, help="num_speculative_tokens")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    model = embedded_model_path()
    with tempfile.TemporaryDirectory() as name:
        first_layers(Path(model), args.layers, Path(name))
        speculation = {"method": "draft_model", "num_speculative_tokens": args.drafts}
        found = {
            "no drafts": run(str(model), None, args.tokens),
            f"{args.layers} layers": run(str(model), speculation | {"model": name}, args.tokens),
            "the target": run(str(model), speculation | {"model": str(model)}, args.tokens),
        }
    print(f"| ms per output token, drafts by | {' | '.join(found)} |")
    print("| --- |" + " ---: |" * len(found))
    for phase in (*PHASES, REST, "total"):
        figures = (f"{1e3 * side[phase] / args.tokens:.1f}" for side in found.values())
        print(f"| {phase} | {' | '.join(figures)} |")
    steps = (args.tokens / (args.tokens - side["accepted"]) for side in found.values())
    print(f"| tokens a step | {' | '.join(f'{figure:.2f}' for figure in steps)} |")
    args.out.mkdir(parents=True, exist_ok=True)
    report = {"layers": args.layers, "drafts": args.drafts, "tokens": args.tokens, "seconds": found}
    (args.out / "draft_phases.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
