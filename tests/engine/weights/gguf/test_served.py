# SPDX-License-Identifier: Apache-2.0
"""GGUF files served as they are: against transformers, and against gguf-py's own dequantization."""

import shutil
from collections.abc import Callable, Container, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind
from mlx.utils import tree_flatten
from vllm.engine.arg_utils import EngineArgs

from vllm_metal.engine.config_json.ropes import fit_context
from vllm_metal.engine.models import loader
from vllm_metal.engine.weights import gguf_blocks, gguf_model, lazy
from vllm_metal.engine.weights.gguf.family import Family
from vllm_metal.engine.weights.gguf.source import GGUFSource, GGUFTensor
from vllm_metal.engine.weights.packed import Packed
from vllm_metal.identity import gguf_names, weights_digest
from vllm_metal.identity.model_files import ModelLoadError

TOYS = Path(__file__).parent / "toys"
PROMPT = [1, 2, 33, 44, 255, 66, 77, 8, 99, 100, 200, 17]  # of make_toys.py
EXACT = 1e-3  # of the logits' standard deviation
#: Toys of the default set: one for each way to name, join, order and change tensors.
FIRST = (
    *("llama", "llama3", "ministral3", "qwen2", "qwen3", "qwen3moe", "qwen35", "qwen35moe"),
    *("gemma3", "gemma4", "gemma4-moe", "gpt-oss", "phi3", "phi3-longrope", "glm4", "glm4moe"),
    *("deepseek2", "deepseek3", "deepseek3-yarn", "lfm2", "granite", "granitehybrid"),
    *("mixtral", "nemotron_h_moe"),
)
#: Types without an exact packing: root mean square of the error by that of the weights.
ROUNDED = 5.6e-3
INEXACT = (
    *(Kind.Q6_K, Kind.Q3_K, Kind.Q2_K, Kind.IQ4_NL, Kind.IQ4_XS, Kind.IQ3_S, Kind.IQ3_XXS),
    *(Kind.IQ2_S, Kind.IQ2_XS, Kind.IQ2_XXS, Kind.IQ1_S),
)
#: Bytes of a block at which its float16 factors are.
FACTORS = {
    Kind.Q4_1: (0, 2),
    Kind.Q5_1: (0, 2),
    Kind.Q4_K: (0, 2),
    Kind.Q5_K: (0, 2),
    Kind.Q6_K: (208,),
    Kind.Q3_K: (108,),
    Kind.Q2_K: (80, 82),
    Kind.MXFP4: (),
}


def served(file: Path, root: Path, inexact: Any = "8bit") -> Any:
    folder = gguf_model.folder_of(file, root, inexact)
    return loader.lazy_model(folder, mx.float32)


def tensor_of(kind: Kind, rows: int, columns: int, seed: int = 0) -> GGUFTensor:
    """Makes random blocks in which every bit occurs."""
    rng = np.random.default_rng(seed)
    block, size = GGML_QUANT_SIZES[kind]
    data = rng.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    for at in FACTORS.get(kind, (0,)):
        factors = (rng.standard_normal((*data.shape[:2], 1)) * 0.01).astype(np.float16)
        data[..., at : at + 2] = factors.view(np.uint8)
    if kind == Kind.MXFP4:
        data[..., 0] = rng.integers(110, 130, data.shape[:2])
    return GGUFTensor("x", kind, (rows, columns), data.reshape(rows, -1))


def error_of(toy: str, root: Path) -> float:
    """Returns the largest difference from transformers' logits, relative to their deviation."""
    expected = np.load(TOYS / f"{toy}.npy")
    assert expected.std() > 1
    model = served(TOYS / f"{toy}.gguf", root)
    fit_context(model, 64)  # as a start does; LongRoPE has other factors for short contexts
    logits = np.array(model(mx.array([PROMPT]))[0])
    expected = expected[:, : logits.shape[-1]]  # Gemma's converter drops ids without a token
    return float(np.abs(logits - expected).max() / expected.std())


@pytest.mark.parametrize(
    "toy",
    [
        pytest.param(toy, marks=() if toy in FIRST else pytest.mark.more)
        for toy in sorted(path.stem for path in TOYS.glob("*.gguf"))
    ],
)
def test_a_family_computes_what_transformers_does(toy: str, tmp_path: Path) -> None:
    assert error_of(toy, tmp_path) < EXACT


def _with_names(family: Family, **names: str) -> Family:
    return replace(family, layer_names=dict(family.layer_names) | names)


@pytest.mark.parametrize(
    ("toy", "change"),
    [
        ("llama", lambda family: replace(family, interleaved_rope=False)),
        ("gemma3", lambda family: replace(family, norm_offset=0.0)),
        ("qwen35", lambda family: replace(family, v_heads_tiled=False)),
        (
            "mixtral",
            lambda family: _with_names(
                family,
                ffn_gate_exps=family.layer_names["ffn_up_exps"],
                ffn_up_exps=family.layer_names["ffn_gate_exps"],
            ),
        ),
        (
            "granitehybrid",
            lambda family: replace(family, layer_names=dict(reversed(family.layer_names.items()))),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_another_order_or_offset_is_far_from_transformers(
    toy: str, change: Callable[[Family], Family], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = gguf_model.served_family
    monkeypatch.setattr(gguf_model, "served_family", lambda source: change(right(source)))
    assert error_of(toy, tmp_path) > 100 * EXACT


@pytest.mark.parametrize("kind", gguf_blocks.EXACT, ids=lambda kind: kind.name)
def test_a_type_with_an_exact_packing_keeps_its_values(kind: Kind) -> None:
    tensor, order = tensor_of(kind, 7, 512), np.random.default_rng(1).permutation(7)
    parts, convert = gguf_blocks.exact(tensor, order)
    weight = convert(lazy.arrays_of(parts), mx.float32)
    assert isinstance(weight, Packed)
    expected = gguf.dequantize(tensor.data, kind)[order]
    error = np.abs(np.array(weight.dense(mx.float32)) - expected).max()
    assert error <= 1e-6 * np.abs(expected).max()


@pytest.mark.parametrize("kind", INEXACT, ids=lambda kind: kind.name)
def test_other_types_are_rounded_or_dense(kind: Kind) -> None:
    tensor = tensor_of(kind, 7, 512)
    expected = gguf.dequantize(tensor.data, kind)
    parts, convert = gguf_blocks.decoded(tensor, packs=False)
    np.testing.assert_array_equal(convert(lazy.arrays_of(parts), mx.float32), expected)
    parts, convert = gguf_blocks.decoded(tensor, packs=True)
    weight = convert(lazy.arrays_of(parts), mx.float32)
    assert isinstance(weight, Packed)
    error = np.array(weight.dense(mx.float32)) - expected
    assert np.sqrt((error**2).mean()) < ROUNDED * np.sqrt((expected**2).mean())


@pytest.mark.parametrize("kind", (*gguf_blocks.EXACT, *INEXACT), ids=lambda kind: kind.name)
def test_another_layout_of_a_type_is_far_away(kind: Kind) -> None:
    """Reads a factor, a group, the nibbles or the zeros wrongly."""
    tensor = tensor_of(kind, 7, 512)
    exact = kind in gguf_blocks.EXACT
    made = gguf_blocks.exact(tensor) if exact else gguf_blocks.decoded(tensor, packs=True)
    assert made is not None
    parts, convert = made
    weight = convert(lazy.arrays_of(parts), mx.float32)
    assert isinstance(weight, Packed)
    found = np.array(weight.dense(mx.float32))
    block, size = GGML_QUANT_SIZES[kind]
    blocks = tensor.data.reshape(7, -1, size)
    at = [] if kind == Kind.MXFP4 else FACTORS.get(kind, (0,))[:1]
    factors = {*range(at[0], at[0] + 2)} if at else {0}
    others = sorted({*range(size)} - factors)
    swapped, moved, inverse = blocks.copy(), blocks.copy(), blocks.copy()
    swapped[..., others] = (blocks[..., others] >> 4) | (blocks[..., others] << 4)
    moved[..., sorted(factors)] = np.roll(blocks[..., sorted(factors)], 1, 0)
    values = gguf.dequantize(blocks.reshape(7, -1), kind)
    if at:
        factor = np.ascontiguousarray(blocks[..., at[0] : at[0] + 2]).view(np.float16)
        one_off = values + np.repeat(factor[..., 0].astype(np.float32), block, -1)
        inverse[..., at[0] : at[0] + 2] = (1 / factor).astype(np.float16).view(np.uint8)
    else:
        factor = np.exp2(blocks[..., 0].astype(np.float32) - 128)
        one_off = values + np.repeat(factor, block, -1)
        inverse[..., 0] = 254 - blocks[..., 0]
    wrong = {
        name: gguf.dequantize(each.reshape(7, -1), kind)
        for name, each in (("nibbles", swapped), ("group", moved), ("reciprocal", inverse))
    }
    if exact:  # scales of others multiply the factor
        wrong["zeros"] = one_off
    # 100 times the error of types without an exact packing is more than the values.
    far = 1e-4 if exact else 0.1
    for name, other in wrong.items():
        assert np.sqrt(np.mean((found - other) ** 2) / np.mean(values**2)) > far, name


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q5_0, Kind.Q6_K], ids=lambda kind: kind.name)
def test_products_have_the_dtype_of_activations(kind: Kind, dtype: mx.Dtype) -> None:
    tensor = tensor_of(kind, 8, 256)
    made = gguf_blocks.exact(tensor) if kind in gguf_blocks.EXACT else None
    parts, convert = made or gguf_blocks.decoded(tensor, packs=True)
    weight = convert(lazy.arrays_of(parts), dtype)
    assert isinstance(weight, Packed)
    product = mx.quantized_matmul(
        mx.ones((1, 256), dtype),
        weight.quantized,
        weight.scales,
        weight.biases,
        bits=weight.bits,
        group_size=weight.group_size,
    )
    assert product.dtype == dtype


def copy_settings(
    reader: gguf.GGUFReader, writer: gguf.GGUFWriter, but: Container[str] = ()
) -> None:
    for field in reader.fields.values():
        given = field.name in but or field.name == "general.architecture"
        if field.name.startswith("GGUF.") or given:
            continue
        inner = field.types[1] if len(field.types) > 1 else None
        writer.add_key_value(field.name, field.contents(), field.types[0], inner)


def quantized(toy: str, kind: Kind, out: Path) -> Path:
    """Quantizes a toy's matrices to a type that gguf-py writes."""
    source = GGUFSource(TOYS / f"{toy}.gguf")
    reader = gguf.GGUFReader(TOYS / f"{toy}.gguf")
    writer = gguf.GGUFWriter(out, source.architecture)
    copy_settings(reader, writer)
    for tensor in source.tensors.values():
        values = gguf.dequantize(tensor.data, tensor.kind).reshape(tensor.shape)
        is_norm = tensor.name.endswith("_norm.weight")  # of Mamba 2, in groups
        if len(tensor.shape) > 1 and tensor.shape[-1] % 32 == 0 and not is_norm:
            writer.add_tensor(tensor.name, gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, np.ascontiguousarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


@pytest.mark.parametrize(
    "toy",
    [
        *("llama", "qwen35", "qwen3moe", "deepseek3", "gpt-oss"),
        *(
            pytest.param(toy, marks=pytest.mark.more)
            for toy in ("deepseek2", "granitehybrid", "qwen3next", "gemma4-moe", "nemotron_h_moe")
        ),
    ],
)
def test_packed_weights_get_where_dense_ones_do(
    toy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = quantized(toy, Kind.Q8_0, tmp_path / "toy.gguf")
    packed = served(file, tmp_path)
    assert any(name.endswith(".scales") for name, _ in tree_flatten(packed.parameters()))
    logits = np.array(packed(mx.array([PROMPT]))[0])
    monkeypatch.setattr(gguf_model, "EXACT", {})  # all are dequantized by gguf-py
    expected = np.array(served(file, tmp_path, "dense")(mx.array([PROMPT]))[0])
    assert np.abs(logits - expected).max() < EXACT * expected.std()
    as_trained = np.load(TOYS / f"{toy}.npy")[:, : logits.shape[-1]]
    # Rounding may choose another expert of a token.
    assert np.median(np.abs(logits - as_trained)) < 0.1 * as_trained.std()


def test_outlines_are_known_without_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = quantized("qwen3moe", Kind.Q8_0, tmp_path / "toy.gguf")
    whole = served(file, tmp_path)
    monkeypatch.setattr(mx, "load", None)
    with lazy.outlines_only():
        outlines = served(file, tmp_path)
    assert [
        (name, each.shape, each.dtype) for name, each in tree_flatten(outlines.parameters())
    ] == [(name, each.shape, each.dtype) for name, each in tree_flatten(whole.parameters())]


def finish(writer: gguf.GGUFWriter, tensors: Iterable[GGUFTensor]) -> None:
    """Completes a file that has metadata with float32 tensors."""
    for tensor in tensors:
        values = gguf.dequantize(tensor.data, tensor.kind).reshape(tensor.shape)
        writer.add_tensor(tensor.name, np.ascontiguousarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def split(file: Path, folder: Path) -> list[Path]:
    """Splits the file into two parts like gguf-split."""
    source, reader = GGUFSource(file), gguf.GGUFReader(file)
    tensors = list(source.tensors.values())
    parts = []
    for number, share in enumerate((tensors[:5], tensors[5:])):
        path = folder / f"toy-{number + 1:05}-of-00002.gguf"
        writer = gguf.GGUFWriter(path, source.architecture)
        if number == 0:
            copy_settings(reader, writer)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 2)
        writer.add_int32("split.tensors.count", len(tensors))
        finish(writer, share)
        parts.append(path)
    return parts


def test_any_part_of_a_split_model_is_the_model(tmp_path: Path) -> None:
    expected = np.load(TOYS / "qwen3.npy")
    for part in split(TOYS / "qwen3.gguf", tmp_path):
        logits = np.array(served(part, tmp_path / "folders")(mx.array([PROMPT]))[0])
        assert np.abs(logits - expected).max() < EXACT * expected.std()
    (tmp_path / "toy-00002-of-00002.gguf").unlink()
    with pytest.raises(ModelLoadError, match=r"toy-00002-of-00002\.gguf: no such file"):
        served(tmp_path / "toy-00001-of-00002.gguf", tmp_path / "folders")


def test_files_are_known_by_their_first_bytes(tmp_path: Path) -> None:
    blob = tmp_path / "sha256-0123"
    shutil.copy(TOYS / "qwen3.gguf", blob)
    assert gguf_names.file_of(str(blob)) == blob
    assert gguf_names.file_of("Qwen/Qwen3-0.6B") is None
    assert gguf_names.file_of(str(tmp_path)) is None


def cached(root: Path, names: list[str]) -> None:
    """Makes a repository in the Hugging Face cache."""
    snapshot = root / "models--owner--name" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (root / "models--owner--name" / "refs").mkdir()
    (root / "models--owner--name" / "refs" / "main").write_text("0" * 40)
    for name in names:
        shutil.copy(TOYS / "qwen3.gguf", snapshot / name)


def test_a_tag_names_a_file_of_the_hubs_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    names = ["m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m-IQ4_XS-00001-of-00002.gguf"]
    cached(tmp_path, [*names, "m-IQ4_XS-00002-of-00002.gguf", "mmproj-Q8_0.gguf"])
    for tag, name in (("Q4_K_M", names[0]), ("q4_k_s", names[1]), ("IQ4_XS", names[2])):
        found = gguf_names.file_of(f"owner/name:{tag}")
        assert found is not None and found.name == name
    with pytest.raises(ModelLoadError, match=r"which has .*Run `hf download owner/name"):
        gguf_names.file_of("owner/name:Q8_0")
    with pytest.raises(ModelLoadError, match=r"not in the Hugging Face cache. Run `hf download"):
        gguf_names.file_of("owner/other:Q8_0")


def _cut(data: bytearray) -> bytearray:
    return data[: len(data) // 2]


def _without_rows(data: bytearray) -> bytearray:
    at = data.index(b"blk.0.attn_q.weight") + len(b"blk.0.attn_q.weight") + 4
    data[at : at + 8] = bytes(8)
    return data


def _of_unknown_type(data: bytearray) -> bytearray:
    at = data.index(b"blk.0.attn_q.weight") + len(b"blk.0.attn_q.weight") + 4 + 16
    data[at : at + 4] = (999).to_bytes(4, "little")
    return data


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (_cut, r"m\.gguf is cut off or damaged: download it again"),
        (_without_rows, r"m\.gguf is cut off or damaged: download it again"),
        (_of_unknown_type, r"m\.gguf has type 999 in tensor blk\.0\.attn_q\.weight, which"),
    ],
)
def test_a_damaged_file_is_rejected_before_weights_are_read(
    damage: Callable[[bytearray], bytearray], told: str, tmp_path: Path
) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(damage(bytearray((TOYS / "qwen3.gguf").read_bytes())))
    with pytest.raises(ModelLoadError, match=told):
        gguf_model.folder_of(file, tmp_path, "8bit")


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"general.architecture": "clip"}, "vision encoder"),
        ({"general.type": "adapter"}, "LoRA adapter"),
        ({"general.architecture": "bert"}, "architecture 'bert' is not supported"),
        ({"tokenizer.ggml.pre": "unheard-of"}, "unheard-of.*--tokenizer"),
    ],
)
def test_other_files_are_rejected_by_one_line(
    settings: dict[str, str], error: str, tmp_path: Path
) -> None:
    reader = gguf.GGUFReader(TOYS / "qwen3.gguf")
    file = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(file, settings.get("general.architecture", "qwen3"))
    copy_settings(reader, writer, but=settings)
    for key, value in settings.items():
        if key != "general.architecture":
            writer.add_string(key, value)
    finish(writer, GGUFSource(TOYS / "qwen3.gguf").tensors.values())
    with pytest.raises(ModelLoadError, match=error) as raised:
        gguf_model.folder_of(file, tmp_path, "8bit")
    assert "\n" not in str(raised.value)


def test_a_type_that_is_not_supported_is_rejected_before_weights_are_read(tmp_path: Path) -> None:
    reader = gguf.GGUFReader(TOYS / "qwen3.gguf")
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen3")
    copy_settings(reader, writer)
    tensors = GGUFSource(TOYS / "qwen3.gguf").tensors
    _, size = GGML_QUANT_SIZES[Kind.Q1_0]
    rows = np.zeros((4, size), np.uint8)
    writer.add_tensor("blk.0.attn_q.weight", rows, raw_dtype=Kind.Q1_0)
    finish(writer, [each for name, each in tensors.items() if name != "blk.0.attn_q.weight"])
    with pytest.raises(ModelLoadError, match=r"blk\.0\.attn_q\.weight has type Q1_0, which is not"):
        gguf_model.folder_of(tmp_path / "m.gguf", tmp_path, "8bit")


def test_the_digest_of_weights_tells_files_and_conversions_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_METAL_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "m.gguf"
    digests = []
    for toy, inexact in (("qwen3", "8bit"), ("qwen3", "dense"), ("llama3", "8bit")):
        shutil.copy(TOYS / f"{toy}.gguf", file)
        monkeypatch.setenv("VLLM_METAL_GGUF_INEXACT", inexact)
        config = EngineArgs(model=str(file)).create_engine_config()
        digests.append(weights_digest.of_networks(config, None)["target"])
    assert len(set(digests)) == 3
    other = tmp_path / "other" / "m.gguf"
    other.parent.mkdir()
    shutil.copy(file, other)
    config = EngineArgs(model=str(other)).create_engine_config()
    assert weights_digest.of_networks(config, None)["target"] == digests[-1]
