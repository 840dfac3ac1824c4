# SPDX-License-Identifier: Apache-2.0
"""Converted models against transformers' own reading of the same GGUF file."""

import errno
import io
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model
from safetensors.numpy import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from vllm_metal.engine.weights import gguf_model
from vllm_metal.engine.weights.gguf import ConversionError, ConvertOptions, convert

# All sizes differ, so that a transposed or swapped tensor cannot pass unseen.
VOCABULARY, HIDDEN, MLP, HEADS, KV_HEADS, HEAD_DIM = 96, 64, 160, 4, 2, 16
LAYERS = {"llama": 2, "qwen2": 2, "qwen3": 2, "gemma3": 7}  # one global layer in gemma3's seven
PROMPT = [3, 17, 5, 88, 41, 9, 60, 2, 71, 33, 12, 95, 4, 28]
WINDOW = 6  # shorter than PROMPT, so that local layers differ from global ones

Encode = Callable[[str], Kind]


def write_gguf(
    path: Path,
    family: str,
    encode: Encode = lambda _: Kind.F32,
    tied: bool = True,
    hidden: int = HIDDEN,
    **extra: Any,
) -> Path:
    """Writes a small random model of `family`; `encode` gives the type of each matrix."""
    rng = np.random.default_rng(0)
    mlp = 2 * hidden if hidden != HIDDEN else MLP
    head_dim = hidden // HEADS if family in ("llama", "qwen2") else 32
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(LAYERS[family])
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(mlp)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)
    if family == "llama":
        writer.add_rope_dimension_count(head_dim)
    if family == "gemma3":
        writer.add_sliding_window(WINDOW)
    add_vocabulary(writer)
    matrices = {
        "attn_q": (HEADS * head_dim, hidden),
        "attn_k": (KV_HEADS * head_dim, hidden),
        "attn_v": (KV_HEADS * head_dim, hidden),
        "attn_output": (hidden, HEADS * head_dim),
        "ffn_gate": (mlp, hidden),
        "ffn_up": (mlp, hidden),
        "ffn_down": (hidden, mlp),
    }
    norms = {"attn_norm": hidden, "ffn_norm": hidden}
    if family in ("qwen3", "gemma3"):
        norms |= {"attn_q_norm": head_dim, "attn_k_norm": head_dim}
    if family == "gemma3":
        norms |= {"post_attention_norm": hidden, "post_ffw_norm": hidden}

    def add_matrix(name: str, shape: tuple[int, int]) -> None:
        values = rng.standard_normal(shape).astype(np.float32) * 0.2
        kind = encode(name)
        if kind.name.endswith("_K"):  # the package only decodes these: random codes, small scales
            data = random_kquant(rng, kind, shape)
        else:
            data = gguf.quantize(values, kind)
        writer.add_tensor(name, data, raw_dtype=kind)

    def add_vector(name: str, size: int, around: float) -> None:
        values = around + 0.2 * rng.standard_normal(size)
        writer.add_tensor(name, values.astype(np.float32))

    add_matrix("token_embd.weight", (VOCABULARY, hidden))
    for layer in range(LAYERS[family]):
        for stem, shape in matrices.items():
            add_matrix(f"blk.{layer}.{stem}.weight", shape)
            if family == "qwen2" and stem in ("attn_q", "attn_k", "attn_v"):
                add_vector(f"blk.{layer}.{stem}.bias", shape[0], 0.0)
        for stem, size in norms.items():
            add_vector(f"blk.{layer}.{stem}.weight", size, 1.0)
    add_vector("output_norm.weight", hidden, 1.0)
    if not tied:
        add_matrix("output.weight", (VOCABULARY, hidden))
    for name, values in extra.items():
        writer.add_tensor(name.replace("__", "."), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_vocabulary(writer: gguf.GGUFWriter) -> None:
    letters = sorted(bytes_to_unicode().values())[: VOCABULARY - 3]
    tokens = ["<|endoftext|>", "<|im_end|>", *letters, letters[0] + letters[1]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (VOCABULARY - 2))
    writer.add_token_merges([f"{letters[0]} {letters[1]}"])
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(0)


def random_kquant(rng: np.random.Generator, kind: Kind, shape: tuple[int, int]) -> np.ndarray:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = rng.integers(0, 256, (shape[0], shape[1] // block, size), dtype=np.uint8)
    scale = np.full((*data.shape[:2], 1), 2e-4, np.float16).view(np.uint8)
    # Where the float16 scales of a super-block stand (ggml-common.h).
    places = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
    for at in places[kind.name]:
        data[..., at : at + 2] = scale
    return data.reshape(shape[0], -1)


def transformers_model(path: Path, **overrides: Any) -> PreTrainedModel:
    """Loads a GGUF file with transformers, in float32."""
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    for key, value in overrides.items():
        setattr(config, key, value)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    loaded = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(loaded, strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected
    return model


def transformers_logits(model: PreTrainedModel, tokens: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].numpy()


def mlx_logits(directory: Path, tokens: list[int]) -> np.ndarray:
    model, _ = load_model(directory)
    return np.array(model(mx.array([tokens]))[0].astype(mx.float32))


def overrides_of(family: str) -> dict[str, Any]:
    # Two values that transformers leaves at the defaults of released models, not the file's.
    overrides = {"qwen3": {"head_dim": 32}, "gemma3": {"query_pre_attn_scalar": 32}}
    return overrides.get(family, {})


@pytest.mark.parametrize(
    ("family", "tied"),
    [
        ("llama", False),
        ("gemma3", True),
        pytest.param("qwen2", True, marks=pytest.mark.more),
        pytest.param("qwen3", True, marks=pytest.mark.more),
    ],
)
def test_float_models_give_the_logits_of_transformers(
    tmp_path: Path, family: str, tied: bool
) -> None:
    path = write_gguf(tmp_path / "m.gguf", family, tied=tied)
    out = convert(path, tmp_path / "out")
    expected = transformers_logits(transformers_model(path, **overrides_of(family)), PROMPT)
    np.testing.assert_allclose(mlx_logits(out, PROMPT), expected, rtol=1e-4, atol=1e-4)


def test_matrices_decoded_in_pieces_give_the_logits_of_transformers(tmp_path: Path) -> None:
    # 768 x 768 is more than twice what is decoded at a time.
    path = write_gguf(tmp_path / "m.gguf", "llama", lambda _: Kind.Q8_0, hidden=768)
    out = convert(path, tmp_path / "out", ConvertOptions(dtype="float32"))
    expected = transformers_logits(transformers_model(path), PROMPT)
    np.testing.assert_allclose(mlx_logits(out, PROMPT), expected, rtol=1e-3, atol=1e-3)


def mixed(name: str) -> Kind:
    """Returns a mix of block types in one model, like quantizers make."""
    for part, kind in (
        ("token_embd", Kind.Q8_0),
        ("attn_v", Kind.Q5_1),
        ("attn_k", Kind.Q5_0),
        ("ffn_down", Kind.F16),
        ("attn_q", Kind.Q4_0),
    ):
        if part in name:
            return kind
    return Kind.Q4_1


@pytest.mark.parametrize(
    ("family", "blocks"),
    [
        ("llama", "keep"),
        ("qwen3", "dequantize"),
        *(
            pytest.param(family, blocks, marks=pytest.mark.slow)
            for family, blocks in (
                *(("llama", "dequantize"), ("qwen2", "keep"), ("qwen2", "dequantize")),
                *(("qwen3", "keep"), ("gemma3", "keep"), ("gemma3", "dequantize")),
            )
        ),
    ],
)
def test_mixed_blocks_give_the_logits_of_transformers(
    tmp_path: Path, family: str, blocks: Any
) -> None:
    path = write_gguf(tmp_path / "m.gguf", family, mixed)
    out = convert(path, tmp_path / "out", ConvertOptions(dtype="float32", blocks=blocks))
    expected = transformers_logits(transformers_model(path, **overrides_of(family)), PROMPT)
    np.testing.assert_allclose(mlx_logits(out, PROMPT), expected, rtol=1e-4, atol=1e-4)
    assert ("quantization" in json.loads((out / "config.json").read_text())) == (blocks == "keep")


def test_kept_blocks_stay_packed_and_are_listed_by_module(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", mixed)
    out = convert(path, tmp_path / "out")
    weights = load_file(out / "model.safetensors")
    module = "model.layers.1.mlp.up_proj"
    assert weights[f"{module}.weight"].dtype == np.uint32
    assert weights[f"{module}.weight"].shape == (MLP, HIDDEN * 4 // 32)
    assert weights[f"{module}.scales"].dtype == np.float16
    config = json.loads((out / "config.json").read_text())
    assert "quantization_config" not in config  # vLLM would look for a method of its own
    assert config["quantization"]["bits"] == 4
    assert config["quantization"]["model.embed_tokens"]["bits"] == 8
    assert config["quantization"]["model.layers.0.self_attn.v_proj"]["bits"] == 5
    assert "model.layers.0.mlp.down_proj" not in config["quantization"]


@pytest.mark.parametrize(
    "kind",
    [
        Kind.Q4_K,
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in (Kind.Q2_K, Kind.Q3_K, Kind.Q5_K, Kind.Q6_K)
        ),
    ],
)
def test_kquants_are_written_out_dense(tmp_path: Path, kind: Kind) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", lambda _: kind, hidden=256)
    out = convert(path, tmp_path / "out", ConvertOptions(dtype="float32"))
    expected = transformers_logits(transformers_model(path), PROMPT)
    np.testing.assert_allclose(mlx_logits(out, PROMPT), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bits", [4, pytest.param(8, marks=pytest.mark.more)])
def test_kquants_are_quantized_anew_on_request(tmp_path: Path, bits: Any) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", lambda _: Kind.Q6_K, hidden=256)
    options = ConvertOptions(dtype="float32", kquants="requantize", bits=bits)
    model, config = load_model(convert(path, tmp_path / "out", options))
    assert config["quantization"] == {"group_size": 32, "bits": bits, "mode": "affine"}
    layer = model.model.layers[0].mlp.up_proj
    decoded = mx.dequantize(layer.weight, layer.scales, layer.biases, group_size=32, bits=bits)
    tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.0.ffn_up.weight")
    dense = gguf.dequantize(tensor.data, tensor.tensor_type)
    # A value is at most half a step off; a step is the range of its group over 2^bits - 1 (and
    # MLX shifts the grid so that zero is on it, which costs up to another half).
    groups = dense.reshape(len(dense), -1, 32)
    step = (groups.max(-1) - groups.min(-1)).max() / (2**bits - 1)
    assert np.abs(np.array(decoded) - dense).max() <= step * 1.01


def test_llama3_frequencies_become_rope_scaling(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 5000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    plain = 5000.0 ** -(np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    config = AutoConfig.for_model(
        "llama", hidden_size=HIDDEN, num_attention_heads=HEADS, rope_parameters=scaling
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    factors = (plain / scaled.numpy()).astype(np.float32)
    assert factors.max() > 20  # the rule does change some of them at this theta
    path = write_gguf(tmp_path / "m.gguf", "llama", rope_freqs__weight=factors)
    out = convert(path, tmp_path / "out")
    tokens = PROMPT * 8  # far enough that the slow frequencies matter
    expected = transformers_logits(transformers_model(path, rope_parameters=scaling), tokens)
    np.testing.assert_allclose(mlx_logits(out, tokens), expected, rtol=1e-4, atol=1e-4)


def test_other_frequency_tables_are_refused(tmp_path: Path) -> None:
    factors = np.linspace(1, 7, HEAD_DIM // 2, dtype=np.float32)
    path = write_gguf(tmp_path / "m.gguf", "llama", rope_freqs__weight=factors)
    with pytest.raises(ConversionError, match=r"rope_freqs\.weight does not follow"):
        convert(path, tmp_path / "out")


def test_large_models_are_cut_into_indexed_files(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen3", mixed)
    whole = convert(path, tmp_path / "whole", ConvertOptions(dtype="float32"))
    options = ConvertOptions(dtype="float32", max_shard_bytes=40_000)
    cut = convert(path, tmp_path / "cut", options)
    index = json.loads((cut / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    for name, value in load_file(whole / "model.safetensors").items():
        np.testing.assert_array_equal(load_file(cut / index["weight_map"][name])[name], value)
    np.testing.assert_array_equal(mlx_logits(cut, PROMPT), mlx_logits(whole, PROMPT))


def test_the_dtype_is_that_of_the_file_unless_named(tmp_path: Path) -> None:
    def dtype(family: str, encode: Encode, **options: Any) -> str:
        path = write_gguf(tmp_path / "m.gguf", family, encode)
        out = convert(path, tmp_path / "out", ConvertOptions(force=True, **options))
        model, config = load_model(out)
        dtypes = {str(value.dtype) for _, value in tree_flatten(model.parameters())}
        assert dtypes - {"mlx.core.uint32"} == {f"mlx.core.{config['dtype']}"}
        return str(config["dtype"])

    assert dtype("llama", lambda _: Kind.BF16) == "bfloat16"
    assert dtype("llama", lambda _: Kind.F16) == "float16"
    assert dtype("llama", mixed) == "float16"
    assert dtype("gemma3", mixed) == "bfloat16"
    assert dtype("llama", lambda _: Kind.BF16, dtype="float32") == "float32"


@pytest.mark.parametrize("how", ["converted", "served"])
def test_end_tokens_of_both_kinds_stop_generation(tmp_path: Path, how: str) -> None:
    path, out = write_gguf(tmp_path / "m.gguf", "llama"), tmp_path / "out"
    out = convert(path, out) if how == "converted" else gguf_model.folder_of(path, out, "8bit")
    generation = json.loads((out / "generation_config.json").read_text())
    assert generation == {"pad_token_id": 0, "eos_token_id": [1, 0]}


@pytest.fixture
def refused(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Runs a conversion that must fail and leave nothing; returns the message."""

    def run(path: Path, options: ConvertOptions | None = None) -> str:
        folder = tmp_path / "results"
        with pytest.raises(ConversionError) as caught:
            convert(path, folder / "out", options)
        assert not folder.exists() or not list(folder.iterdir())
        return str(caught.value)

    yield run


def test_an_unknown_architecture_is_named_with_those_supported(
    tmp_path: Path, refused: Callable[..., str]
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    message = refused(tmp_path / "m.gguf")
    assert "'mamba'" in message and "gemma3, llama, qwen2, qwen3" in message


def test_an_unknown_tensor_type_is_named_with_those_supported(
    tmp_path: Path, refused: Callable[..., str]
) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", lambda _: Kind.F16)
    reader = gguf.GGUFReader(path, "r+")
    field = next(t.field for t in reader.tensors if t.name == "blk.1.attn_v.weight")
    field.parts[4][0] = Kind.IQ4_NL  # same width as what stood there or less, so the file is whole
    reader.data.flush()
    message = refused(path)
    assert "blk.1.attn_v.weight" in message and "IQ4_NL" in message and "Q4_K" in message


def test_a_missing_and_a_foreign_tensor_are_named(
    tmp_path: Path, refused: Callable[..., str]
) -> None:
    extra = np.zeros(HIDDEN, np.float32)
    path = write_gguf(tmp_path / "m.gguf", "llama", blk__0__attn_sinks__weight=extra)
    assert "unknown tensors of a llama model: blk.0.attn_sinks.weight" in refused(path)
    path = write_gguf(tmp_path / "m.gguf", "llama", **{"blk__0__attn_q__bias": extra})
    assert "lacks tensors of a llama model: blk.0.attn_k.bias" in refused(path)


def test_damaged_files_are_refused(tmp_path: Path, refused: Callable[..., str]) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama")
    whole = path.read_bytes()
    for size in (0, 3, 40, 2000, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert "is cut off" in refused(path) if size > 3 else "is not a GGUF file" in refused(path)
    path.write_bytes(b"PK" + whole[2:])
    assert "is not a GGUF file: download it again" in refused(path)
    name = b"blk.0.attn_q.weight"
    dims = whole.index(name) + len(name) + 4  # behind their number
    path.write_bytes(whole[:dims] + bytes(8) + whole[dims + 8 :])
    assert "blk.0.attn_q.weight has a dimension of 0" in refused(path)
    path.write_bytes(whole[: dims + 16] + b"\x1f" + whole[dims + 17 :])
    assert "has type 31 in tensor blk.0.attn_q.weight, which is not supp" in refused(path)
    path.write_bytes(whole[:4] + b"\x01" + whole[5:])
    assert "has GGUF version 1 (supported: 2, 3): choose another" in refused(path)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("general.alignment", 0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert "is cut off or damaged" in refused(path)
    assert "no such file" in refused(tmp_path / "absent.gguf")
    assert "is a folder: give the GGUF file in it" in refused(tmp_path)


def test_gemma3_in_float16_is_refused(tmp_path: Path, refused: Callable[..., str]) -> None:
    path = write_gguf(tmp_path / "m.gguf", "gemma3")
    assert "--dtype bfloat16" in refused(path, ConvertOptions(dtype="float16"))


def test_values_beyond_float16_are_refused_half_way_and_leave_nothing(
    tmp_path: Path, refused: Callable[..., str]
) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama")
    reader = gguf.GGUFReader(path, "r+")
    reader.tensors[-1].data[0] = 1e6
    reader.data.flush()
    assert "use --dtype bfloat16 or float32" in refused(path, ConvertOptions(dtype="float16"))


def test_a_full_disk_is_named_and_nothing_is_left(
    tmp_path: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    room = 4096  # for some of the weights

    class FullDisk(io.FileIO):
        def write(self, data: Any) -> int:
            if self.tell() + len(data) > room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(data)

    def open_on_it(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if mode == "wb" and path.suffix == ".safetensors":
            return FullDisk(path, "w")
        return open(path, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", open_on_it)
    message = refused(write_gguf(tmp_path / "m.gguf", "llama"), ConvertOptions())
    assert "disk is full" in message and "GB" in message and "\n" not in message


def test_an_existing_directory_is_kept_without_force(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama")
    out = tmp_path / "out"
    out.mkdir()
    convert(path, out)  # an empty one may be used
    (out / "mine.txt").write_text("keep")
    with pytest.raises(FileExistsError, match="--force"):
        convert(path, out)
    assert (out / "mine.txt").read_text() == "keep"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConversionError):
        convert(path, out, ConvertOptions(force=True))
    assert (out / "mine.txt").exists(), "a failed conversion took the old directory with it"
    convert(write_gguf(path, "llama"), out, ConvertOptions(force=True))
    assert not (out / "mine.txt").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.gguf", "out"]
