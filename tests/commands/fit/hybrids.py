# SPDX-License-Identifier: Apache-2.0
"""What drafts leave of the pool of hybrids in 4 bits, by Mac: prints a table, as Markdown.

`python tests/commands/fit/hybrids.py` reads no weights and makes the sum that the engine makes, of
steps of 256 rows and without a bound on the pool that nobody asked for.
"""

from dataclasses import replace

import vllm_metal.platform.metal_platform  # noqa: F401  # first: it loads a BLAS before MLX

# isort: split
import torch

from metal_kernels.layout import BLOCK_SIZES
from vllm_metal.commands.fit import engine
from vllm_metal.commands.fit.estimate import Model, estimate
from vllm_metal.commands.fit.known import KnownModel
from vllm_metal.commands.fit.machine import Machine

GIB = 2**30
MACS = (32, 64, 128)  # GB
DRAFTS = (0, 5)
REQUESTS = (4, 32)  # at once, --max-num-seqs
ROWS = 256  # --max-num-batched-tokens; 2,048 take no longer
_COMMON = {
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "quantization": {"group_size": 64, "bits": 4},
}
_DELTA = _COMMON | {
    "head_dim": 256,
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000000,
}
_QWEN_27B = _DELTA | {
    "model_type": "qwen3_5_text",
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 64,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "linear_num_value_heads": 48,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
}
_QWEN_80B = _DELTA | {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "linear_num_value_heads": 32,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
_GRANITE = _COMMON | {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "vocab_size": 100352,
    "hidden_size": 4096,
    "intermediate_size": 768,
    "shared_intermediate_size": 1536,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 72,
    "num_experts_per_tok": 10,
    "max_position_embeddings": 131072,
    "layer_types": ["attention" if index % 10 == 5 else "mamba" for index in range(40)],
    "position_embedding_type": "nope",
    "rope_theta": 10000,
    "attention_bias": False,
    "embedding_multiplier": 12,
    "attention_multiplier": 0.0078125,
    "logits_scaling": 16,
    "residual_multiplier": 0.22,
    "mamba_n_heads": 128,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
#: config.json of each, as the hub has it, for the keys that matter here.
MODELS = (
    KnownModel(
        "Qwen3.5-27B",
        {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "model_type": "qwen3_5",
            "text_config": _QWEN_27B,
            "torch_dtype": "bfloat16",
            "quantization": _COMMON["quantization"],
        },
    ),
    KnownModel("Qwen3-Next-80B-A3B", _QWEN_80B),
    KnownModel("Granite-4.0-H-Small", _GRANITE),
)


def estimated(known):
    """With drafts, and as many requests as there may be."""
    with known.folder() as path:
        model = Model.read(path, known.config["model_type"], torch.bfloat16)
        config = engine.config(
            model_type=known.config["model_type"],
            dtype=torch.bfloat16,
            cache_dtype="auto",
            block_size=BLOCK_SIZES[0],
            max_model_len=engine.longest_text(known.config),
            fitted=True,
            max_num_batched_tokens=ROWS,
            max_num_seqs=max(REQUESTS),
            num_drafts=max(DRAFTS),
        )
        return estimate(model, config, Machine.mac(MACS[-1] * GIB))


def on(memory, found, requests, drafts):
    """The same on a Mac, for other settings."""
    machine = Machine.mac(memory * GIB)
    measured = replace(found.measured, total=machine.total, cache=machine.cache)
    settings = replace(found.settings, max_num_seqs=requests, num_drafts=drafts, most=None)
    return replace(found, measured=measured, settings=settings)


def cell(found):
    """GiB of the pool, and of the states of a step."""
    lines = dict(found.budget.lines)
    states = -sum(nbytes for label, nbytes in lines.items() if label.startswith("- states"))
    return f"{max(found.pool, 0) / GIB:.2f} / {states / GIB:.2f}"


def rows(known):
    """Lines of the table."""
    found = estimated(known)
    name = f"{known.name} ({found.state_bytes / 2**20:.0f} MiB a state)"
    for requests in REQUESTS:
        for drafts in DRAFTS:
            cells = " | ".join(cell(on(memory, found, requests, drafts)) for memory in MACS)
            yield f"| {name}, {requests} requests, {drafts} drafts | {cells} |"


if __name__ == "__main__":
    print("| pool / states of a step, GiB | " + " | ".join(f"{each} GB" for each in MACS) + " |")
    print("| --- |" + " ---: |" * len(MACS))
    for each in MODELS:
        print("\n".join(rows(each)), flush=True)
