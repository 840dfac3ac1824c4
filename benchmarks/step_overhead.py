# SPDX-License-Identifier: Apache-2.0
"""Host time of a decode step, device excluded, beside mlx-lm's own generation loop.

A 28-layer model too small to keep a device busy is decoded by the engine and by mlx-lm in one
process. Host time is CPU time of the thread that drives the steps (`time.thread_time`): building
the graph, handing it over, bookkeeping. MLX computes on another thread, so device work and waiting
for it are not in the figure.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from vllm_metal.device import blas
from vllm_metal.settings import envs

if envs.requested_device() == "cpu":
    blas.load()  # comes before MLX

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from vllm import LLM, SamplingParams

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


def write_model(folder: Path) -> None:
    """A model folder with random weights."""
    from mlx_lm.models import llama

    mx.random.seed(0)
    model = llama.Model(llama.ModelArgs.from_dict(CONFIG))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    mx.save_safetensors(
        str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"}
    )


class Meter:
    """Adds up the driving thread's CPU time inside chosen methods."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def wrap(self, owner: object, method: str) -> None:
        inner = getattr(owner, method)

        def timed(*args, **kwargs):
            started = time.thread_time()
            try:
                return inner(*args, **kwargs)
            finally:
                spent = time.thread_time() - started
                self.seconds[method] = self.seconds.get(method, 0.0) + spent

        setattr(owner, method, timed)


def engine_step(llm: LLM, meter: Meter, num_requests: int, steps: int) -> dict[str, float]:
    """Milliseconds of host time per decode step: the whole engine's, and the worker's part."""
    rng = np.random.default_rng(num_requests)
    params = SamplingParams(temperature=0, max_tokens=steps + 9, ignore_eos=True, detokenize=False)
    core = llm.llm_engine
    for index in range(num_requests):
        prompt = rng.integers(0, CONFIG["vocab_size"], PROMPT_LEN).tolist()
        core.add_request(f"{num_requests}-{index}", {"prompt_token_ids": prompt}, params)
    for _ in range(8):  # prefill, and caches warm
        core.step()
    meter.seconds.clear()
    started = time.thread_time()
    for _ in range(steps):
        core.step()
    total = time.thread_time() - started
    worker = sum(meter.seconds.values())
    while core.has_unfinished_requests():
        core.step()
    return {"engine_ms": 1e3 * total / steps, "worker_ms": 1e3 * worker / steps}


def mlx_lm_step(folder: Path, steps: int) -> float:
    """Milliseconds of host time per token of mlx-lm's generate_step, one request."""
    from mlx_lm.generate import generate_step
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)
    prompt = mx.arange(PROMPT_LEN) % CONFIG["vocab_size"]
    tokens = generate_step(prompt, model, max_tokens=steps + 8)
    for _ in range(8):
        next(tokens)
    started, done = time.thread_time(), 0
    for _ in tokens:
        done += 1
    return 1e3 * (time.thread_time() - started) / done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="decode steps measured")
    parser.add_argument("--repeats", type=int, default=3, help="medians are of this many")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder)
        llm = LLM(
            name,
            skip_tokenizer_init=True,
            max_model_len=1024,
            max_num_seqs=32,
            max_num_batched_tokens=1024,
            kv_cache_memory_bytes=64 << 20,
        )
        meter = Meter()
        worker = llm.llm_engine.model_executor.driver_worker.worker
        for method in ("execute_model", "sample_tokens"):
            meter.wrap(worker, method)
        runs: dict[str, list[float]] = {}
        for _ in range(args.repeats):  # in turn, so that a drifting machine hits all alike
            runs.setdefault("mlx-lm generate_step, 1 request", []).append(
                mlx_lm_step(folder, args.steps)
            )
            for count in (1, 32):
                plural = "" if count == 1 else "s"
                for part, figure in engine_step(llm, meter, count, args.steps).items():
                    label = f"{part.removesuffix('_ms')}, {count} request{plural}"
                    runs.setdefault(label, []).append(figure)
    medians = {label: float(np.median(figures)) for label, figures in runs.items()}
    base = medians["mlx-lm generate_step, 1 request"]
    print(f"{'host time of a decode step':34} {'ms':>7} {'x mlx-lm':>9}")
    for label, figure in medians.items():
        print(f"{label:34} {figure:7.2f} {figure / base:9.2f}")
    args.out.mkdir(parents=True, exist_ok=True)
    report = {"layers": CONFIG["num_hidden_layers"], "steps": args.steps, "runs_ms": runs}
    (args.out / "step_overhead.json").write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
