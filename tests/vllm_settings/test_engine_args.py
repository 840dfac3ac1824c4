# SPDX-License-Identifier: Apache-2.0
"""Every engine option has its effect, has no meaning here, or is rejected."""

import json
from dataclasses import fields
from operator import attrgetter
from pathlib import Path

import pytest
from patches.vllm_patches import doubles
from vllm.config import ECTransferConfig, KVEventsConfig, MultiModalConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm_settings.configured import configure
from vllm_settings.engine_args import PLACES, TABLE
from vllm_settings.row import differences, of_kind

from vllm_metal.platform import image_refusals
from vllm_metal.platform.refused_options import REFUSED_OPTIONS

ELSEWHERE = "stands for a folder with another config.json"
#: A value that each refused option is refused for.
REFUSED = {
    "data_parallel_rank": 1,
    "data_parallel_external_lb": True,
    "data_parallel_backend": "ray",
    "decode_context_parallel_size": 2,
    "distributed_executor_backend": "mp",
    "hf_config_path": ELSEWHERE,
    "quantization": "awq",
    "enable_prompt_embeds": True,
    "ec_transfer_config": ECTransferConfig(ec_connector="ECExampleConnector", ec_role="ec_both"),
    "lora_dtype": "bfloat16",
    "fully_sharded_loras": True,
    "default_mm_loras": {"image": "/somewhere"},
    "enable_tower_connector_lora": True,
    "specialize_active_lora": True,
    "enable_mixed_moe_lora_format": True,
    "enable_moe_shared_loras": True,
    "max_lora_cls_labels": 3,
    "kv_cache_dtype_skip_layers": ["0"],
    "kv_offloading_size": 1.0,
    "return_sampling_mask": True,
    "use_fp64_gumbel": True,
    "enable_trace_replay": True,
    "enable_return_routed_experts": True,
    "model_weights": "s3://bucket/model",
    "load_format": "dummy",
    "model_loader_extra_config": {"concurrency": 2},
    "ignore_patterns": ["model-00002*"],
    "config_format": "mistral",
    "code_revision": "main",
    "hf_token": "hf_none",
    "model_impl": "transformers",
    "model_class_overrides": {"OtherForCausalLM": "mine:Model"},
    "quantization_config": {"ignore": ["lm_head"]},
    "sleep_preserve_parameter_names": ["*.embed_tokens.weight"],
    "diffusion_config": {"canvas_length": 8},
    "watermark_config": {"key": 5},
    "weight_transfer_config": {"backend": "nccl"},
    "cpu_offload_gb": 1.0,
    "offload_group_size": 2,
    "prefill_context_parallel_size": 2,
    "device_ids": [0],
    "enable_elastic_ep": True,
    "enable_fault_tolerance": True,
    "mamba_cache_dtype": "float16",
    "mamba_ssm_cache_dtype": "float16",
    "enable_mamba_cache_stochastic_rounding": True,
    "mamba_block_size": 64,
    "prefix_match_unit": 8,
    "enable_mamba_shared_prefix_checkpoint": True,
    "use_replayssm": True,
}
#: Names in the error that differ from the option's.
NAMED = {
    "quantization": "--quantization=awq is not supported",
    "return_sampling_mask": "sampling distribution replay requires Model Runner V2",
    "enable_trace_replay": "trace replay requires Model Runner V2",
    "decode_context_parallel_size": r"tp_size=1 must be divisible by dcp_size=2",
    "enable_elastic_ep": "Elastic EP is only supported with",
    "enable_fault_tolerance": "Fault tolerance requires",
    "data_parallel_rank": "launch independent vLLM instances without --data-parallel",
    "data_parallel_external_lb": "launch independent vLLM instances without --data-parallel",
    "default_mm_loras": "provided for a non multimodal model",
}
#: Values that are rejected where images are served, by option.
REFUSED_WITH_IMAGES = {
    "enable_mm_embeds": True,
    "mm_encoder_only": True,
    "mm_processor_cache_type": "shm",
    "mm_tensor_ipc": "torch_shm",
    "mm_encoder_attn_backend": "TORCH_SDPA",
    "mm_encoder_attn_dtype": "fp8",
    "mm_ipc_gpu_memory_gb": 1.0,
    "skip_mm_profiling": True,
    "video_pruning_rate": 0.5,
}
#: Further options that vLLM requires with some options.
BESIDE = {
    **{field: {"enable_lora": True} for field in REFUSED if "lora" in field},
    "_api_process_rank": {"_api_process_count": 2},
    "data_parallel_rank": {"data_parallel_size": 2},
    "data_parallel_external_lb": {"data_parallel_size": 2},
    "data_parallel_backend": {"data_parallel_size": 2},
    "per_request_spec_decode_metrics": {"spec_method": "ngram", "spec_tokens": 2},
}
#: A value of each that vLLM's own code reads, as it arrives; (given, arrived) where they differ.
PASSED_ON = {
    "served_model_name": "mine",
    "tokenizer": str(Path(__file__).parents[1] / "scripted"),  # which has a vocabulary
    "tokenizer_mode": "hf",
    "tokenizer_revision": "main",
    "skip_tokenizer_init": True,
    "trust_remote_code": True,
    "revision": "main",
    "renderer_num_workers": 2,
    "download_dir": "/somewhere",
    "worker_cls": "mine.Worker",
    "worker_extension_cls": "mine.Extension",
    "_api_process_count": 2,
    "_api_process_rank": 1,
    "prefix_cache_retention_interval": 64,
    "long_prefill_token_threshold_adaptive": True,
    "enable_chunked_prefill": False,
    "scheduler_reserve_full_isl": False,
    "watermark": 0.25,
    "disable_hybrid_kv_cache_manager": True,
    "max_num_queued_reqs": 9,
    "max_num_queued_tokens": 900,
    "scheduling_policy": "priority",
    "scheduler_cls": "mine.Scheduler",
    "stream_interval": 5,
    "structured_outputs_config": ({"disable_any_whitespace": True, "backend": "xgrammar"}, True),
    "reasoning_parser_plugin": "mine.py",
    "show_hidden_metrics_for_version": "0.31",
    "otlp_traces_endpoint": "http://localhost:4317",
    "per_request_spec_decode_metrics": "summary",
    "kv_cache_metrics": True,
    "kv_cache_metrics_sample": 0.5,
    "custom_histogram_buckets": {"request_latency": [1.0, 2.0]},
    "enable_mfu_metrics": True,
    "enable_logging_iteration_details": True,
    "kv_events_config": KVEventsConfig(topic="mine"),
    "profiler_config": ({"profiler": "torch", "torch_profiler_dir": "/somewhere"}, "torch"),
    "performance_mode": "throughput",
    "shutdown_timeout": 7,
}


def test_every_field_has_a_row():
    lacking, unknown = differences(TABLE, (field.name for field in fields(AsyncEngineArgs)))
    assert not lacking, f"say in tests/vllm_settings/engine_args.py what becomes of {lacking}"
    assert not unknown, f"vLLM has no such fields: {unknown}"


def test_every_row_has_a_case():
    assert set(of_kind(TABLE, "refused")) == REFUSED.keys() | REFUSED_WITH_IMAGES.keys()
    assert PLACES.keys() == PASSED_ON.keys()


@pytest.mark.parametrize("field", REFUSED)
def test_a_refused_option_is_named(folder, elsewhere, field):
    option = "--" + field.replace("_", "-")
    value = elsewhere if REFUSED[field] is ELSEWHERE else REFUSED[field]
    model = elsewhere if field == "config_format" else folder
    with pytest.raises(ValueError, match=NAMED.get(field, option)):
        configure(model, **{field: value}, **BESIDE.get(field, {}))


@pytest.mark.parametrize("field", ["return_sampling_mask", "enable_trace_replay"])
def test_what_vllm_serves_with_its_second_runner_is_refused(folder, monkeypatch, field):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    beside = {"logprobs_mode": "processed_logprobs"}  # what vLLM asks for with a mask
    with pytest.raises(
        ValueError, match="vllm-metal does not support --" + field.replace("_", "-")
    ):
        configure(folder, **{field: True}, **beside)


@pytest.mark.more
@pytest.mark.parametrize("field", REFUSED_WITH_IMAGES)
def test_a_refused_option_of_images_is_named(reader, field, monkeypatch):
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # --mm-tensor-ipc asks for it
    given = {field: REFUSED_WITH_IMAGES[field]}
    with pytest.raises(ValueError, match="does not support --" + field.replace("_", "-")):
        configure(reader, **given)
    configure(reader, language_model_only=True, **given)


@pytest.mark.more
def test_images_are_served_unless_their_text_alone_is_asked_for(reader, monkeypatch):
    assert configure(reader).model_config.supports_multimodal_inputs
    assert not configure(reader, language_model_only=True).model_config.supports_multimodal_inputs
    monkeypatch.setattr(image_refusals, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"images without mlx-vlm \(run: .*mlx-vlm.*; or serve"):
        configure(reader)
    configure(reader, language_model_only=True)


@pytest.mark.more
def test_images_are_not_embedded(reader):
    with pytest.raises(ValueError, match="images with --runner pooling"):
        configure(reader, runner="pooling", convert="embed")
    configure(reader, runner="pooling", convert="embed", language_model_only=True)


@pytest.mark.parametrize("row", REFUSED_OPTIONS, ids=lambda row: row.field)
def test_a_value_that_asks_for_nothing_is_not_refused(folder, row):
    for value in row.allowed:
        configure(folder, **{row.field: value})


@pytest.fixture(scope="module")
def default(folder):
    return configure(folder)


@pytest.mark.parametrize("field", PASSED_ON)
def test_a_value_arrives_where_vllm_reads_it(folder, default, field):
    value = PASSED_ON[field]
    given, arrived = value if isinstance(value, tuple) else (value, value)
    place = attrgetter(PLACES[field])
    assert place(default) != arrived or field == "skip_tokenizer_init"
    assert place(configure(folder, **{field: given}, **BESIDE.get(field, {}))) == arrived


def test_what_vllm_takes_from_a_model_is_not_refused(tmp_path):
    """For Qwen3.5, vLLM sets --mamba-ssm-cache-dtype from config.json."""
    (tmp_path / "config.json").write_text(
        json.dumps(doubles.MODEL | {"mamba_ssm_dtype": "bfloat16"})
    )
    config = configure(str(tmp_path))
    config.cache_config.mamba_ssm_cache_dtype = "bfloat16"
    current_platform.check_and_update_config(config)
    config.cache_config.mamba_ssm_cache_dtype = "float16"
    with pytest.raises(ValueError, match="mamba-ssm-cache-dtype"):
        current_platform.check_and_update_config(config)


def test_shorthands_of_speculation(folder):
    config = configure(folder, spec_method="suffix", spec_tokens=3).speculative_config
    assert (config.method, config.num_speculative_tokens) == ("suffix", 3)
    config = configure(folder, spec_method="draft_model", spec_model=folder, spec_tokens=2)
    assert config.speculative_config.model == folder


def test_defaults_of_requests(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(doubles.MODEL))
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_k": 7}))

    def defaults(**options):
        return configure(str(tmp_path), **options).model_config.get_diff_sampling_param()

    assert defaults() == {"top_k": 7}
    assert defaults(generation_config="vllm") == {}
    assert defaults(override_generation_config={"top_p": 0.5}) == {"top_k": 7, "top_p": 0.5}


def test_without_windows_a_context_fits_into_one(tmp_path):
    windowed = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    config = doubles.MODEL | windowed | {"sliding_window": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    configure(str(tmp_path))
    configure(str(tmp_path), disable_sliding_window=True, max_model_len=128)
    with pytest.raises(ValueError, match="256 is longer than the model's maximum of 128 tokens"):
        configure(str(tmp_path), disable_sliding_window=True)


def test_a_text_only_checkpoint_is_served(folder):
    """The model takes images; --language-model-only serves its text alone."""
    config = configure(folder)
    config.model_config.multimodal_config = MultiModalConfig(language_model_only=True)
    current_platform.check_and_update_config(config)
    config.model_config.multimodal_config = MultiModalConfig()
    with pytest.raises(ValueError, match=r"multimodal inputs of 'llama' \(--language-model-only"):
        current_platform.check_and_update_config(config)
