# SPDX-License-Identifier: Apache-2.0
"""vLLM accepts every published format in every dtype, and keeps MLX's own folders."""

import json

import pytest
import torch
from engine.models.test_loader import CONFIG, write
from engine.weights.published_formats import FORMATS
from vllm.engine.arg_utils import EngineArgs

from vllm_metal.platform.metal_platform import MetalPlatform


def configured(folder, said, **options):
    (folder / "config.json").write_text(json.dumps(CONFIG | said))
    args = EngineArgs(model=str(folder), skip_tokenizer_init=True, max_model_len=128, **options)
    return args.create_engine_config()


METHODS = {form.quantization["quant_method"]: form.quantization for form in FORMATS.values()}
METHODS["compressed-tensors, ordered"] = FORMATS["compressed 4 bits, ordered"].quantization
METHODS["mxfp4"] = {"quant_method": "mxfp4"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("method", METHODS)
def test_published_formats_in_every_dtype(tmp_path, method, dtype):
    config = configured(tmp_path, {"quantization_config": METHODS[method]}, dtype=dtype)
    assert config.model_config.quantization == "metal"


@pytest.mark.parametrize("method", ["awq", "gptq", "fp8"])
@pytest.mark.parametrize("stated", ["float16", "bfloat16"])
def test_the_dtype_is_by_default_that_of_config_json(tmp_path, method, stated, monkeypatch):
    monkeypatch.setattr(MetalPlatform, "mlx_device", "metal")
    said = {"quantization_config": METHODS[method], "torch_dtype": stated, "dtype": stated}
    assert configured(tmp_path, said).model_config.dtype == getattr(torch, stated)


def test_scales_of_k_and_v_do_not_choose_the_pools_dtype(tmp_path):
    quantization = METHODS["modelopt"] | {"kv_cache_quant_algo": "FP8"}
    config = configured(tmp_path, {"quantization_config": quantization})
    assert config.cache_config.cache_dtype == "auto"


def test_folders_of_mlx_have_no_method(tmp_path):
    packing = {"group_size": 64, "bits": 4}
    config = configured(tmp_path, {"quantization": packing, "quantization_config": packing})
    assert config.model_config.quantization is None


@pytest.mark.parametrize(
    ("method", "named"),
    [
        *((name, name) for name in ("bitsandbytes", "quark", "torchao", "bitnet", "hqq", "aqlm")),
        ("exl3", "exl3"),
    ],
)
def test_other_formats_are_rejected_before_weights_are_read(tmp_path, method, named):
    with pytest.raises(Exception, match=f"quant_method='{named}' is not supported") as error:
        configured(tmp_path, {"quantization_config": {"quant_method": method}})
    assert "Choose a checkpoint" in str(error.value)


def test_an_option_that_says_another_format_is_rejected(tmp_path):
    write(tmp_path)
    with pytest.raises(Exception, match="--quantization=gptq is not supported"):
        configured(tmp_path, {"quantization_config": METHODS["fp8"]}, quantization="gptq")
    with pytest.raises(Exception, match="--quantization=fp8 is not supported"):
        configured(tmp_path, {}, quantization="fp8")
