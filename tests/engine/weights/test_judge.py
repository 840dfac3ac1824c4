# SPDX-License-Identifier: Apache-2.0
"""Published weights are read as by the libraries that wrote them, or rejected."""

import json
import re

import mlx.core as mx
import numpy as np
import pytest
import torch
from engine.weights.published_formats import FORMATS, weight_of
from safetensors.torch import save_file

from vllm_metal.engine.weights.files import arrays_of, headers
from vllm_metal.engine.weights.judge import plan_of
from vllm_metal.engine.weights.packed import Packed
from vllm_metal.engine.weights.quantization import Quantization
from vllm_metal.identity.model_files import ModelLoadError

#: Sizes that the formats' own writers take: rows that are no multiple of a block, odd numbers of
#: groups.
SHAPES = ((224, 192), (96, 320))
NAME = "model.layers.1.mlp.up_proj"
_GROUPS = "config_groups"


def stored(folder, form, shape):
    """Writes one weight; returns the values it represents."""
    found = FORMATS[form].store(weight_of(shape))
    save_file(
        {f"{NAME}.{name}": tensor for name, tensor in found.tensors.items()},
        folder / "model.safetensors",
    )
    return found.dense.numpy()


def served(folder, form, dtype=mx.float32, **changes):
    """Returns the weight as served."""
    config = {"quantization_config": FORMATS[form].quantization | changes}
    found = headers(folder)
    plan = plan_of(config, found, folder)
    return plan.converted(arrays_of(found), dtype)[f"{NAME}.weight"]


def off(found, expected):
    """Returns the root mean square difference, relative to the values'."""
    dense = found.dense(mx.float32) if isinstance(found, Packed) else found.astype(mx.float32)
    difference = np.array(dense, np.float64) - expected
    return float(np.sqrt((difference**2).mean() / (expected**2).mean()))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMATS)
def test_a_weight_is_what_its_writer_reads(tmp_path, form, shape):
    expected = stored(tmp_path, form, shape)
    found = served(tmp_path, form)
    assert isinstance(found, Packed) and found.shape == shape
    assert off(found, expected) < FORMATS[form].error


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("form", FORMATS)
def test_scales_in_16_bits_change_no_more_than_is_said(tmp_path, form, dtype):
    expected = stored(tmp_path, form, SHAPES[0])
    found = served(tmp_path, form, dtype)
    assert found.biases is None or found.biases.dtype == found.scales.dtype == dtype
    assert found.output_scale is None or found.output_scale.dtype == mx.float32
    rounding = FORMATS[form].rounding[dtype == mx.bfloat16]
    assert off(found, expected) < FORMATS[form].error + rounding


PLACES = {
    "config.json": lambda said: {"quantization_config": said},
    "the text model's part": lambda said: {"text_config": {"quantization_config": said}},
    "compression_config": lambda said: {"compression_config": said},
}


@pytest.mark.parametrize("place", [*PLACES, "hf_quant_config.json"])
def test_what_a_folder_says_is_found_wherever_it_stands(tmp_path, place):
    form = "compressed 4 bits" if "compression" in place else "modelopt nvfp4"
    expected = stored(tmp_path, form, SHAPES[0])
    said, config = dict(FORMATS[form].quantization), {}
    if place in PLACES:
        config = PLACES[place](said)
    else:
        said.pop("quant_method")
        beside = {"producer": {"name": "modelopt"}, "quantization": said}
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    read = Quantization.read(config, tmp_path)
    assert read is not None and read.method == FORMATS[form].quantization["quant_method"]
    found = headers(tmp_path)
    plan = plan_of(config, found, tmp_path)
    weight = plan.converted(arrays_of(found), mx.float32)[f"{NAME}.weight"]
    assert off(weight, expected) < FORMATS[form].error


SAME = [
    ("fp8 rows", {"quant_method": "fbgemm_fp8"}),
    ("fp8 blocks of 128", {"fmt": "float8_e4m3fn"}),
    ("fp8 rows", {"modules_to_not_convert": ["up_proj_of_another", "lm_head", "model.layers.2"]}),
    ("gptq 4 bits", {"dynamic": {"-:.*down.*": {}, "+:.*up.*": {"bits": 4}}, "bits": 8}),
    ("auto-round", {"extra_config": {NAME: {"bits": 4}, "lm_head": {"bits": 16}}, "bits": 8}),
    ("modelopt fp8", {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "FP8"}),
]


@pytest.mark.parametrize(("form", "changes"), SAME)
def test_settings_of_single_weights_are_read(tmp_path, form, changes):
    expected = stored(tmp_path, form, SHAPES[0])
    assert off(served(tmp_path, form, **changes), expected) < FORMATS[form].error


def test_groups_of_several_formats_are_told_by_their_targets(tmp_path):
    four, eight = (FORMATS[f"compressed {bits} bits"] for bits in (4, 8))
    names = {"model.layers.0.mlp.up_proj": four, "model.layers.1.self_attn.q_proj": eight}
    tensors, expected = {}, {}
    for name, form in names.items():
        found = form.store(weight_of(SHAPES[0]))
        tensors |= {f"{name}.{part}": tensor for part, tensor in found.tensors.items()}
        expected[name] = found.dense.numpy()
    save_file(tensors, tmp_path / "model.safetensors")
    weights = [form.quantization[_GROUPS]["group_0"]["weights"] for form in (four, eight)]
    groups = {
        "group_0": {"targets": ["Linear"], "weights": weights[0]},
        "group_1": {"targets": ["re:.*self_attn.*"], "weights": weights[1]},
    }
    config = {"quantization_config": four.quantization | {_GROUPS: groups}}
    found = headers(tmp_path)
    served_as = plan_of(config, found).converted(arrays_of(found), mx.float32)
    for name in names:
        assert off(served_as[f"{name}.weight"], expected[name]) < 1e-6


@pytest.mark.parametrize(
    "form", ["fp8 rows", "compressed int8", "compressed mxfp4", "deepseek mxfp4"]
)
def test_a_weight_without_its_scales_is_rejected(tmp_path, form):
    values, *_ = FORMATS[form].store(weight_of(SHAPES[0])).tensors.items()
    save_file({f"{NAME}.{values[0]}": values[1]}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match="whose other tensors are missing"):
        served(tmp_path, form)


def test_scales_that_nothing_reads_are_named_once(tmp_path):
    found = FORMATS["fp8 tensor"].store(weight_of(SHAPES[0])).tensors
    tensors = {f"{NAME}.{name}": tensor for name, tensor in found.items()}
    tensors |= {f"{NAME}.input_scale": torch.ones(1)}
    tensors |= {f"model.layers.1.self_attn.{name}_scale": torch.ones(1) for name in "kv"}
    save_file(tensors, tmp_path / "model.safetensors")
    headed = headers(tmp_path)
    plan = plan_of({"quantization_config": FORMATS["fp8 tensor"].quantization}, headed)
    assert len(plan.unused) == 3 and plan.converted(arrays_of(headed), mx.float32).keys() == {
        f"{NAME}.weight"
    }
    assert any("--kv-cache-dtype" in note for note in plan.notes)


#: Per format, changes of config.json that make it say something else than the files, and what the
#: error names; or of the stored tensors, which nobody can tell from right ones.
CONTRADICTIONS = [
    ("fp8 blocks of 128", {"weight_block_size": [64, 128]}, "blocks of 64x128"),
    ("fp8 blocks of 128", {"weight_block_size": None}, "weight_block_size"),
    ("fp8 blocks of 128", {"scale_fmt": "ue8m0"}, "scale_fmt=ue8m0"),
    ("fp8 blocks of 128", {"fmt": "e5m2"}, 'fmt="e5m2"'),
    ("fp8 rows", {"modules_to_not_convert": ["layers.1.mlp.up_proj"]}, "from quantization"),
    ("fp8 rows", {"modules_to_not_convert": [NAME]}, "from quantization"),
    ("modelopt nvfp4", {"group_size": 32}, "group_size=32"),
    ("modelopt nvfp4", {"exclude_modules": ["*.mlp.up*"]}, "from quantization"),
    ("gptq 4 bits", {"bits": 8}, "bits=8"),
    ("gptq 4 bits", {"group_size": 64}, "group_size=64"),
    ("gptq 4 bits", {"checkpoint_format": "gptq_v2"}, "sym=true"),
    ("gptq 4 bits, zeros", {"sym": True}, "sym=true"),
    ("gptq 4 bits", {"checkpoint_format": "marlin"}, 'checkpoint_format="marlin"'),
    ("gptq 4 bits", {"quant_method": "awq"}, "stored as GPTQ"),
    ("gptq 4 bits", {"dynamic": {"-:.*up_proj": {}}}, "dynamic rule"),
    ("awq", {"group_size": 64}, "group_size=64"),
    ("awq", {"version": "gemv_fast"}, 'version="gemv_fast"'),
    ("awq", {"version": "marlin"}, 'version="marlin"'),
    ("awq", {"version": "gemv"}, "version=gemv"),
    ("awq gemv", {"version": "gemm"}, "quantization_config sets awq"),
    ("awq gemv", {"group_size": 64}, "group_size=64"),
    ("awq", {"quant_method": "gptq", "bits": 4}, "stored as AWQ"),
    ("auto-round", {"bits": 2}, "bits=2"),
    ("auto-round", {"extra_config": {NAME: {"bits": 16}}}, "extra_config"),
    ("compressed 4 bits", {"ignore": ["re:.*up_proj"]}, "from quantization"),
    ("compressed 4 bits", {"format": "marlin-24"}, 'format="marlin-24"'),
    ("compressed 4 bits", {"quant_method": "quark"}, "quant_method='quark'"),
    ("compressed 4 bits", {"num_bits": 8}, "8 bits"),
    ("compressed 4 bits", {"group_size": 64}, "group_size=64"),
    ("compressed 4 bits", {"symmetric": False}, "symmetric=false"),
    ("compressed 4 bits, zeros", {"symmetric": True}, "symmetric=true"),
    ("compressed 4 bits", {"strategy": "channel"}, "strategy=channel"),
    ("compressed int8", {"num_bits": 4}, "num_bits=4"),
    ("compressed nvfp4", {"group_size": 32}, "group_size=32"),
    ("deepseek fp8 blocks of 32", {"weight_block_size": [128, 128]}, "blocks of 128x128"),
]


@pytest.mark.parametrize(("form", "changes", "named"), CONTRADICTIONS)
def test_what_config_json_says_otherwise_is_named(tmp_path, form, changes, named):
    stored(tmp_path, form, SHAPES[0])
    quantization = FORMATS[form].quantization
    args = quantization.get(_GROUPS, {}).get("group_0", {}).get("weights", {})
    if set(changes) <= {*args, "group_size"} and args:
        group = {"targets": ["Linear"], "weights": args | changes}
        changes = {_GROUPS: {"group_0": group}}
    with pytest.raises(ModelLoadError) as error:
        served(tmp_path, form, **changes)
    assert named in str(error.value) and "\n" not in str(error.value)


def _changed(tensors, form):
    """Yields tensors of another layout with the same names, by the kind of error."""
    names = ("weight_scale_inv", "weight_scale", "scales", "scale")
    name = next(n for n in names if n in tensors)
    scale = tensors[name]
    exponents = scale.dtype == torch.uint8
    other = 254 - scale if exponents else (1 / scale.float()).to(scale.dtype)
    yield "reciprocal scale", {name: torch.where(torch.isfinite(other.float()), other, scale)}
    if scale.numel() > 1:
        axis = -1 if name != "scales" or form == "awq gemv" else 0
        axis = axis if scale.shape[axis] > 1 else 0
        yield "groups one further", {name: scale.view(torch.uint8).roll(1, 0).view(scale.dtype)}
        if scale.element_size() == 1 or scale.dtype != torch.float8_e4m3fn:
            yield "groups one further along", {name: scale.float().roll(1, axis).to(scale.dtype)}
    for name in ("weight_global_scale", "weight_scale_2"):
        if name in tensors:
            yield "reciprocal scale of the tensor", {name: 1 / tensors[name]}
    for name in ("weight_packed", "qweight", "weight"):
        if name in tensors and tensors[name].dtype in (torch.uint8, torch.int8, torch.int32):
            as_bytes = tensors[name].contiguous().view(torch.uint8)
            other = (as_bytes >> 4) | (as_bytes << 4)
            yield "nibble order", {name: other.view(tensors[name].dtype)}
    quantization = FORMATS[form].quantization
    for name in ("qzeros", "weight_zero_point"):
        if name in tensors and not quantization.get("sym", False):
            bits = quantization.get("bits") or _bits(quantization)
            words = sum(1 << (bits * place) for place in range(32 // bits))
            yield "zeros one off", {name: tensors[name] + words}


def _bits(quantization):
    return quantization[_GROUPS]["group_0"]["weights"]["num_bits"]


@pytest.mark.parametrize("form", FORMATS)
def test_another_layout_is_far_away(tmp_path, form):
    weight = weight_of(SHAPES[0])
    weight[:96] *= 8  # so that neighbors among blocks have other scales
    weight[:, 64:128] *= 8
    found = FORMATS[form].store(weight)
    # Errors of formats that are not exact are a few thousandths: 100 times that is all there is.
    far = min(100 * FORMATS[form].error, 0.3)
    for reason, changed in _changed(found.tensors, form):
        tensors = {f"{NAME}.{n}": t.contiguous() for n, t in (found.tensors | changed).items()}
        save_file(tensors, tmp_path / "model.safetensors")
        assert off(served(tmp_path, form), found.dense.numpy()) > far, reason
    # A layer that is to be left as it is.
    for key in ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules"):
        with pytest.raises(ModelLoadError, match=re.escape(NAME)):
            served(tmp_path, form, **{key: [NAME]})
