# SPDX-License-Identifier: Apache-2.0
"""Settings that the platform rejects before a model loads."""

from pathlib import Path

import pytest
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs

LOOKUP = {"method": "ngram", "num_speculative_tokens": 2}


@pytest.fixture(scope="module")
def model():
    from vllm_metal.engine.models.embedded import embedded_model_path

    return str(embedded_model_path(dequantize=True))


def configure(model, options):
    return EngineArgs(model=model, max_model_len=256, **options).create_engine_config()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (
            {"runner": "pooling", "additional_config": {"prefix_cache_dir": "/nowhere"}},
            "prefix_cache_dir with --runner pooling",
        ),
        ({"enable_lora": True, "lora_dtype": "bfloat16"}, "--lora-dtype .*the model's"),
        ({"enable_lora": True, "fully_sharded_loras": True}, "--fully-sharded-loras"),
        ({"enable_lora": True, "runner": "pooling"}, "--enable-lora with --runner pooling"),
        ({"use_fp64_gumbel": True}, r"--use-fp64-gumbel \(.*no float64"),
        ({"enable_return_routed_experts": True}, "--enable-return-routed-experts"),
        (
            {"aux_output_config": {"enable_return_routed_experts": True}},
            "--enable-return-routed-experts",
        ),
        ({"additional_config": {"wire_memory": True}}, "wire_memory .*macOS 15 or newer"),
        ({"additional_config": {"fixed_splits": 512}}, "fixed_splits .*VLLM_METAL_KERNELS other"),
        ({"additional_config": {"prompt_lookup": True}}, "prompt_lookup .*needs a draft network"),
        (
            {"additional_config": {"prompt_lookup": True}, "speculative_config": LOOKUP},
            "prompt_lookup .*needs a draft network.*ngram drafts copies alone",
        ),
        ({"speculative_config": LOOKUP | {"draft_sample_method": "probabilistic"}}, "draft_sample"),
        ({"speculative_config": LOOKUP | {"rejection_sample_method": "block"}}, "rejection_sample"),
        (
            {"speculative_config": LOOKUP | {"enable_adaptive_verification": True}},
            r"enable_adaptive_verification \(draft lengths adapt",
        ),
        ({"speculative_config": LOOKUP | {"num_speculative_tokens": 5000}}, "leave room"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "--kv-cache-dtype fp8_e5m2 .*auto, fp8, int8"),
        ({"kv_cache_dtype": "float16"}, "incompatible with dtype=.float32.*`--kv-cache-dtype`"),
        ({"kv_cache_dtype": "nvfp4"}, "--kv-cache-dtype nvfp4 .*auto, fp8, int8"),
        ({"kv_cache_dtype_skip_layers": ["0"]}, "--kv-cache-dtype-skip-layers"),
        ({"speculative_config": LOOKUP | {"kv_cache_dtype": "fp8"}}, "kv_cache_dtype 'fp8'"),
        (
            {"kv_offloading_size": 1.0},
            r"--kv-offloading-size \(memory is unified.*prefix_cache_dir",
        ),
        (
            {"kv_offloading_size": 1.0, "kv_offloading_backend": "lmcache"},
            r"not support --kv-offloading-size \([^)]*\)$",
        ),
    ],
)
def test_what_cannot_be_honored_is_named(model, options, named):
    with pytest.raises(ValueError, match=named):
        configure(model, options)


@pytest.mark.parametrize(
    ("transfer", "named"),
    [
        (
            {"kv_connector": "NixlConnector"},
            r"--kv-transfer-config kv_connector 'NixlConnector' \(.*need CUDA.*'MetalKVConnector'",
        ),
        ({"kv_connector": "OffloadingConnector"}, "kv_connector 'OffloadingConnector' .*CUDA"),
        (
            {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": []}},
            r"kv_connector 'MultiConnector' \(it combines connectors.*'MetalKVConnector'",
        ),
        ({"kv_connector": "MyConnector", "kv_connector_module_path": "mine"}, "'MyConnector'"),
        ({"kv_connector": None}, r"--kv-transfer-config without kv_connector \(.*'MetalKVConn"),
        (
            {"kv_connector": "MetalKVConnector", "kv_connector_module_path": "mine"},
            "kv_connector_module_path 'mine'",
        ),
        (
            {"kv_connector": "MetalKVConnector", "enable_permute_local_kv": True},
            "enable_permute_local_kv",
        ),
    ],
)
def test_connectors_that_cannot_be_honored_are_named(model, transfer, named):
    config = KVTransferConfig(**({"kv_role": "kv_both"} | transfer))
    with pytest.raises(ValueError, match=named):
        configure(model, {"kv_transfer_config": config})


def test_fixed_splits_are_for_kernels(model, monkeypatch):
    options = {"additional_config": {"fixed_splits": 512}}
    monkeypatch.setenv("VLLM_METAL_KERNELS", "interpret")
    configure(model, options)
    monkeypatch.setenv("VLLM_METAL_DEVICE", "metal")
    monkeypatch.setenv("VLLM_METAL_KERNELS", "mlx")
    with pytest.raises(ValueError, match="not support --additional-config fixed_splits"):
        configure(model, options)


def test_batch_invariance_is_not_promised(model, monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(ValueError, match=r"not support VLLM_BATCH_INVARIANT \(.*rounding"):
        configure(model, {})
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    configure(model, {})


def test_a_configuration_of_elsewhere_is_refused(model, tmp_path):
    configure(model, {"hf_config_path": model})
    (tmp_path / "config.json").write_text(Path(model, "config.json").read_text())
    with pytest.raises(ValueError, match=r"--hf-config-path \(mlx-lm reads"):
        configure(model, {"hf_config_path": str(tmp_path)})


def test_all_that_cannot_be_honored_is_named_at_once(model):
    options = {"enable_lora": True, "fully_sharded_loras": True, "kv_cache_dtype": "nvfp4"}
    named = "not support --fully-sharded-loras, --kv-cache-dtype nvfp4 "
    with pytest.raises(ValueError, match=named):
        configure(model, options)
