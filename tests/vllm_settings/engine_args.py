# SPDX-License-Identifier: Apache-2.0
"""The effect of each field of `EngineArgs` and `AsyncEngineArgs`."""

from vllm_settings.row import honored, passed_on, read_by_vllm, refused, union, without_meaning

from vllm_metal.platform.image_refusals import REFUSED_OF_IMAGES
from vllm_metal.platform.refused_options import REFUSED_OPTIONS

_PROCESSORS = (
    "engine/sample/test_custom.py::"
    "test_processor_follows_requests_through_adds_removes_and_reorderings"
)
_HONORED = honored(
    {
        "e2e/test_equality.py::test_without_prefix_caching": "model",
        "e2e/test_limits.py::test_generation_stops_at_max_model_len": "max_model_len",
        "e2e/test_limits.py::test_the_pool_is_what_is_left_of_the_devices_share": (
            "gpu_memory_utilization"
        ),
        "e2e/test_limits.py::test_a_pool_too_small_for_one_request_names_the_length_that_fits": (
            "kv_cache_memory_bytes"
        ),
        "e2e/test_logprobs.py::test_prompt_logprobs_come_once_though_the_request_is_preempted": (
            "num_gpu_blocks_override"
        ),
        "e2e/test_logprobs.py::test_a_prompt_has_what_logprobs_mode_says": "logprobs_mode",
        "e2e/test_logprobs.py::test_none_and_all": "max_logprobs",
        "e2e/test_pipeline.py::test_two_ranks": "pipeline_parallel_size",
        "e2e/test_tensor_parallel.py::test_ngram_speculation_is_lossless": "tensor_parallel_size",
        "e2e/test_rank_hosts.py::test_a_rank_on_each_of_two_hosts": (
            "nnodes node_rank master_addr master_port"
        ),
        "engine/distributed/test_groups.py::test_timeouts_are_the_users_or_minutes": (
            "distributed_timeout_seconds cpu_distributed_timeout_seconds"
        ),
        "engine/models/test_loader.py::test_an_explicit_dtype_is_honored": "dtype",
        "engine/models/test_loader.py::test_overrides_of_the_configuration_reach_the_model": (
            "hf_overrides"
        ),
        "e2e/test_quantized_cache.py::test_a_token_takes_its_codes_and_two_bytes_a_row": (
            "kv_cache_dtype"
        ),
        "e2e/test_scores.py::test_a_reranker_compares_two_tokens_of_its_head": "runner",
        "engine/pooling/test_refusals.py::"
        "test_an_architecture_says_what_a_decoder_is_for": "convert",
        "engine/pooling/test_refusals.py::test_a_way_of_pooling_that_its_user_names_counts": (
            "pooler_config"
        ),
        "engine/sample/test_sampler.py::test_engine_seed_decides_unseeded_draws": "seed",
        _PROCESSORS: "logits_processors",
        "e2e/test_prefix_cache.py::test_every_prompt_length_around_block_boundaries": (
            "block_size enable_prefix_caching"
        ),
        "platform/test_metal_platform.py::test_explicit_settings_win_over_the_defaults": (
            "max_num_seqs max_num_batched_tokens async_scheduling"
        ),
        "kv_transfer/test_config.py::test_weak_hashes_are_refused": "prefix_caching_hash_algo",
        "kv_transfer/test_config.py::test_the_short_way_and_vllm_s_are_the_same": (
            "kv_transfer_config additional_config"
        ),
        "e2e/test_speculation.py::test_every_method_and_number_of_drafts": "speculative_config",
        "e2e/test_sleep.py::test_memory_comes_back_and_answers_stay": "enable_sleep_mode",
        "e2e/test_metrics.py::test_each_step_has_its_figures": "disable_log_stats",
        "vllm_settings/test_engine_args.py::test_shorthands_of_speculation": (
            "spec_method spec_model spec_tokens"
        ),
        "vllm_settings/test_engine_args.py::test_without_windows_a_context_fits_into_one": (
            "disable_sliding_window"
        ),
        "vllm_settings/test_engine_args.py::test_a_text_only_checkpoint_is_served": (
            "language_model_only"
        ),
        "e2e/test_images.py::test_limits_and_other_media_are_named": "limit_mm_per_prompt",
        "e2e/test_images.py::test_nothing_else_is_fetched": (
            "allowed_local_media_path allowed_media_domains"
        ),
        "e2e/test_parameters.py::test_a_limit_of_the_scheduler_holds": (
            "max_num_scheduled_tokens max_num_active_seqs long_prefill_token_threshold"
        ),
        "e2e/test_lora.py::test_adapters_and_none_in_one_batch_are_what_peft_computes": (
            "enable_lora"
        ),
        "e2e/test_lora.py::test_drafts_are_lossless_and_more_adapters_than_slots_take_turns": (
            "max_loras max_cpu_loras"
        ),
        "engine/lora/test_adapter.py::test_a_rank_above_the_largest_is_refused": "max_lora_rank",
        "engine/lora/test_updates.py::"
        "test_only_named_modules_are_adapted_and_memory_is_what_is_said": "lora_target_modules",
        "e2e/test_replicas.py::test_two_hosts_answer_as_one_process": (
            "data_parallel_size data_parallel_size_local data_parallel_start_rank "
            "data_parallel_address data_parallel_rpc_port"
        ),
        "e2e/test_replicas_of_hosts.py::test_each_host_of_two_ranks_answers_its_own_clients": (
            "data_parallel_hybrid_lb"
        ),
        "vllm_settings/test_engine_args.py::test_defaults_of_requests": (
            "generation_config override_generation_config"
        ),
    }
)

#: Configuration fields read by vLLM's server, scheduler, tokenizer and logging.
PLACES = {
    "served_model_name": "model_config.served_model_name",
    "tokenizer": "model_config.tokenizer",
    "tokenizer_mode": "model_config.tokenizer_mode",
    "tokenizer_revision": "model_config.tokenizer_revision",
    "skip_tokenizer_init": "model_config.skip_tokenizer_init",
    "trust_remote_code": "model_config.trust_remote_code",
    "revision": "model_config.revision",
    "renderer_num_workers": "model_config.renderer_num_workers",
    "download_dir": "load_config.download_dir",
    "worker_cls": "parallel_config.worker_cls",
    "worker_extension_cls": "parallel_config.worker_extension_cls",
    "_api_process_count": "parallel_config._api_process_count",
    "_api_process_rank": "parallel_config._api_process_rank",
    "prefix_cache_retention_interval": "cache_config.prefix_cache_retention_interval",
    "long_prefill_token_threshold_adaptive": (
        "scheduler_config.long_prefill_token_threshold_adaptive"
    ),
    "enable_chunked_prefill": "scheduler_config.enable_chunked_prefill",
    "scheduler_reserve_full_isl": "scheduler_config.scheduler_reserve_full_isl",
    "watermark": "scheduler_config.watermark",
    "disable_hybrid_kv_cache_manager": "scheduler_config.disable_hybrid_kv_cache_manager",
    "max_num_queued_reqs": "scheduler_config.max_num_queued_reqs",
    "max_num_queued_tokens": "scheduler_config.max_num_queued_tokens",
    "scheduling_policy": "scheduler_config.policy",
    "scheduler_cls": "scheduler_config.scheduler_cls",
    "stream_interval": "scheduler_config.stream_interval",
    "structured_outputs_config": "structured_outputs_config.disable_any_whitespace",
    "reasoning_parser_plugin": "structured_outputs_config.reasoning_parser_plugin",
    "show_hidden_metrics_for_version": "observability_config.show_hidden_metrics_for_version",
    "otlp_traces_endpoint": "observability_config.otlp_traces_endpoint",
    "per_request_spec_decode_metrics": "observability_config.per_request_spec_decode_metrics",
    "kv_cache_metrics": "observability_config.kv_cache_metrics",
    "kv_cache_metrics_sample": "observability_config.kv_cache_metrics_sample",
    "custom_histogram_buckets": "observability_config.custom_histogram_buckets",
    "enable_mfu_metrics": "observability_config.enable_mfu_metrics",
    "enable_logging_iteration_details": "observability_config.enable_logging_iteration_details",
    "kv_events_config": "kv_events_config",
    "profiler_config": "profiler_config.profiler",
    "performance_mode": "performance_mode",
    "shutdown_timeout": "shutdown_timeout",
}

_READ_BEFORE = read_by_vllm(
    {
        "vLLM's own code reads it, before it makes a configuration": (
            "fail_on_environ_validation tokens_only enable_log_requests logging_config log_level "
            "log_config_file reasoning_parser aggregate_engine_logging watchdog_config"
        ),
        "vLLM starts a server a rank with --data-parallel-rank, which is refused": (
            "data_parallel_multi_port_external_lb"
        ),
        "vLLM's own code reads it, of images": (
            "interleave_mm_strings media_io_kwargs mm_processor_kwargs mm_processor_cache_gb "
            "mm_hasher_algorithm mm_processor_device enable_mm_processor_stats "
            "disable_chunked_mm_input"
        ),
    }
)

_WITHOUT_MEANING = without_meaning(
    {
        "only used with --decode-context-parallel-size, which is rejected, or by ranks "
        "that run in lockstep": (
            "dcp_comm_backend dcp_q_replicate "
            "dcp_kv_cache_interleave_size cp_kv_cache_interleave_size dp_sync_interval "
            "disable_nccl_for_dp_synchronization disable_custom_all_reduce "
            "enable_shm_tensor_arena max_parallel_loading_workers ray_workers_use_nsight "
            "prefill_schedule_interval elastic_ep_max_dp_size "
            "fault_tolerance_config enable_hc_sp enable_batch_sharded_sampling"
        ),
        "the one device holds all experts": (
            "enable_expert_parallel enable_ep_weight_filter all2all_backend eplb_config "
            "enable_eplb expert_placement_strategy"
        ),
        "a Mac has one memory node": "numa_bind numa_bind_nodes numa_bind_cpus",
        "it selects one of vLLM's kernels, which do not run here": (
            "moe_backend linear_backend sparse_indexer_topk_backend attention_backend "
            "attention_config kernel_config monokernel enable_flashinfer_autotune mamba_backend "
            "mamba_ssu_algorithm mamba_config gdn_prefill_backend kda_prefill_backend "
            "kda_decode_backend kv_sharing_fast_prefill swa_bounded_replay "
            "disable_cascade_attn enable_dbo ubatch_size dbo_decode_token_threshold "
            "dbo_prefill_token_threshold"
        ),
        "for torch.compile and CUDA graphs; MLX compiles by itself": (
            "cudagraph_capture_sizes max_cudagraph_capture_size ir_op_priority enforce_eager "
            "compilation_config optimization_level cudagraph_metrics "
            "enable_layerwise_nvtx_tracing jit_monitor_mode jit_monitor_verbose "
            "sleep_mode_offload_cudagraph collect_detailed_traces"
        ),
        "vLLM always uses `align` with prefix caching and `none` without": "mamba_cache_mode",
        "unified memory: there is one place for embedding tables": "engram_config",
        "for CUDA's allocator, or NCCL": (
            "sleep_mode_backend enable_cumem_allocator enable_nccl_comm_suspend"
        ),
        "mlx-lm reads the weights": (
            "safetensors_load_strategy safetensors_prefetch_num_threads "
            "safetensors_prefetch_block_size use_tqdm_on_load pt_load_map_location"
        ),
        "only used with --mm-processor-cache-type shm, which is rejected": (
            "mm_shm_cache_max_object_size_mb"
        ),
        "only used with --mm-encoder-attn-dtype, which is rejected": (
            "mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path "
            "mm_encoder_fp8_scale_save_margin"
        ),
        "only used with --video-pruning-rate, which is rejected": "video_pruning_method",
        "one device computes the vision tower": "mm_encoder_tp_mode",
        "vLLM turns it off with a warning: pixels arrive normalized": "mm_device_do_normalize",
        "only used with --ec-transfer-config, which is rejected": "ec_manager_config",
        "only used with --cpu-offload-gb and --offload-group-size, which are rejected": (
            "offload_backend cpu_offload_params offload_num_in_group offload_prefetch_step "
            "offload_params"
        ),
        "only used with --kv-offloading-size, which is rejected": "kv_offloading_backend",
        "only used with --quantization, which is rejected": "allow_deprecated_quantization",
        "only used with --use-replayssm, which is rejected": "replayssm_buffer_len",
        "only used with --enable-mamba-cache-stochastic-rounding, which is rejected": (
            "mamba_cache_philox_rounds"
        ),
        "only used with --enable-return-routed-experts, which is rejected": "aux_output_config",
        "for pooling models, and rejected with --runner pooling": "io_processor_plugin",
        "only used by `thinking_token_budget`, which is rejected": "reasoning_config",
    }
)

_REFUSED = union(
    (
        refused(
            {
                "there is one device": "decode_context_parallel_size",
                "leave it out; with pipeline parallel, `mp` and `ray` are accepted": (
                    "distributed_executor_backend"
                ),
                "a rank is a whole engine: start independent servers": (
                    "data_parallel_rank data_parallel_external_lb"
                ),
                "start remote ranks on their machines, with --headless": "data_parallel_backend",
                "mlx-lm reads the config.json beside the weights": "hf_config_path",
                "use a checkpoint that is quantized, of any format": "quantization",
                "only tokens are accepted as input": "enable_prompt_embeds ec_transfer_config",
                "adapters use the model's dtype": "lora_dtype",
                "adapters are supported for linear layers of the text model only": (
                    "default_mm_loras enable_tower_connector_lora max_lora_cls_labels"
                ),
                "for vLLM's kernels": "fully_sharded_loras specialize_active_lora",
                "both formats are read without it": "enable_mixed_moe_lora_format",
                "each expert has matrices of its own": "enable_moe_shared_loras",
                "recurrent states are stored in blocks of --block-size": "mamba_block_size",
                "all layers of a model share one format": "kv_cache_dtype_skip_layers",
                "memory is unified; `prefix_cache_dir` keeps K/V on disk": "kv_offloading_size",
            }
        ),
        *(refused({row.reason: row.field}) for row in REFUSED_OPTIONS),
        *(refused({why: field}) for field, why in REFUSED_OF_IMAGES.values()),
    )
)

TABLE = union((_HONORED, passed_on(PLACES), _READ_BEFORE, _WITHOUT_MEANING, _REFUSED))
