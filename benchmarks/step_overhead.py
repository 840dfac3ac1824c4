# SPDX-License-Identifier: Apache-2.0
"""Compares the host time of a decode step, without the device, with mlx-lm's loops.

The engine and mlx-lm alternate in one process, with a 28-layer model too small to keep a device
busy. Host time is CPU time of the driving thread (`time.thread_time`): building the graph,
submitting it, bookkeeping. MLX computes on another thread, so device work and waiting are excluded.
On the CPU device, submission includes MLX's per-operation setup and waking that thread whenever it
is idle.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from vllm_metal.device import blas
from vllm_metal.settings import envs

if envs.requested_device() == "cpu":
    blas.load()  # comes before MLX

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from vllm import LLM, SamplingParams

from vllm_metal.engine.kv_cache.layer_state import StepScope
from vllm_metal.engine.kv_cache.scatter import ScatterKVCache
from vllm_metal.engine.models.executor import ModelExecutor
from vllm_metal.engine.models.parts import ModelParts
from vllm_metal.engine.sample import Sampler

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 28,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
PROMPT_LEN = 32
WARM_UP = 8  # steps: prompts, and warm caches


def write_model(folder: Path, seed: int = 0) -> None:
    """Writes a model folder with random weights."""
    from mlx_lm.models import llama

    mx.random.seed(seed)
    model = llama.Model(llama.ModelArgs.from_dict(CONFIG))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    mx.save_safetensors(
        str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"}
    )


class Meter:
    """Sums the driving thread's CPU time in chosen functions, excluding nested ones."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._within: list[float] = []  # nested time of each active call

    def wrap(self, owner: object, name: str, phase: str) -> None:
        """Counts the function's time for `phase` from now on."""
        inner = getattr(owner, name)

        def timed(*args: object, **kwargs: object) -> object:
            started = time.thread_time()
            self._within.append(0.0)
            try:
                return inner(*args, **kwargs)
            finally:
                spent = time.thread_time() - started
                own = spent - self._within.pop()
                self.seconds[phase] = self.seconds.get(phase, 0.0) + own
                if self._within:
                    self._within[-1] += spent

        setattr(owner, name, timed)

    def measure(self, step: Callable[[], object], steps: int, rest: str) -> dict[str, float]:
        """Returns milliseconds per step by phase; `rest`: name for the remaining time."""
        self.seconds.clear()
        started = time.thread_time()
        for _ in range(steps):
            step()
        total = time.thread_time() - started
        self.seconds[rest] = total - sum(self.seconds.values())
        return {phase: 1e3 * seconds / steps for phase, seconds in self.seconds.items()}


#: In step order.
SCHEDULE, ROWS, PLANS, WRITES = "vLLM's scheduler", "tokens and tables", "plans", "K/V written"
GRAPH, SAMPLE, HAND_OVER = "the forward's graph", "logits and sampling", "hand-over to MLX"
PHASES = (SCHEDULE, ROWS, PLANS, WRITES, GRAPH, SAMPLE, HAND_OVER)


def wrap_all(meter: Meter, llm: LLM) -> None:
    """Meters the functions of each phase, in the engine and in MLX."""
    worker = llm.llm_engine.model_executor.driver_worker.worker
    for name in ("execute_model", "sample_tokens"):
        meter.wrap(worker, name, ROWS)
    meter.wrap(StepScope, "plan_of", PLANS)
    meter.wrap(ScatterKVCache, "begin_step", WRITES)
    meter.wrap(ModelExecutor, "forward_hidden", GRAPH)
    meter.wrap(ModelExecutor, "compute_logits", SAMPLE)
    meter.wrap(Sampler, "sample", SAMPLE)
    meter.wrap(mx, "async_eval", HAND_OVER)


def prompts(count: int) -> list[list[int]]:
    """Returns random prompts without shared prefixes."""
    rng = np.random.default_rng(count)
    return [rng.integers(0, CONFIG["vocab_size"], PROMPT_LEN).tolist() for _ in range(count)]


def engine_step(llm: LLM, meter: Meter, num_requests: int, steps: int) -> dict[str, float]:
    """Returns the host milliseconds of an engine's decode step, by phase."""
    params = SamplingParams(temperature=0, max_tokens=steps + 9, ignore_eos=True, detokenize=False)
    core = llm.llm_engine
    for index, prompt in enumerate(prompts(num_requests)):
        core.add_request(f"{num_requests}-{index}", {"prompt_token_ids": prompt}, params)
    for _ in range(WARM_UP):
        core.step()
    found = meter.measure(core.step, steps, rest=SCHEDULE)
    while core.has_unfinished_requests():
        core.step()
    llm.reset_prefix_cache()
    return found


def mlx_lm_model(folder: Path) -> nn.Module:
    """Loads the model with mlx-lm."""
    from mlx_lm.utils import load_model

    return load_model(folder)[0]


def mlx_lm_step(model: nn.Module, meter: Meter, num_requests: int, steps: int) -> dict[str, float]:
    """Like `engine_step`, for mlx-lm's `generate_step`, or `batch_generate`'s loop for several."""
    from mlx_lm.generate import BatchGenerator, generate_step  # once the engine has set the device

    if num_requests == 1:
        prompt = mx.array(prompts(1)[0])
        tokens: Iterator[object] = generate_step(prompt, model, max_tokens=steps + WARM_UP)
        for _ in range(WARM_UP):
            next(tokens)
        return meter.measure(lambda: next(tokens), steps, rest=GRAPH)
    generator = BatchGenerator(model, completion_batch_size=num_requests)
    generator.insert(prompts(num_requests), [steps + 2 * WARM_UP] * num_requests)
    while len(generator.next_generated()) < num_requests:
        pass
    for _ in range(WARM_UP):
        generator.next_generated()
    found = meter.measure(generator.next_generated, steps, rest=GRAPH)
    while generator.next_generated():
        pass
    generator.close()
    return found


#: Numbers of drafts and of requests.
DRAFTS, REQUESTS = (0, 1, 2, 4), (1, 8, 32)
#: Per step: host milliseconds; waits of the driving thread for an array; forward passes built in
#: Python, of the target's and of all models'.
HOST, WAITS, BUILT = "ms", "waits", "built in Python"


def engine(model: Path, **options: Any) -> LLM:
    """Makes the engine to measure."""
    return LLM(
        str(model),
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=32,
        max_num_batched_tokens=1024,
        kv_cache_memory_bytes=64 << 20,
        **options,
    )


def draft_engine(target: Path, draft: Path, num_drafts: int) -> LLM:
    """Makes the engine with a draft model; without one if `num_drafts` is 0."""
    speculation = {"method": "draft_model", "model": str(draft)}
    return engine(
        target,
        speculative_config=speculation | {"num_speculative_tokens": num_drafts}
        if num_drafts
        else None,
        additional_config={"fixed_draft_length": True} if num_drafts else {},
    )


@contextmanager
def counted(found: dict[str, float]) -> Iterator[None]:
    """Counts waits, and forward passes built in Python."""
    kept = mx.eval, ModelParts.forward_hidden

    def waiting(*arrays: object) -> None:
        found[WAITS] += 1
        kept[0](*arrays)

    def building(*arguments: object) -> mx.array:
        found[BUILT] += 1
        return kept[1](*arguments)

    mx.eval, ModelParts.forward_hidden = waiting, building
    try:
        yield
    finally:
        mx.eval, ModelParts.forward_hidden = kept


def draft_step(llm: LLM, num_requests: int, steps: int) -> dict[str, float]:
    """Returns HOST, WAITS and BUILT of a step in which all requests decode."""
    params = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True, detokenize=False)
    core, found = llm.llm_engine, {WAITS: 0.0, BUILT: 0.0}
    req_ids = [f"{num_requests}-{index}" for index in range(num_requests)]
    for req_id, prompt in zip(req_ids, prompts(num_requests), strict=True):
        core.add_request(req_id, {"prompt_token_ids": prompt}, params)
    for _ in range(WARM_UP):
        core.step()
    with counted(found):
        started = time.thread_time()
        for _ in range(steps):
            core.step()
        found[HOST] = 1e3 * (time.thread_time() - started)
    core.abort_request(req_ids)
    while core.has_unfinished_requests():
        core.step()
    core.reset_prefix_cache()
    return {name: value / steps for name, value in found.items()}


def draft_steps(steps: int, repeats: int) -> dict[str, dict[str, float]]:
    """Returns medians by "DRAFTS, REQUESTS", with a draft model as large as the target."""
    runs: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        target, draft = Path(name, "target"), Path(name, "draft")
        for seed, folder in enumerate((target, draft)):
            folder.mkdir()
            write_model(folder, seed)
        for num_drafts in DRAFTS:
            llm = draft_engine(target, draft, num_drafts)
            for _ in range(repeats):
                for count in REQUESTS:
                    runs.setdefault(f"{num_drafts}, {count}", []).append(
                        draft_step(llm, count, steps)
                    )
            llm.llm_engine.engine_core.shutdown()
    return {
        label: {name: float(np.median([run[name] for run in of])) for name in of[0]}
        for label, of in runs.items()
    }


def draft_table(found: dict[str, dict[str, float]]) -> str:
    """Formats drafts as rows, requests as columns; adds the cost of a further pass."""
    lines = [f"| drafts | {' | '.join(f'requests: {count}' for count in REQUESTS)} |"]
    lines.append("| --- |" + " ---: |" * len(REQUESTS))
    for num_drafts in DRAFTS:
        cells = [found[f"{num_drafts}, {count}"] for count in REQUESTS]
        texts = [f"{c[HOST]:.1f} ms, {c[WAITS]:.1f}, {c[BUILT]:.2f}" for c in cells]
        lines.append(f"| {num_drafts} | {' | '.join(texts)} |")
    least, most = DRAFTS[1], DRAFTS[-1]
    shares = []
    for count in REQUESTS:
        plain, few, many = (found[f"{k}, {count}"][HOST] for k in (0, least, most))
        shares.append(f"{(many - few) / (most - least) / plain:.2f}")
    lines.append(f"| a further pass, of a step without drafts | {' | '.join(shares)} |")
    return "\n".join(lines)


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    """Returns medians by phase, and of the total."""
    whole = {"whole step": float(np.median([sum(run.values()) for run in runs]))}
    return {phase: float(np.median([run[phase] for run in runs])) for phase in runs[0]} | whole


def table(of: dict[str, dict[str, float]]) -> str:
    """Formats phases as rows, variants as columns, in Markdown."""
    lines = ["| ms | " + " | ".join(of) + " |", "| --- |" + " ---: |" * len(of)]
    for phase in (*PHASES, "whole step"):
        cells = [f"{found[phase]:.2f}" if phase in found else "" for found in of.values()]
        lines.append(f"| {phase} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="decode steps measured")
    parser.add_argument("--repeats", type=int, default=5, help="number of repeats")
    parser.add_argument("--drafts", action="store_true", help="steps with a draft model instead")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.drafts:
        found_drafts = draft_steps(args.steps, args.repeats)
        print("milliseconds, waits and forwards built in Python, of a step")
        print(draft_table(found_drafts))
        (args.out / "step_overhead_drafts.json").write_text(json.dumps(found_drafts, indent=2))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder)
        llm = engine(folder)
        model = mlx_lm_model(folder)
        meter = Meter()
        wrap_all(meter, llm)
        runs: dict[str, list[dict[str, float]]] = {}
        for _ in range(args.repeats):  # alternating, so that a drifting machine affects all alike
            for count in (1, 32):
                here = mlx_lm_step(model, meter, count, args.steps)
                runs.setdefault(f"mlx-lm, {count}", []).append(here)
                here = engine_step(llm, meter, count, args.steps)
                runs.setdefault(f"vllm-metal, {count}", []).append(here)
    found = {label: medians(of) for label, of in runs.items()}
    print(table(found))
    for count in (1, 32):
        ours, theirs = (
            found[f"{name}, {count}"]["whole step"] for name in ("vllm-metal", "mlx-lm")
        )
        print(f"requests: {count}, host time over mlx-lm's: {ours / theirs:.2f}")
    report = {"layers": CONFIG["num_hidden_layers"], "steps": args.steps, "runs_ms": runs}
    (args.out / "step_overhead.json").write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
