# SPDX-License-Identifier: Apache-2.0
"""Models in published formats, against transformers with the stored values."""

import json

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import torch
from engine.models.published import FAMILIES, log_probabilities, make, write
from engine.weights.published_formats import FORMATS
from engine.weights.toys import (
    DENSE_IN_HY4,
    OF_FAMILY,
    PROMPT,
    SIZES,
    log_probs,
    reference_of_deepseek_v4,
    reference_of_glm5_next,
    reference_of_gpt_oss,
    reference_of_hy_v4,
    write_quantized,
)
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import SwitchLinear
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

from vllm_metal.engine.models.loader import lazy_model
from vllm_metal.engine.weights.layers import dense_rows
from vllm_metal.identity.model_files import ModelLoadError

pytestmark = pytest.mark.usefixtures("unfused")

FEW = ("llama", "deepseek_v3", "qwen3_moe")
MORE = ("qwen2", "gemma3_text", "mixtral", "glm4_moe", "phi3", "qwen3")
HYBRIDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "jamba", "nemotron_h")
#: One of each kind of packing: output scale, biases, order, dense weights beside it.
KINDS = ("fp8 rows", "compressed 4 bits, zeros", "compressed nvfp4", "gptq 4 bits, ordered")
BY_DAY = [*((family, form) for family in FEW for form in KINDS[:3]), ("llama", KINDS[3])]
CASES = [
    *(pytest.param(*case) for case in BY_DAY),
    *(  # a family's names and stacks do not depend on the format; at night all of them
        pytest.param(family, form, marks=pytest.mark.slow)
        for family in (*FEW, *MORE)
        for form in FORMATS
        if (family, form) not in BY_DAY
    ),
    *(  # vLLM's utility packs GPTQ for multiples of eight outputs, which these have not
        pytest.param(family, form, marks=pytest.mark.slow)
        for family in HYBRIDS
        for form in KINDS[:3]
    ),
]
#: Log-probabilities where MLX's packing has other values than the file, and where it is the same.
ROUNDED, EXACT = 0.1, 1e-3


def is_rounded(family, form):
    stacked = family not in ("llama", "qwen2", "qwen3", "gemma3_text", "phi3")
    return FORMATS[form].error > 1e-5 or (stacked and "ordered" in form)


@pytest.mark.parametrize(("family", "form"), CASES)
def test_log_probabilities_are_transformers(tmp_path, family, form):
    expected = write_quantized(family, form, tmp_path)
    assert expected.std() > 1
    model = lazy_model(tmp_path, mx.float32)
    found = log_probs(model)
    off = np.abs(found - expected)
    # A router that is near to a tie may choose another expert for a few of the tokens.
    assert np.median(off) < ROUNDED if is_rounded(family, form) else off.max() < EXACT
    packed = [a for _, a in tree_flatten(model.parameters()) if a.dtype == mx.uint32]
    assert packed


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
@pytest.mark.parametrize(
    "form", [*KINDS, *(pytest.param(f, marks=pytest.mark.slow) for f in FORMATS if f not in KINDS)]
)
def test_hidden_states_and_keys_keep_the_activations_dtype(tmp_path, form, dtype):
    """Scales of whole rows stay float32; those of groups do not."""
    write_quantized("llama", form, tmp_path)
    model = lazy_model(tmp_path, dtype)
    cache = make_prompt_cache(model)
    assert model.model(mx.array([[1, 5, 9]]), cache=cache).dtype == dtype
    assert {array.dtype for layer in cache for array in (layer.keys, layer.values)} == {dtype}
    if dtype != mx.float32:
        parameters = dict(tree_flatten(model.parameters()))
        kept = {name for name, array in parameters.items() if array.dtype == mx.float32}
        assert kept == {name for name in parameters if name.endswith("output_scale")}


def test_a_weight_that_is_ignored_and_dense_is_read_as_it_is(tmp_path):
    expected = write_quantized("llama", "fp8 rows", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = ["lm_head", "embed_tokens"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    np.testing.assert_allclose(log_probs(lazy_model(tmp_path, mx.float32)), expected, atol=EXACT)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_biases_that_a_layer_lacks_are_left_out_where_they_are_zero(tmp_path, value):
    expected = write_quantized("qwen3", "gptq 4 bits", tmp_path)
    path = tmp_path / "model.safetensors"
    bias = {"model.layers.0.mlp.up_proj.bias": torch.full((SIZES["intermediate_size"],), value)}
    save_file(load_file(path) | bias, path, {"format": "pt"})
    if value:
        with pytest.raises(ModelLoadError, match=r"up_proj\.bias"):
            lazy_model(tmp_path, mx.float32)
        return
    np.testing.assert_allclose(log_probs(lazy_model(tmp_path, mx.float32)), expected, atol=EXACT)


@pytest.mark.slow  # a second opinion on the reference itself
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_transformers_reads_blocks_of_fp8_so(tmp_path, family):
    # Blocks divide the weights: transformers takes others to be smaller.
    expected = write_quantized(family, "fp8 blocks of 32x64", tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        quantization_config=FineGrainedFP8Config(dequantize=True, weight_block_size=(32, 64)),
        dtype=torch.float32,
        attn_implementation="eager",
    )
    found = log_probabilities(reference.eval(), [PROMPT])[0]
    np.testing.assert_allclose(found, expected, atol=EXACT)


@pytest.mark.more
def test_hy4_as_published(tmp_path):
    """Only its projections of latents, which heads split, are dequantized."""
    expected = log_probabilities(reference_of_hy_v4(tmp_path), [PROMPT])[0]
    served = lazy_model(tmp_path, mx.float32)
    np.testing.assert_allclose(log_probs(served), expected, atol=EXACT)
    dense = (*DENSE_IN_HY4, "embed_q", "unembed_out")
    for name, array in tree_flatten(served.parameters()):
        if array.ndim > 1 and not name.endswith("scales"):
            assert (array.dtype == mx.uint32) != any(part in name for part in dense), name


@pytest.mark.more
@pytest.mark.parametrize("form", ["fp8 blocks of 128, powers of two", "compressed nvfp4"])
def test_glm5_as_published(tmp_path, form):
    """Projections that are stored apart are joined without being dequantized, and experts packed.

    The scales of these blocks are powers of two, which are read exactly.
    """
    expected = log_probabilities(reference_of_glm5_next(tmp_path, form), [PROMPT])[0]
    served = lazy_model(tmp_path, mx.float32)
    np.testing.assert_allclose(log_probs(served), expected, atol=EXACT)
    packed = {n for n, a in tree_flatten(served.parameters()) if a.dtype == mx.uint32}
    for name in (
        "self_attn.qkv_a_proj",
        "mlp.switch_mlp.up_proj",
        "mlp.shared_experts.gate_up_proj",
    ):
        assert f"language_model.model.layers.1.{name}.weight" in packed


def test_deepseek_v4_as_published(tmp_path):
    expected = log_probabilities(reference_of_deepseek_v4(tmp_path), [PROMPT])[0]
    served = lazy_model(tmp_path, mx.float32)
    assert expected.std() > 1
    np.testing.assert_allclose(log_probs(served), expected, atol=EXACT)
    layer = served.layers[2]
    found = layer.ffn.switch_mlp.up_proj, layer.ffn.shared_experts.up_proj, layer.attn.wq_b
    assert [linear.mode for linear in found] == ["mxfp4", "mxfp8", "mxfp8"]


def test_gpt_oss_as_published(tmp_path):
    expected = log_probabilities(reference_of_gpt_oss(tmp_path), [PROMPT])[0]
    served = lazy_model(tmp_path, mx.float32)
    assert expected.std() > 1
    np.testing.assert_allclose(log_probs(served), expected, atol=EXACT)
    assert served.layers[0].mlp.experts.gate_proj.mode == "mxfp4"


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_scales_of_experts_that_mlx_has_written_stay_float32(tmp_path, dtype):
    """MLX's CPU backend cannot multiply experts with NVFP4's `global_scale`."""
    write(make(FAMILIES["qwen3_moe"], **SIZES | OF_FAMILY["qwen3_moe"]), tmp_path)
    model = lazy_model(tmp_path, mx.float32)
    experts = {n: m for n, m in model.named_modules() if isinstance(m, SwitchLinear)}
    assert experts
    packing = {"group_size": 16, "bits": 4, "mode": "nvfp4"}

    def chosen(path, module):
        return packing | {"global_scale": True} if path in experts else False

    nn.quantize(model, class_predicate=chosen)
    arrays = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), arrays, {"format": "mlx"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization": packing}))
    served = lazy_model(tmp_path, dtype)
    for path, module in served.named_modules():
        if path not in experts:
            continue
        assert module.output_scale.dtype == mx.float32
        for index, weight in enumerate(dense_rows(module)):
            given = [arrays[f"{path}.{part}"][index] for part in ("weight", "scales")]
            scale = arrays[f"{path}.global_scale"][index]
            dense = mx.dequantize(*given, None, 16, 4, "nvfp4", global_scale=scale)
            assert mx.allclose(weight, dense.astype(mx.float32), atol=2e-3)
