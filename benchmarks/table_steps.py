# SPDX-License-Identifier: Apache-2.0
"""Host time of a decode step with embedding tables on disk, over one with them in memory.

The figure is that of step_overhead.py. Two engines of one small model decode in turn: Gemma 4,
whose rows are as wide as those of Gemma 3n E2B, or LongCat-Flash-Lite with as many layers and
tables of n-grams as the published model. Tokens are drawn at random, so most rows are read from the
file (in the system's file cache): the worst case.
"""

import argparse
import json
import tempfile
from pathlib import Path

import step_overhead as overhead  # first: it loads a BLAS before anything imports MLX

# isort: split
import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import gemma4_text, longcat_flash_ngram
from vllm import LLM, SamplingParams

from vllm_metal.engine.models.table_rows import TableRows

LAYERS, PER_LAYER, VOCAB = 30, 256, 16384
PLACES, REQUESTS = ("memory", "disk"), (1, 8, 32)
ROWS_READ = "rows read"
GEMMA = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "dtype": "bfloat16",
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 16,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": PER_LAYER,
    "sliding_window": 512,
    "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
LONGCAT = {
    "architectures": ["LongcatFlashNgramForCausalLM"],
    "model_type": "longcat_flash_ngram",
    "dtype": "bfloat16",
    "vocab_size": VOCAB,
    "hidden_size": 3072,
    "ffn_hidden_size": 128,
    "expert_ffn_hidden_size": 32,
    "moe_topk": 2,
    "n_routed_experts": 4,
    "zero_expert_num": 2,
    "num_layers": 14,
    "max_position_embeddings": 2048,
    "num_attention_heads": 2,
    "kv_lora_rank": 64,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "routed_scaling_factor": 1.0,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "ngram_vocab_size_ratio": 1,
    "emb_neighbor_num": 4,
    "emb_split_num": 4,
}
FAMILIES = {"gemma4": (gemma4_text, GEMMA), "longcat": (longcat_flash_ngram, LONGCAT)}


def write_model(folder: Path, family: str) -> None:
    """A model folder with random weights; the table takes 240 MiB, or each of twelve 8 MiB."""
    mx.random.seed(0)
    module, config = FAMILIES[family]
    model = module.Model(module.ModelArgs.from_dict(config))
    model.set_dtype(mx.bfloat16)
    (folder / "config.json").write_text(json.dumps(config))
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})


def step_ms(
    llm: LLM, meter: overhead.Meter, num_requests: int, steps: int, run: int
) -> dict[str, float]:
    """Returns the host milliseconds of a decode step, by phase."""
    core, req_ids = llm.llm_engine, [f"{run}-{n}" for n in range(num_requests)]
    rng = np.random.default_rng(run)
    for index, req_id in enumerate(req_ids):
        prompt = rng.integers(0, VOCAB, overhead.PROMPT_LEN).tolist()
        params = SamplingParams(
            temperature=2.0, seed=100 * run + index, max_tokens=900, ignore_eos=True
        )
        params.detokenize = False
        core.add_request(req_id, {"prompt_token_ids": prompt}, params)
    for _ in range(overhead.WARM_UP):
        core.step()
    found = meter.measure(core.step, steps, rest=overhead.SCHEDULE)
    core.abort_request(req_ids)
    while core.has_unfinished_requests():
        core.step()
    llm.reset_prefix_cache()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", choices=list(FAMILIES), default="gemma4")
    parser.add_argument("--steps", type=int, default=60, help="decode steps measured")
    parser.add_argument("--repeats", type=int, default=5, help="number of repeats")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    runs: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name), args.family)
        meter = overhead.Meter()
        meter.wrap(TableRows, "read", ROWS_READ)
        engines = {
            place: overhead.engine(Path(name), additional_config={"embedding_tables": place})
            for place in PLACES
        }
        for run in range(args.repeats):  # alternating, so that a drifting machine affects all alike
            for count in REQUESTS:
                for place, llm in engines.items():
                    found = step_ms(llm, meter, count, args.steps, run)
                    runs.setdefault(f"{place}, {count}", []).append(sum(found.values()))
                    read = found.get(ROWS_READ, 0.0)
                    runs.setdefault(f"rows, {place}, {count}", []).append(read)
    for count in REQUESTS:
        memory, disk = (np.array(runs[f"{place}, {count}"]) for place in PLACES)
        read = np.median(runs[f"rows, disk, {count}"])
        print(
            f"requests: {count}, memory {np.median(memory):.2f} ms, disk {np.median(disk):.2f} ms, "
            f"{np.median(disk / memory):.3f}; rows read: {read:.3f} ms"
        )
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "table_steps.json").write_text(
        json.dumps({"steps": args.steps, "ms": runs}, indent=2)
    )


if __name__ == "__main__":
    main()
