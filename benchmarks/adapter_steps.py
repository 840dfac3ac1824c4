# SPDX-License-Identifier: Apache-2.0
"""Compares the host time of decode steps with and without LoRA adapters.

The model and the metric are those of step_overhead.py. One engine alternates between requests with
eight adapters of all linear layers, one per request, and requests without adapters.
"""

import argparse
import json
import tempfile
from pathlib import Path

import step_overhead as overhead  # first: it loads a BLAS before anything imports MLX

# isort: split
import mlx.core as mx
import numpy as np
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

RANK, ADAPTERS, REQUESTS = 8, 8, (8, 32)
SIZES = {
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (64, 32),
    "self_attn.v_proj": (64, 32),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (64, 128),
    "mlp.up_proj": (64, 128),
    "mlp.down_proj": (128, 64),
}
FEW = ("self_attn.q_proj", "self_attn.v_proj")  # the default targets of PEFT for most models


def write_adapter(folder: Path, seed: int, modules: tuple[str, ...]) -> str:
    """Writes an adapter with random weights; returns its path."""
    rng, tensors = np.random.default_rng(seed), {}
    for layer in range(overhead.CONFIG["num_hidden_layers"]):
        for module in modules:
            num_in, num_out = SIZES[module]
            key = f"base_model.model.model.layers.{layer}.{module}.lora_%s.weight"
            for name, shape in (("A", (RANK, num_in)), ("B", (num_out, RANK))):
                tensors[key % name] = mx.array(rng.normal(size=shape, scale=0.05), mx.float32)
    folder.mkdir()
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": list(modules)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "adapter_model.safetensors"), tensors)
    return str(folder)


def step_ms(
    llm: LLM, meter: overhead.Meter, adapters: list[LoRARequest], num_requests: int, steps: int
) -> float:
    """Returns the host time of a decode step in milliseconds."""
    params = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True, detokenize=False)
    core, req_ids = llm.llm_engine, [f"{num_requests}-{n}" for n in range(num_requests)]
    for index, prompt in enumerate(overhead.prompts(num_requests)):
        adapter = adapters[index % len(adapters)] if adapters else None
        core.add_request(req_ids[index], {"prompt_token_ids": prompt}, params, lora_request=adapter)
    for _ in range(overhead.WARM_UP):
        core.step()
    found = meter.measure(core.step, steps, rest=overhead.SCHEDULE)
    core.abort_request(req_ids)
    while core.has_unfinished_requests():
        core.step()
    llm.reset_prefix_cache()
    return sum(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="decode steps measured")
    parser.add_argument("--repeats", type=int, default=5, help="number of repeats")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    runs: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        overhead.write_model(folder)
        kinds: dict[str, list[LoRARequest]] = {"none": []}
        for kind, modules in (("query and value", FEW), ("all", tuple(SIZES))):
            kinds[kind] = [
                LoRARequest(
                    f"{kind} {n}",
                    len(kinds) * ADAPTERS + n + 1,
                    write_adapter(folder / f"{kind} {n}", n, modules),
                )
                for n in range(ADAPTERS)
            ]
        llm = overhead.engine(
            folder,
            enable_lora=True,
            max_loras=ADAPTERS,
            max_cpu_loras=2 * ADAPTERS,
            max_lora_rank=RANK,
        )
        meter = overhead.Meter()
        for _ in range(args.repeats):  # alternating, so that a drifting machine affects all alike
            for count in REQUESTS:
                for kind, adapters in kinds.items():
                    spent = step_ms(llm, meter, adapters, count, args.steps)
                    runs.setdefault(f"{kind}, {count}", []).append(spent)
    found = {label: float(np.median(of)) for label, of in runs.items()}
    for count in REQUESTS:
        none = found[f"none, {count}"]
        for kind in kinds:
            ms = found[f"{kind}, {count}"]
            print(f"requests: {count}, layers with an update: {kind}: {ms:.2f} ms, {ms / none:.2f}")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "adapter_steps.json").write_text(
        json.dumps({"steps": args.steps, "ms": runs}, indent=2)
    )


if __name__ == "__main__":
    main()
