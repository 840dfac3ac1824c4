# SPDX-License-Identifier: Apache-2.0
"""Models so small that engine overhead dominates a step, with a word tokenizer."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
from engine.spec_decode import blocks
from engine.spec_decode.heads import write_head
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.models import deepseek_v32, gemma3_text, llama, qwen3_moe, qwen3_next
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

VOCAB, MAX_LEN, WINDOW, EOS = 256, 256, 32, 0

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 2 * MAX_LEN,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": EOS,
    "bos_token_id": 1,
    "dtype": "float32",
}
_FULL = _COMMON | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
_WINDOWED = _COMMON | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 3,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 8,
    "sliding_window": WINDOW,
    "sliding_window_pattern": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "rope_local_base_freq": 10000.0,
}
# A block of 16 tokens holds a state.
_HYBRID = _COMMON | {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "num_hidden_layers": 4,
    "head_dim": 16,
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.5,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "num_experts": 0,
    "num_experts_per_tok": 0,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 0,
    "shared_expert_intermediate_size": 0,
    "norm_topk_prob": True,
}
_EXPERTS = _COMMON | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
#: Latents with an indexer that selects positions; with few heads, scores would often be equal.
_SPARSE = _COMMON | {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "index_n_heads": 16,
    "index_head_dim": 24,
    "index_topk": 20,
    "first_k_dense_replace": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "attention_bias": False,
}
#: Sizes that hide no constants: an odd vocabulary, a hidden size that is no square, seven query
#: heads per K/V head, and heads that are no power of two.
_ODD = {
    "vocab_size": VOCAB + 1,
    "hidden_size": 70,
    "intermediate_size": 90,
    "num_attention_heads": 7,
    "num_key_value_heads": 1,
}
_ODD_FULL = _FULL | _ODD | {"head_dim": 80}
_ODD_WINDOWED = _WINDOWED | _ODD | {"head_dim": 96, "query_pre_attn_scalar": 96}
_ODD_HYBRID = (
    _HYBRID
    | _ODD
    | {"head_dim": 160, "partial_rotary_factor": 0.25}
    | {"linear_num_value_heads": 3, "linear_num_key_heads": 1}
    | {"linear_key_head_dim": 12, "linear_value_head_dim": 20}
)
MODELS = ("full", "windowed", "hybrid")
#: A hybrid with states larger than any block size that users may request.
LARGE_STATES = "large_states"
_LARGE_STATES = _ODD_HYBRID | {"linear_key_head_dim": 56, "linear_value_head_dim": 72}
#: A model with sparse attention.
SPARSE = "sparse"
#: Models with layers that keep states, in groups of their own.
NUM_STATE_GROUPS = {"hybrid": 3, LARGE_STATES: 3}
#: Minimum tokens per block.
LEAST_BLOCKS = {LARGE_STATES: 48}


def write_models(folder: Path, odd: bool = False) -> None:
    """Writes the models, and for each a `-draft` and a block drafter, `-dflash`.

    A draft model often predicts the model, except for hybrids: models with states cannot draft. A
    block drafter has random weights.

    Args:
        folder: parent folder.
        odd: use sizes that hide no constants, with twice the memory, and add a model
            with large states and one with sparse attention.
    """
    full, windowed, hybrid = _FULL, _WINDOWED, _HYBRID
    if odd:
        full, windowed, hybrid = _ODD_FULL, _ODD_WINDOWED, _ODD_HYBRID
    for name, family, config in (("full", llama, full), ("windowed", gemma3_text, windowed)):
        weights = _weights(family, config)
        _write(folder / name, config, weights)
        _write(folder / f"{name}-draft", config, _disturbed(weights))
        _write_block_drafter(folder / f"{name}-dflash", config)
    for name, config in (("hybrid", hybrid), *(((LARGE_STATES, _LARGE_STATES),) if odd else ())):
        _write(folder / name, config, _weights(qwen3_next, config))
        guessing = full | {"head_dim": config["head_dim"]}  # K and V with one shape: few groups
        _write(folder / f"{name}-draft", guessing, _weights(llama, guessing))
        _write_block_drafter(folder / f"{name}-dflash", config)
    if odd:
        _write(folder / SPARSE, _SPARSE, _weights(deepseek_v32, _SPARSE))
        _write(folder / f"{SPARSE}-draft", _FULL, _weights(llama, _FULL))


def write_experts(folder: Path) -> str:
    """Writes a mixture-of-experts model; returns its folder."""
    _write(folder, _EXPERTS, _weights(qwen3_moe, _EXPERTS))
    return str(folder)


def word(token: int) -> str:
    """Returns a token's text."""
    return f"t{token}"


def _weights(family: ModuleType, config: dict[str, Any]) -> dict[str, mx.array]:
    """Makes random weights such that every logit depends on all earlier tokens."""
    mx.random.seed(3)
    model = family.Model(family.ModelArgs.from_dict(config))

    def enlarged(name: str, array: mx.array) -> mx.array:
        if "norm" in name:  # gemma's norms weigh by 1 + w, llama's by w: about one in both cases
            return mx.random.normal(array.shape) * 0.1 + ("gemma" not in family.__name__)
        return 3 * array if "self_attn" in name or "lm_head" in name else array

    return dict(tree_flatten(tree_map_with_path(enlarged, model.parameters())))


def _disturbed(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    mx.random.seed(4)
    return {
        name: array * (1 + 0.1 * mx.random.normal(array.shape)) for name, array in weights.items()
    }


def _write_block_drafter(folder: Path, target: dict[str, Any]) -> None:
    """Writes a layer with K and V of the target's shape that reads its first and last layers."""
    sizes = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    taps = [0, target["num_hidden_layers"] - 1]
    config = blocks.CONFIG | {name: target[name] for name in sizes} | {"num_hidden_layers": 1}
    config |= {"dflash_config": {"mask_token_id": VOCAB - 1, "target_layer_ids": taps}}
    heads = config["num_attention_heads"], config["num_key_value_heads"]
    hidden, size = config["hidden_size"], config["head_dim"]
    shapes = blocks.shapes(num_layers=1, heads=heads, size=size, num_taps=len(taps), hidden=hidden)
    write_head(folder, shapes, {}, config, "model.safetensors")


def _write(folder: Path, config: dict[str, Any], weights: dict[str, mx.array]) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    words = {word(token): token for token in range(config["vocab_size"])}
    tokenizer = Tokenizer(WordLevel(words, word(EOS)))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"eos_token": word(EOS), "unk_token": word(EOS)}
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names | kind))
