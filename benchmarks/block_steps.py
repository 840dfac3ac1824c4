# SPDX-License-Identifier: Apache-2.0
"""Compares the host time of decode steps with a block drafter of width 5 and without drafts.

The figure is that of step_overhead.py, and the model the same. The drafter has five layers and
random weights, so hardly any draft is accepted: each step verifies four drafts of every request.
Two engines decode in turn. A run's figure is the median of its steps, and the least of all runs
counts, as other programs on the machine only add time.

With `--kernels`, the step is laid out as for a GPU: with the plans of our kernels, and with one
operation for each of them, of MLX's fast functions and of the products with weights, which compute
nothing. MLX gets it after the step, and does not work beside it. So the time without the hand-over
is what a Mac's host has to do. Of the system's allocators, glibc's is the slowest: preload another.

`--lookup` compares steps with and without prompt lookup, both with the drafter. Tokens are sampled,
so that no request copies. The ratio is the median of those of neighboring runs.
"""

import argparse
import ctypes
import json
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import step_overhead as overhead  # first: it loads a BLAS before anything imports MLX

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from vllm import LLM, SamplingParams

from vllm_metal.engine.models import compiled
from vllm_metal.engine.models.compiled import CompiledForward

_M_MXFAST = 1  # glibc's malloc.h
LAYERS, DRAFTS, REQUESTS = 5, 4, (1, 8)
WHOLE, REST, FORWARDS = "whole step", "without hand-over", "graph calls"
PLAIN, DRAFTING, LOOKUP = "without drafts", "with", "with lookup"
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
    """Writes a drafter folder with random weights."""
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


def merge_freed_memory_at_once() -> None:
    """Makes glibc merge small pieces of memory when they are freed.

    Else the first larger allocation after a graph merges the pieces of all its nodes, 0.5 ms in
    some other function. Other systems' allocators have no such delay.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).mallopt(_M_MXFAST, 0)


def lay_out_for_kernels() -> None:
    """Makes engines use our kernels, which compute nothing from now on."""
    from metal_kernels import kernel
    from vllm_metal.engine.kv_cache import choice
    from vllm_metal.engine.kv_cache.kernels import KERNELS

    @cache
    def zeros(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
        made = mx.zeros(shape, dtype)
        mx.eval(made)
        return made

    def compiler(**_: object) -> Callable[..., list[mx.array]]:
        def call(*, inputs: Any, output_shapes: Any, output_dtypes: Any, **_: object) -> Any:
            kinds = zip(output_shapes, output_dtypes, strict=True)
            made = [zeros(tuple(shape), dtype) for shape, dtype in kinds]
            return mx.depends(made, [each for each in inputs if isinstance(each, mx.array)])

        return call

    def unchanged(x: mx.array, *others: Any, **_: object) -> mx.array:
        read = [each for each in others if isinstance(each, mx.array)]
        return mx.depends(x, read or [x])

    def product(layer: nn.Linear, x: mx.array) -> mx.array:
        out = zeros((*x.shape[:-1], layer.weight.shape[0]), x.dtype)
        return mx.depends(out, [x, layer.weight])

    mx.fast.metal_kernel = compiler
    nn.Linear.__call__ = product
    compiled.TransposedWeights.used = lambda _: nullcontext()
    mx.fast.rms_norm = mx.fast.rope = unchanged
    compiled.angles_shared = nullcontext  # on a GPU a rotary embedding is one operation
    kernel.use(compiler)
    choice.kv_backend = lambda *_, **__: KERNELS
    for config in (overhead.CONFIG, CONFIG):
        config["head_dim"] = 64  # the kernels' smallest


def step_ms(
    llm: LLM, meter: overhead.Meter, num_requests: int, run: int, args: argparse.Namespace
) -> dict[str, float]:
    """Returns WHOLE and REST of a decode step in milliseconds, and its number of FORWARDS."""
    core, req_ids = llm.llm_engine, [f"{run}-{n}" for n in range(num_requests)]
    options = {"max_tokens": 900, "ignore_eos": True, "detokenize": False}
    for index, prompt in enumerate(overhead.prompts(num_requests)):
        params = SamplingParams(temperature=float(args.lookup), seed=index, **options)
        core.add_request(req_ids[index], {"prompt_token_ids": prompt}, params)
    for _ in range(2 * overhead.WARM_UP):  # shapes are traced when they come again
        core.step()
    found: dict[str, list[float]] = {WHOLE: [], REST: []}
    calls = 0

    def counted(*args: object) -> list[mx.array]:
        nonlocal calls
        calls += 1
        return call(*args)

    later: list[tuple[object, ...]] = []
    submit = mx.async_eval
    if args.kernels:
        mx.async_eval = lambda *arrays: later.append(arrays)
    call, CompiledForward.__call__ = CompiledForward.__call__, counted
    for _ in range(args.steps):
        meter.seconds.clear()
        started = time.thread_time()
        core.step()
        whole = time.thread_time() - started
        found[WHOLE].append(1e3 * whole)
        found[REST].append(1e3 * (whole - meter.seconds.get(overhead.HAND_OVER, 0.0)))
        if args.kernels:
            mx.eval(later)
            mx.synchronize()
            later.clear()
    CompiledForward.__call__, mx.async_eval = call, submit
    core.abort_request(req_ids)
    while core.has_unfinished_requests():
        core.step()
    llm.reset_prefix_cache()
    return {name: float(np.median(each)) for name, each in found.items()} | {
        FORWARDS: calls / args.steps
    }


def measure(args: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Runs by engine and number of requests."""
    runs: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        target, drafter = Path(name, "target"), Path(name, "drafter")
        for folder, write in ((target, overhead.write_model), (drafter, write_drafter)):
            folder.mkdir()
            write(folder)
        speculation = {"method": "dflash", "model": str(drafter), "num_speculative_tokens": DRAFTS}
        plain = {"dense_check": False}

        def drafting(looks_up: bool) -> LLM:
            options = plain | {"fixed_draft_length": True, "prompt_lookup": looks_up}
            return overhead.engine(
                target, speculative_config=speculation, additional_config=options
            )

        if args.lookup:
            engines = {DRAFTING: drafting(False), LOOKUP: drafting(True)}
        else:
            plain_engine = overhead.engine(target, additional_config=plain)
            engines = {PLAIN: plain_engine, DRAFTING: drafting(False)}
        meter = overhead.Meter()
        for function in ("eval", "async_eval"):
            meter.wrap(mx, function, overhead.HAND_OVER)
        # Alternating, so that a drifting machine affects both alike.
        for run in range(args.repeats):
            for count in REQUESTS:
                for name, llm in engines.items():
                    found = step_ms(llm, meter, count, run, args)
                    runs.setdefault(f"{name}, {count}", []).append(found)
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="decode steps measured")
    parser.add_argument("--repeats", type=int, default=5, help="number of repeats")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--lookup", action="store_true", help="with and without prompt lookup")
    parser.add_argument("--kernels", action="store_true", help="steps as laid out for a GPU")
    args = parser.parse_args()
    merge_freed_memory_at_once()
    if args.kernels:
        lay_out_for_kernels()
    runs = measure(args)
    compared = (DRAFTING, LOOKUP) if args.lookup else (PLAIN, DRAFTING)
    for count in REQUESTS:
        for name in (REST,) if args.kernels else (WHOLE, REST):
            pairs = [[run[name] for run in runs[f"{each}, {count}"]] for each in compared]
            before, after = map(min, pairs)
            ratio = np.median(np.divide(*pairs[::-1])) if args.lookup else after / before
            print(
                f"requests: {count}, {name}: {before:.2f} ms {compared[0]}, {after:.2f} "
                f"{compared[1]}, {after - before:+.2f}, {ratio:.3f}"
            )
        print(f"  graph calls: {runs[f'{DRAFTING}, {count}'][0][FORWARDS]:.2f}")
    args.out.mkdir(parents=True, exist_ok=True)
    parts = ["_lookup"] * args.lookup + ["_kernels"] * args.kernels
    (args.out / f"block_steps{''.join(parts)}.json").write_text(
        json.dumps({"steps": args.steps, "runs": runs}, indent=2)
    )


if __name__ == "__main__":
    main()
