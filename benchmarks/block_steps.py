# SPDX-License-Identifier: Apache-2.0
"""Host time of a decode step with a block drafter of width 5, over one without drafts.

The figure is that of step_overhead.py, and the model the same. The drafter has five layers and
random weights, so hardly any draft is accepted: each step verifies four drafts of every request.
Two engines decode in turn. A run's figure is the median of its steps, and the least of all runs
counts, as other programs on the machine only add time.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import step_overhead as overhead  # first: it loads a BLAS before anything imports MLX

# isort: split
import mlx.core as mx
import numpy as np
from vllm import LLM, SamplingParams

from vllm_metal.engine.models.compiled import CompiledForward

LAYERS, DRAFTS, REQUESTS = 5, 4, (1, 8)
WHOLE, REST, FORWARDS = "whole step", "without hand-over", "graph calls"
CONFIG = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    **{
        key: overhead.CONFIG[key]
        for key in (
            *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
            *("head_dim", "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_theta"),
            "torch_dtype",
        )
    },
    "num_hidden_layers": LAYERS,
    "hidden_act": "silu",
    "block_size": DRAFTS + 1,
    "tie_word_embeddings": False,
    "dflash_config": {"mask_token_id": 255, "target_layer_ids": [1, 8, 14, 20, 26]},
}


def write_drafter(folder: Path) -> None:
    """A drafter's folder with random weights."""
    hidden, inner, size = (CONFIG[key] for key in ("hidden_size", "intermediate_size", "head_dim"))
    heads, kv_heads = CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"]
    norms = ("input_layernorm", "post_attention_layernorm")
    shapes = {"fc": (hidden, LAYERS * hidden), "hidden_norm": (hidden,), "norm": (hidden,)}
    for layer in (f"layers.{index}" for index in range(LAYERS)):
        shapes |= {f"{layer}.self_attn.{part}_proj": (kv_heads * size, hidden) for part in "kv"}
        shapes |= {f"{layer}.self_attn.{part}_norm": (size,) for part in "qk"}
        shapes |= {f"{layer}.{norm}": (hidden,) for norm in norms}
        shapes |= {f"{layer}.mlp.{part}_proj": (inner, hidden) for part in ("gate", "up")}
        shapes[f"{layer}.self_attn.q_proj"] = (heads * size, hidden)
        shapes[f"{layer}.self_attn.o_proj"] = (hidden, heads * size)
        shapes[f"{layer}.mlp.down_proj"] = (hidden, inner)
    mx.random.seed(1)
    arrays = {f"{name}.weight": 0.1 * mx.random.normal(shape) for name, shape in shapes.items()}
    (folder / "config.json").write_text(json.dumps(CONFIG))
    mx.save_safetensors(str(folder / "model.safetensors"), arrays, {"format": "pt"})


def step_ms(
    llm: LLM, meter: overhead.Meter, num_requests: int, steps: int, run: int
) -> dict[str, float]:
    """WHOLE and REST of a decode step in milliseconds, and its number of FORWARDS."""
    core, req_ids = llm.llm_engine, [f"{run}-{n}" for n in range(num_requests)]
    params = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True, detokenize=False)
    for req_id, prompt in zip(req_ids, overhead.prompts(num_requests), strict=True):
        core.add_request(req_id, {"prompt_token_ids": prompt}, params)
    for _ in range(2 * overhead.WARM_UP):  # shapes are traced when they come again
        core.step()
    found: dict[str, list[float]] = {WHOLE: [], REST: []}
    calls = 0

    def counted(*args: object) -> list[mx.array]:
        nonlocal calls
        calls += 1
        return call(*args)

    call, CompiledForward.__call__ = CompiledForward.__call__, counted
    for _ in range(steps):
        meter.seconds.clear()
        started = time.thread_time()
        core.step()
        whole = time.thread_time() - started
        found[WHOLE].append(1e3 * whole)
        found[REST].append(1e3 * (whole - meter.seconds.get(overhead.HAND_OVER, 0.0)))
    CompiledForward.__call__ = call
    core.abort_request(req_ids)
    while core.has_unfinished_requests():
        core.step()
    llm.reset_prefix_cache()
    return {name: float(np.median(each)) for name, each in found.items()} | {
        FORWARDS: calls / steps
    }


def measure(steps: int, repeats: int) -> dict[str, list[dict[str, float]]]:
    """Runs by "DRAFTS, REQUESTS"."""
    runs: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        target, drafter = Path(name, "target"), Path(name, "drafter")
        for folder, write in ((target, overhead.write_model), (drafter, write_drafter)):
            folder.mkdir()
            write(folder)
        speculation = {"method": "dflash", "model": str(drafter), "num_speculative_tokens": DRAFTS}
        options = {"fixed_draft_length": True, "prompt_lookup": False}
        engines = {
            0: overhead.engine(target),
            DRAFTS: overhead.engine(
                target, speculative_config=speculation, additional_config=options
            ),
        }
        meter = overhead.Meter()
        for function in ("eval", "async_eval"):
            meter.wrap(mx, function, overhead.HAND_OVER)
        for run in range(repeats):  # in turn, so that a drifting machine hits both alike
            for count in REQUESTS:
                for drafts, llm in engines.items():
                    found = step_ms(llm, meter, count, steps, run)
                    runs.setdefault(f"{drafts}, {count}", []).append(found)
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="decode steps measured")
    parser.add_argument("--repeats", type=int, default=5, help="the least of this many counts")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    runs = measure(args.steps, args.repeats)
    for count in REQUESTS:
        for name in (WHOLE, REST):
            plain, drafting = (
                min(run[name] for run in runs[f"{drafts}, {count}"]) for drafts in (0, DRAFTS)
            )
            print(
                f"requests: {count}, {name}: {plain:.2f} ms without drafts, {drafting:.2f} with, "
                f"+{drafting - plain:.2f}, {drafting / plain:.2f}"
            )
        print(f"  graph calls: {runs[f'{DRAFTS}, {count}'][0][FORWARDS]:.2f}")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "block_steps.json").write_text(
        json.dumps({"steps": args.steps, "runs": runs}, indent=2)
    )


if __name__ == "__main__":
    main()
