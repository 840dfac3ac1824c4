# SPDX-License-Identifier: Apache-2.0
"""Memory of loading beyond the weights, measured in separate processes."""

import json
import os
import subprocess
import sys

import gguf
import numpy as np
import pytest
import torch
from engine.models import further, recurrent
from mlx.utils import tree_flatten
from mlx_lm.models import gemma4_text, longcat_flash_ngram
from safetensors.torch import save_file
from transformers.convert_slow_tokenizer import bytes_to_unicode

pytestmark = pytest.mark.slow

HIDDEN, INNER, EXPERTS, VOCAB = 1024, 512, 64, 4096
ALLOWED = 100 * 10**6
MEASURE = """
import sys
import vllm_metal.platform.metal_platform
import mlx.core as mx
from pathlib import Path
from mlx.utils import tree_flatten
from vllm_metal.engine.models.loader import lazy_model
from vllm_metal.engine.weights.folders import folder_of

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) * 1024

before = anonymous()
model = lazy_model(Path(folder_of(sys.argv[1])), mx.bfloat16)
most = 0
for name, module in model.named_modules():
    mx.eval(list(v for v in module.values() if isinstance(v, mx.array)))
    most = max(most, anonymous() - before)
arrays = [array for _, array in tree_flatten(model.parameters())]
print(sum(a.nbytes for a in arrays), max(a.nbytes for a in arrays), mx.get_peak_memory(), most)
"""


def linear(tensors, name, shape, form):
    num_out, num_in = shape
    generator = torch.Generator().manual_seed(len(tensors))
    if form == "fp8":
        codes = torch.randint(0, 0x7E, shape, dtype=torch.uint8, generator=generator)
        scale = torch.rand(-(-num_out // 128), -(-num_in // 128), generator=generator)
        parts = {"weight": codes.view(torch.float8_e4m3fn), "weight_scale_inv": scale * 1e-3}
    else:
        codes = torch.randint(0, 256, (num_out, num_in // 2), dtype=torch.uint8)
        scale = torch.randint(0x20, 0x60, (num_out, num_in // 16), dtype=torch.uint8)
        parts = {
            "weight": codes,
            "weight_scale": scale.view(torch.float8_e4m3fn),
            "weight_scale_2": torch.tensor(1e-3),
        }
    tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items()}


def model(folder, form, layers):
    tensors = {
        "model.embed_tokens.weight": torch.ones(VOCAB, HIDDEN, dtype=torch.bfloat16),
        "lm_head.weight": torch.ones(VOCAB, HIDDEN, dtype=torch.bfloat16),
        "model.norm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16),
    }
    for index in range(layers):
        layer = f"model.layers.{index}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{norm}.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
        for norm in ("q_norm", "k_norm"):
            tensors[f"{layer}.self_attn.{norm}.weight"] = torch.ones(128, dtype=torch.bfloat16)
        for part in "qkvo":
            linear(tensors, f"{layer}.self_attn.{part}_proj", (HIDDEN, HIDDEN), form)
        tensors[f"{layer}.mlp.gate.weight"] = torch.ones(EXPERTS, HIDDEN, dtype=torch.bfloat16)
        for expert in range(EXPERTS):
            name = f"{layer}.mlp.experts.{expert}"
            for part in ("gate_proj", "up_proj"):
                linear(tensors, f"{name}.{part}", (INNER, HIDDEN), form)
            linear(tensors, f"{name}.down_proj", (HIDDEN, INNER), form)
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN,
        "moe_intermediate_size": INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 4,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}
        if form == "fp8"
        else {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


def gguf_model(path, layers):
    """Writes the types of a Q4_K_M file: half of the projections are Q6_K."""
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(layers)
    writer.add_head_count(8)
    writer.add_key_length(128)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(4)
    writer.add_expert_feed_forward_length(INNER)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    letters = sorted(bytes_to_unicode().values())
    writer.add_token_list([*letters, "ab", *map(str, range(257, VOCAB))])
    writer.add_token_merges(["a b"])
    generator = np.random.default_rng(0)

    def add(name, shape, kind):
        block, size = gguf.GGML_QUANT_SIZES[kind]
        data = generator.integers(0, 256, (*shape[:-1], shape[-1] // block * size), np.uint8)
        writer.add_tensor(f"{name}.weight", data & 0x3F, raw_dtype=kind)

    def ones(name, size):
        writer.add_tensor(f"{name}.weight", np.ones(size, np.float32))

    small, large = gguf.GGMLQuantizationType.Q4_K, gguf.GGMLQuantizationType.Q6_K
    add("token_embd", (VOCAB, HIDDEN), small)
    add("output", (VOCAB, HIDDEN), large)
    ones("output_norm", HIDDEN)
    for layer in (f"blk.{index}" for index in range(layers)):
        for norm, size in (("attn", HIDDEN), ("ffn", HIDDEN), ("attn_q", 128), ("attn_k", 128)):
            ones(f"{layer}.{norm}_norm", size)
        for part in ("q", "k", "output"):
            add(f"{layer}.attn_{part}", (HIDDEN, HIDDEN), small)
        add(f"{layer}.attn_v", (HIDDEN, HIDDEN), large)
        writer.add_tensor(f"{layer}.ffn_gate_inp.weight", np.ones((EXPERTS, HIDDEN), np.float32))
        for part in ("gate", "up"):
            add(f"{layer}.ffn_{part}_exps", (EXPERTS, INNER, HIDDEN), small)
        add(f"{layer}.ffn_down_exps", (EXPERTS, HIDDEN, INNER), large)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def made(folder, form):
    if form == "gguf":
        gguf_model(folder / "model.gguf", layers=3)
        return folder / "model.gguf"
    model(folder, form, layers=3)
    return folder


@pytest.mark.parametrize("form", ["fp8", "nvfp4", "gguf"])
def test_peak_of_loading(tmp_path, form, monkeypatch):
    monkeypatch.setenv("VLLM_METAL_CACHE", str(tmp_path / "cache"))
    path = str(made(tmp_path, form))
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, path], capture_output=True, text=True, check=True
    )
    served, largest, *peaks = map(int, run.stdout.split()[-4:])
    assert served > 150 * 10**6
    for peak in peaks:
        assert peak <= served + 2 * largest + ALLOWED


TABLE = {"vocab": 262_144, "layers": 4, "per_layer": 1024}  # 2 GiB in bfloat16
PAIRS = 512  # tokens whose pairs have a row each, of 1,024 values: 512 MiB
SERVE = """
import sys
from vllm import LLM, SamplingParams

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) * 1024

folder, vocab, order = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
llm = LLM(
    folder, skip_tokenizer_init=True, dtype="float32", max_model_len=512, seed=0,
    max_num_batched_tokens=256, max_num_seqs=1, kv_cache_memory_bytes=64 << 20,
    disable_log_stats=False, enable_prefix_caching=False,
    additional_config={"embedding_tables": "disk"},
)
# Each token, or each pair of tokens, once: a de Bruijn sequence.
tokens = range(vocab)
if order == 2:
    pairs = ((i, j) for i in range(vocab) for j in range(i, vocab))
    tokens = [token for i, j in pairs for token in ([i] if i == j else [i, j])]
length, most = 510, 0
params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
for start in range(0, len(tokens), length - order + 1):
    ids = list(tokens[start : start + length])
    llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
    most = max(most, anonymous())
read = sum(m.value for m in llm.get_metrics() if m.name == "vllm:metal_table_read_bytes")
print("measured", most, int(read))
"""


def gemma(has_table):
    """Gemma 4 with or without embeddings of each layer."""
    vocab, layers = TABLE["vocab"], TABLE["layers"]
    config = {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "dtype": "bfloat16",
        "vocab_size": vocab,
        "vocab_size_per_layer_input": vocab,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "global_head_dim": 16,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": TABLE["per_layer"] if has_table else 0,
        "sliding_window": 512,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    }
    return gemma4_text, config


def longcat(has_table):
    """LongCat with an embedding of each pair of tokens, or of a few hashes of these."""
    return longcat_flash_ngram, recurrent.config_of(further.FAMILIES["longcat_flash_ngram"]) | {
        "dtype": "bfloat16",
        "vocab_size": PAIRS,
        "hidden_size": 1024,
        "num_layers": 1,
        "num_hidden_layers": 1,
        "max_position_embeddings": 512,
        "ngram_vocab_size_ratio": PAIRS if has_table else 1,
        "emb_neighbor_num": 2,
        "emb_split_num": 1,
    }


def write_with_holes(folder, module, config):
    """A model in a file that is all zeros."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    model = module.Model(module.ModelArgs.from_dict(config))
    entries, end = {}, 0
    for name, array in tree_flatten(model.parameters()):
        nbytes = 2 * array.size
        entry = {"dtype": "BF16", "shape": list(array.shape), "data_offsets": [end, end + nbytes]}
        entries[name], end = entry, end + nbytes
    header = json.dumps(entries).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)
    return folder


@pytest.mark.parametrize(
    ("family", "vocab", "order", "nbytes"),
    [(gemma, TABLE["vocab"], 1, 2 << 30), (longcat, PAIRS, 2, 512 << 20)],
)
def test_a_table_on_disk_takes_no_memory_though_every_row_is_read(
    tmp_path, family, vocab, order, nbytes
):
    taken = {}
    for has_table in (False, True):
        folder = write_with_holes(tmp_path / str(has_table), *family(has_table))
        some = vocab if has_table else vocab // 8  # without a table, memory is soon as large
        command = [sys.executable, "-c", SERVE, str(folder), str(some), str(order)]
        environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        run = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert run.returncode == 0, run.stderr
        line = next(line for line in run.stdout.splitlines() if line.startswith("measured"))
        taken[has_table], read = (int(each) for each in line.split()[1:])
        if has_table:
            assert read == pytest.approx(nbytes, rel=0.01)
    print({has_table: f"{resident >> 20} MiB" for has_table, resident in taken.items()})
    assert taken[True] <= taken[False] + ALLOWED
