# SPDX-License-Identifier: Apache-2.0
"""Selects vLLM's tests that run with this platform; gives reasons for the others.

Paths are relative to ``tests/v1`` of vLLM's source archive.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

#: Scheduler, block pool and prefix cache: run by `make test-more`.
QUICK = (
    "core/prefix_cache/test_mamba_eagle_resume_checkpoint.py",
    "core/prefix_cache/test_partial_prefix_cache_hits.py",
    "core/prefix_cache/test_partial_prefix_cache_primitives.py",
    "core/test_async_scheduler.py",
    "core/test_contiguous_kv_packing.py",
    "core/test_deferred_block_free.py",
    "core/test_encoder_cache_manager.py",
    "core/test_kv_cache_config_builder.py",
    "core/test_kv_cache_metrics.py",
    "core/test_kv_cache_planning.py",
    "core/test_kv_cache_utils.py",
    "core/test_kv_sharing.py",
    "core/test_mamba_align_chunk_split.py",
    "core/test_output.py",
    "core/test_prefix_caching.py",
    "core/test_prefix_replay.py",
    "core/test_priority_preemption_bug.py",
    "core/test_priority_scheduler_random.py",
    "core/test_repetition_detection.py",
    "core/test_scheduler.py",
    "core/test_single_type_kv_cache_manager.py",
    "core/test_swa_inflight_window_free.py",
    "core/test_worker_slot_overflow.py",
)

#: Run by `make vllm-tests`.
RUN = (
    *QUICK,
    "core/test_reset_prefix_cache_e2e.py",
    "core/test_scheduler_e2e.py",
    "engine/test_admission_control.py",
    "engine/test_engine_args.py",
    "engine/test_engine_core_shutdown_signal.py",
    "engine/test_init_error_messaging.py",
    "engine/test_input_processor_trace_replay.py",
    "engine/test_iteration_logging.py",
    "engine/test_kv_cache_group_metadata.py",
    "engine/test_kv_transfer_rejection.py",
    "engine/test_llm_engine_finalizer_is_weak.py",
    "engine/test_logprobs_processor.py",
    "engine/test_output_processor.py",
    "engine/test_parallel_sampling.py",
    "engine/test_preprocess_error_handling.py",
    "engine/test_startup_watch_processes.py",
    "engine/test_wake_up_contract.py",
    "executor/test_executor.py",
    "executor/test_multiproc_executor.py",
    "executor/test_multiproc_executor_timeout.py",
    "executor/test_vllm_net_devices.py",
    "kv_connector/unit/offloading_connector/test_canonical_mapping.py",
    "kv_connector/unit/offloading_connector/test_config.py",
    "kv_connector/unit/offloading_connector/test_events.py",
    "kv_connector/unit/offloading_connector/test_metrics.py",
    "kv_connector/unit/offloading_connector/test_scheduler.py",
    "kv_connector/unit/offloading_connector/test_worker.py",
    "kv_connector/unit/offloading_connector/test_worker_metadata.py",
    "kv_connector/unit/test_cache_pollution_prevention.py",
    "kv_connector/unit/test_config.py",
    "kv_connector/unit/test_decode_bench_connector.py",
    "kv_connector/unit/test_error_propagation.py",
    "kv_connector/unit/test_handshake_pp_aggregation.py",
    "kv_connector/unit/test_hidden_states_connector.py",
    "kv_connector/unit/test_hma_auto_config.py",
    "kv_connector/unit/test_invalid_blocks_correctness.py",
    "kv_connector/unit/test_kv_connector_lifecycle.py",
    "kv_connector/unit/test_kv_load_failure_recovery.py",
    "kv_connector/unit/test_multi_connector.py",
    "kv_connector/unit/test_nixl_simple_cpu_offload.py",
    "kv_connector/unit/test_output_aggregator.py",
    "kv_connector/unit/test_remote_decode_lifecycle.py",
    "kv_connector/unit/test_remote_prefill_lifecycle.py",
    "kv_connector/unit/test_scheduler_kv_connector_override.py",
    "kv_connector/unit/test_simple_cpu_offload_connector.py",
    "kv_connector/unit/test_simple_cpu_offload_metrics.py",
    "kv_connector/unit/test_transfer_topology_sharded.py",
    "kv_offload/cpu/policies/test_factory.py",
    "kv_offload/cpu/test_canonical_layout.py",
    "kv_offload/cpu/test_capacity.py",
    "kv_offload/cpu/test_manager.py",
    "kv_offload/test_factory.py",
    "kv_offload/test_file_mapper.py",
    "kv_offload/tiering/test_async_lookup.py",
    "kv_offload/tiering/test_backpressure.py",
    "kv_offload/tiering/test_factory.py",
    "kv_offload/tiering/test_fs_tier.py",
    "kv_offload/tiering/test_metrics.py",
    "kv_offload/tiering/test_tier_poll_thread.py",
    "kv_offload/tiering/test_tiering_offloading.py",
    "logits_processors/test_correctness.py",
    "logits_processors/test_loader.py",
    "metrics/test_engine_logger_apis.py",
    "metrics/test_histogram_buckets.py",
    "metrics/test_metrics_reader.py",
    "metrics/test_perf_metrics.py",
    "metrics/test_stats.py",
    "sample/test_batched_count_greater_than.py",
    "sample/test_dry.py",
    "sample/test_head_dtype.py",
    "sample/test_logprobs.py",
    "sample/test_sampler.py",
    "sample/test_sampling_params_e2e.py",
    "sample/test_thinking_budget_state.py",
    "sample/test_topk_topp_sampler.py",
    "sample/test_trace_replay_params.py",
    "shutdown/test_processor_error.py",
    "simple_kv_offload/test_kv_events.py",
    "simple_kv_offload/test_scheduler.py",
    "spec_decode/test_dynamic_sd.py",
    "spec_decode/test_mtp_structured_output.py",
    "spec_decode/test_request_acceptance.py",
    "streaming_input/test_async_llm_streaming.py",
    "streaming_input/test_scheduler_streaming.py",
    "structured_output/test_backend_guidance.py",
    "structured_output/test_backend_outlines.py",
    "structured_output/test_backend_xgrammar.py",
    "structured_output/test_backend_xgrammar_lark.py",
    "structured_output/test_backend_xgrammar_plamo3.py",
    "structured_output/test_guidance_negative_draft_tokens.py",
    "structured_output/test_outlines_cache.py",
    "structured_output/test_regex_compilation_timeout.py",
    "structured_output/test_request.py",
    "structured_output/test_scheduler_speculative_padding.py",
    "structured_output/test_structured_output_manager.py",
    "test_oracle.py",
    "test_outputs.py",
    "test_request.py",
    "test_serial_utils.py",
)


@dataclass(frozen=True)
class LeftOut:
    """Tests with unmet requirements.

    Attributes:
        reason: the requirement.
        files: whole files, or folders of them.
        tests: functions, classes or parameter sets in files that run.
    """

    reason: str
    files: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()


LEFT_OUT = (
    LeftOut(
        "kernels and copies of vLLM's own for GPUs: CUDA, ROCm and Triton",
        files=(
            "attention",
            "cudagraph",
            "determinism",
            "kv_offload/cpu/test_gpu_worker.py",
            "kv_offload/cpu/test_swap_blocks_batch.py",
            "kv_offload/cpu/test_swap_blocks_triton.py",
            "sample/test_diffusion_gemma_reads.py",
            "sample/test_diffusion_sampler_stats.py",
            "sample/test_rejection_sampler.py",
            "simple_kv_offload/test_hip_mem_ops.py",
            "simple_kv_offload/test_worker.py",
        ),
        tests=(
            "sample/test_dry.py::test_v2_batch_sharded_sampling_matches_unsharded",
            "test_outputs.py::test_sampling_mask_tensors_match_finite_support",
            "test_outputs.py::test_sampling_mask_matches_processed_top_k_top_p_support",
            "test_outputs.py::test_sampling_mask_tensors_uses_request_boundaries",
            "test_outputs.py::test_sampling_mask_tensors_multirow_request_layout",
            "test_outputs.py::test_sampling_mask_preserves_top_k_boundary_ties",
        ),
    ),
    LeftOut(
        "vLLM's own GPU runner and workers, where this platform has its own",
        files=(
            "worker",
            "streaming_input/test_gpu_model_runner_streaming.py",
            "streaming_input/test_gpu_model_runner_v2_streaming.py",
        ),
    ),
    LeftOut(
        "proposers and verification of vLLM's own GPU runner",
        files=(
            "spec_decode/test_acceptance_estimator.py",
            "spec_decode/test_acceptance_length.py",
            "spec_decode/test_adaptive_verification.py",
            "spec_decode/test_dflash2.py",
            "spec_decode/test_dflash_causality.py",
            "spec_decode/test_dflash_lookahead.py",
            "spec_decode/test_dflash_prepare_inputs.py",
            "spec_decode/test_dflash_profile.py",
            "spec_decode/test_draft_attention_backend_override.py",
            "spec_decode/test_draft_moe_backend_override.py",
            "spec_decode/test_dspark_topk.py",
            "spec_decode/test_dsv4_mtp_local_argmax.py",
            "spec_decode/test_dynamic_sd_cug.py",
            "spec_decode/test_eagle.py",
            "spec_decode/test_eagle_draft_attn_metadata.py",
            "spec_decode/test_eagle_step_kernel.py",
            "spec_decode/test_extract_hidden_states.py",
            "spec_decode/test_lilicorr.py",
            "spec_decode/test_llm_base_proposer.py",
            "spec_decode/test_llm_base_proposer_sampling.py",
            "spec_decode/test_max_len.py",
            "spec_decode/test_mtp.py",
            "spec_decode/test_ngram.py",
            "spec_decode/test_ngram_gpu.py",
            "spec_decode/test_rejection_sampler_utils.py",
            "spec_decode/test_speculators_correctness.py",
            "spec_decode/test_speculators_eagle3.py",
            "spec_decode/test_synthetic_rejection_sampler_utils.py",
            "spec_decode/test_vocab_mapping.py",
            "spec_decode/test_xpress_head.py",
        ),
    ),
    LeftOut(
        "another connector's way of moving K/V, which the platform refuses: NIXL, Mooncake, "
        "MoRI-IO, LMCache, 3FS, FlexKV, HiSparse, KVCR, UMBP",
        files=(
            "kv_connector/mooncake_integration",
            "kv_connector/moriio_integration",
            "kv_connector/nixl_integration",
            "kv_connector/unit/test_bidirectional_kv_transfer.py",
            "kv_connector/unit/test_flexkv_connector.py",
            "kv_connector/unit/test_hf3fs_client.py",
            "kv_connector/unit/test_hf3fs_connector.py",
            "kv_connector/unit/test_hf3fs_metadata_server.py",
            "kv_connector/unit/test_hisparse_connector.py",
            "kv_connector/unit/test_hisparse_stats.py",
            "kv_connector/unit/test_lmcache_connector.py",
            "kv_connector/unit/test_lmcache_integration.py",
            "kv_connector/unit/test_mooncake_connector.py",
            "kv_connector/unit/test_mooncake_connector_hma.py",
            "kv_connector/unit/test_mooncake_connector_hybrid_mamba.py",
            "kv_connector/unit/test_mooncake_proxy.py",
            "kv_connector/unit/test_mooncake_stats.py",
            "kv_connector/unit/test_mooncake_store_connector.py",
            "kv_connector/unit/test_mooncake_store_coordinator.py",
            "kv_connector/unit/test_mooncake_store_hma_e2e.py",
            "kv_connector/unit/test_mooncake_store_layout.py",
            "kv_connector/unit/test_mooncake_store_scheduler.py",
            "kv_connector/unit/test_mooncake_store_worker.py",
            "kv_connector/unit/test_moriio_connector.py",
            "kv_connector/unit/test_moriio_hetero_tp_write.py",
            "kv_connector/unit/test_moriio_hma_scheduler.py",
            "kv_connector/unit/test_moriio_kv_layout.py",
            "kv_connector/unit/test_moriio_proxy_routing.py",
            "kv_connector/unit/test_moriio_read_tp.py",
            "kv_connector/unit/test_moriio_routing.py",
            "kv_connector/unit/test_moriio_routing_fairness.py",
            "kv_connector/unit/test_moriio_toy_proxy_server.py",
            "kv_connector/unit/test_moriio_tp_mapping.py",
            "kv_connector/unit/test_moriio_tp_ack.py",
            "kv_connector/unit/test_moriio_transfer_completion.py",
            "kv_connector/unit/test_moriio_unmap.py",
            "kv_connector/unit/test_moriio_write_done_routing.py",
            "kv_connector/unit/test_nixl_connector.py",
            "kv_connector/unit/test_nixl_connector_hma.py",
            "kv_connector/unit/test_nixl_desc_geometry.py",
            "kv_connector/unit/test_nixl_heartbeat.py",
            "kv_connector/unit/test_nixl_push_connector.py",
            "kv_connector/unit/test_nixl_rocm_gpu_mem_diag.py",
            "kv_connector/unit/test_tp_mapping.py",
            "kv_connector/unit/test_umbp_async_lookup.py",
            "kv_connector/unit/test_umbp_core.py",
            "kv_connector/unit/test_umbp_events.py",
            "kv_connector/unit/test_umbp_hybrid.py",
            "kv_offload/tiering/p2p",
            "kv_offload/tiering/test_kvcr_tier.py",
            "kv_offload/tiering/test_obj_tier.py",
        ),
    ),
    LeftOut(
        "an engine with a connector of vLLM's, which the platform refuses",
        files=(
            "kv_connector/extract_hidden_states_integration",
            "kv_connector/unit/test_example_connector.py",
            "kv_connector/unit/test_offloading_connector.py",
            "simple_kv_offload/test_integration.py",
        ),
        tests=(
            "kv_connector/unit/test_multi_connector.py::test_multi_example_connector_consistency",
        ),
    ),
    LeftOut(
        "memory shared as a file in /dev/shm, which macOS does not have",
        files=("kv_offload/cpu/test_shared_offload_region.py",),
    ),
    LeftOut(
        "several workers, which the platform refuses, or Ray, which is not installed",
        files=(
            "distributed",
            "fault_tolerance",
            "engine/test_core_engine_actor_manager.py",
            "engine/test_dp_placement_node_allowlist.py",
            "engine/test_dp_world_group_port.py",
        ),
        tests=(
            "core/test_kv_cache_planning.py::test_kv_tp_replicas",
            "core/test_scheduler.py::test_async_scheduling_pp_allows_rescheduling_with_output_placeholders",
            "engine/test_engine_args.py::test_data_parallel_start_rank_zero_infers_hybrid_lb",
            "engine/test_engine_args.py::test_external_lb_preserves_explicit_rank_when_dp_exceeds_nodes",
            "engine/test_engine_args.py::test_external_lb_infers_rank_when_dp_does_not_exceed_nodes",
            "spec_decode/test_dynamic_sd.py::test_dynamic_sd_is_disabled_with_data_parallel",
            "engine/test_engine_args.py::test_external_lb_infers_rank_for_multinode_replicas",
        ),
    ),
    LeftOut(
        "multimodal inputs, which the platform refuses; connectors of encoder caches with them",
        files=(
            "ec_connector",
            "test_tensor_ipc_queue.py",
        ),
        tests=(
            "core/test_priority_scheduler_random.py::test_priority_scheduling_blast",
            "core/test_scheduler.py::test_schedule_multimodal_requests",
            "core/test_scheduler.py::test_schedule_partial_requests",
            "core/test_scheduler.py::test_encoder_only_prompt_longer_than_budget_is_chunked",
            "core/test_scheduler.py::test_same_step_duplicate_encoder_input_stays_cached",
            "core/test_scheduler.py::test_no_mm_input_chunking",
            "core/test_scheduler.py::test_no_mm_input_chunking_at_item_boundary",
            "core/test_scheduler.py::test_waiting_encoder_stall_does_not_starve_later_requests",
            "core/test_scheduler.py::test_waiting_encoder_stall_is_counted_as_deferred",
            "core/test_scheduler.py::test_waiting_encoder_stall_kv_holder_keeps_drain_priority",
            "core/test_scheduler.py::test_cpu_encoder_input_updates_wait_for_completed_prefill",
            "core/test_scheduler.py::test_cpu_encoder_input_updates_resume_and_abort",
            "core/test_scheduler.py::test_cpu_encoder_input_updates_restore_after_kv_load_failure",
            "core/test_scheduler.py::test_cpu_encoder_input_updates_preserve_shm_handles",
            "core/test_scheduler.py::test_ec_connector_waits_for_embeddings_in_prefix_replay",
            "core/test_scheduler.py::test_no_mm_input_chunking_for_same_step_duplicate",
            "core/test_scheduler.py::test_ec_connector_text_only_request",
            "core/test_scheduler.py::test_ec_connector_cache_hit_external_load",
            "core/test_scheduler.py::test_ec_connector_cache_miss_computes_locally",
            "core/test_scheduler.py::test_ec_connector_with_partial_cache_hit_multi_round",
            "core/test_scheduler.py::test_ec_connector_schedule_multiple_requests",
            "core/test_scheduler.py::test_ec_connector_unable_to_allocate",
            "core/test_scheduler.py::test_priority_scheduling_ec_connector_preemption_and_resumption",
            "core/test_scheduler.py::test_ec_connector_allocate_encoder_tokens_with_external_load",
            "core/test_scheduler.py::test_ec_connector_update_connector_output_called",
            "core/test_scheduler.py::test_eagle3_mm_encoder_cache_with_shift",
            "core/test_scheduler.py::test_free_encoder_inputs_respects_unconfirmed_placeholders",
            "core/test_scheduler.py::test_free_encoder_inputs_notifies_the_ec_connector",
            "core/test_scheduler.py::test_unavailable_encoder_input_fails_the_request_as_retryable",
            "core/test_scheduler.py::test_encoder_cache_accepts_matching_embed_count",
            "core/test_scheduler.py::test_encoder_cache_rejects_mismatched_embed_count",
            "core/test_scheduler.py::test_encoder_cache_embed_count_mismatch_restores_prior_hit_state",
            "core/test_scheduler.py::test_encoder_cache_rejects_mismatched_embed_count_within_request",
            "core/test_scheduler.py::test_free_encoder_inputs_unchanged_without_spec_decode",
            "core/test_scheduler.py::test_encoder_cache_retained_across_preemption_and_resume",
            "core/test_scheduler.py::test_encoder_cache_recomputed_when_evicted_during_preemption",
            "core/test_scheduler.py::test_ec_connector_ensure_cache_available_defers_request",
            "core/test_scheduler.py::test_ec_connector_defers_running_request_for_async_reload",
            "core/test_scheduler.py::test_encoder_instance_defers_stop_until_prompt_is_consumed",
            "core/test_scheduler.py::test_encoder_instance_finishes_request_once_prompt_is_consumed",
            "core/test_scheduler.py::test_encoder_input_skipped_when_connector_already_has_the_item[ec_producer]",
        ),
    ),
    LeftOut(
        "a setting the platform refuses or reads otherwise: block sizes, K/V formats, "
        "--kv-offloading-size, prompt_logprob_token_ids, pooling, parallel drafting",
        files=("test_kv_cache_spec_registry.py",),
        tests=(
            "core/test_scheduler.py::test_pooling_chunked_prefill_can_finish_at_max_model_len",
            "core/test_scheduler.py::test_scheduler_publishes_lookahead_blocks_at_allocation",
            "core/test_scheduler.py::test_finished_spec_request_caches_completed_blocks",
            "core/test_scheduler.py::test_async_output_does_not_cache_inflight_tokens",
            "core/test_scheduler.py::test_max_loras_counts_running_request_awaiting_output",
            "core/test_scheduler.py::test_local_prefill_interval_left_to_engine_under_dp",
            "core/test_scheduler.py::test_block_drafters_cap_requests_instead_of_draft_slots",
            "core/test_scheduler.py::test_draft_slots_budgeted_per_scheduled_request",
            "core/test_scheduler.py::test_mamba_align_encoder_cache_cap_makes_progress",
            "core/test_scheduler.py::test_mamba_align_eagle_schedules_encoder_at_boundary",
            "core/test_scheduler.py::test_diffusion_scheduler_is_selected_by_default",
            "core/test_scheduler.py::test_diffusion_scheduler_narrows_the_canvas_per_request",
            "core/test_scheduler.py::test_diffusion_scheduler_trims_full_width_worker_drafts",
            "core/test_scheduler.py::test_sync_diffusion_step_commits_only_emitted_tokens",
            "core/test_scheduler.py::test_diffusion_scheduler_defers_a_read_with_every_step_in_flight",
            "kv_connector/unit/test_config.py::test_kv_connector[native-4.0-1-1-OffloadingConnector-4294967296.0]",
            "kv_connector/unit/test_config.py::test_kv_connector[native-8.0-2-2-OffloadingConnector-8589934592.0]",
            "kv_connector/unit/test_config.py::test_kv_connector[lmcache-4.0-1-1-LMCacheMPConnector-None]",
            "kv_connector/unit/test_config.py::test_kv_connector[lmcache-8.0-2-2-LMCacheMPConnector-None]",
            "kv_connector/unit/test_config.py::test_kv_offloading_size_only_uses_native_default",
            "kv_connector/unit/test_decode_bench_connector.py::test_decode_bench_connector_fills_fp8_caches",
            "kv_connector/unit/test_decode_bench_connector.py::test_decode_bench_connector_zero_fills_packed_uint8_caches",
            "kv_connector/unit/test_decode_bench_connector.py::test_decode_bench_connector_startup_fill_encodes_fp8_caches",
            "sample/test_logprobs.py::test_prompt_logprob_token_ids_with_chunking_and_preemption",
            "sample/test_logprobs.py::test_prompt_logprob_token_ids_drop_partially_scored_prefills",
            "core/test_scheduler.py::test_diffusion_read_deferral_keeps_a_longer_pp_wait",
            "engine/test_kv_cache_group_metadata.py::test_global_layout_finalizes_worker_interleave_before_profiling",
            "structured_output/test_backend_guidance.py::test_grammar_init_async_and_sync[False]",
        ),
    ),
    LeftOut(
        "what this platform changes: an engine has longer to end, and statistics another logger",
        tests=(
            "engine/test_startup_watch_processes.py::test_engine_core_process_shutdown_timeout[True-None-0-7-7]",
            "engine/test_startup_watch_processes.py::test_engine_core_process_shutdown_timeout[True-None-0-None-None]",
            "engine/test_startup_watch_processes.py::test_engine_core_process_shutdown_timeout[False-None-0-0-0]",
            "metrics/test_engine_logger_apis.py::test_async_llm_add_to_default_loggers",
        ),
    ),
    LeftOut(
        "skipped by the test file itself, or reading NVML, without CUDA",
        files=(
            "engine/test_abort_final_step.py",
            "engine/test_async_llm.py",
            "engine/test_engine_core.py",
            "engine/test_engine_core_client.py",
            "shutdown/test_delete.py",
        ),
    ),
    LeftOut(
        "breaks vLLM's own Llama on purpose; here mlx-lm's is served",
        files=(
            "shutdown/test_forward_error.py",
            "shutdown/test_startup_error.py",
        ),
    ),
    LeftOut(
        "trained weights from the hub, or OPT's, which mlx-lm does not have",
        files=(
            "e2e",
            "core/prefix_cache/test_hybrid_prefix_cache_hit_rate.py",
            "engine/test_fast_incdec_prefix_err.py",
            "engine/test_llm_engine.py",
            "logits_processors/test_custom_offline.py",
            "logits_processors/test_custom_online.py",
            "tracing/test_tracing.py",
        ),
        tests=(
            "core/test_scheduler.py::test_streaming_lookahead_hashes_follow_recomputed_kv",
            "sample/test_head_dtype.py::test_fp32_head_e2e_no_nan",
            "sample/test_logprobs.py::test_max_logprobs",
            "sample/test_logprobs.py::test_all_logprobs",
            "sample/test_logprobs.py::test_logprobs_mode",
            "sample/test_logprobs.py::test_prompt_logprobs_mode",
            "sample/test_logprobs.py::test_verify_tokens_integration",
            "sample/test_logprobs.py::test_utf8_edge_cases_with_real_model",
            "sample/test_logprobs.py::test_correct_decoded_token_preserves_valid_tokens",
        ),
    ),
    LeftOut(
        "the tokenizer of a certain model from the hub",
        files=("structured_output/test_backend_xgrammar_stop_tokens.py",),
        tests=(
            "structured_output/test_backend_guidance.py::test_mistral_tokenizer_compile_grammar",
            "structured_output/test_backend_xgrammar_lark.py::test_auto_backend_selects_guidance_for_mistral_lark",
            "engine/test_output_processor.py::test_stop_token[True-stop_token_ids-False-None]",
            "engine/test_output_processor.py::test_stop_token[True-stop_token_ids-False-5]",
            "engine/test_output_processor.py::test_stop_token[True-eos_token_id-False-None]",
            "engine/test_output_processor.py::test_stop_token[False-eos_token_id-True-None]",
            "sample/test_sampling_params_e2e.py::test_stop",
            "sample/test_sampling_params_e2e.py::test_bad_words",
        ),
    ),
    LeftOut(
        "a chunk without a token, which the platform has end within a block",
        tests=(
            "core/test_mamba_align_chunk_split.py::test_internal_checkpoint_split[3602-512-True-0]",
        ),
    ),
    LeftOut(
        "packages that are not installed: ray, lm_eval",
        files=(
            "metrics/test_ray_metrics.py",
            "sample/test_logprobs_e2e.py",
        ),
        tests=("metrics/test_engine_logger_apis.py::test_async_llm_replace_default_loggers",),
    ),
    LeftOut(
        "cannot be run with this pytest, or with Python 3.11",
        files=("structured_output/test_validation.py",),
        tests=(
            "structured_output/test_backend_xgrammar.py::TestXgrammarBackend::TestPR58067Regressions",
        ),
    ),
)


def reason(name: str) -> str | None:
    """Returns why a test of a running file is left out, or None; ``name`` as printed by pytest."""
    for group in LEFT_OUT:
        if any(_within(name, test, "[", "::") for test in group.tests):
            return group.reason
    return None


def reasons(file: str) -> Iterator[str]:
    """Yields the reasons why a file does not run."""
    for group in LEFT_OUT:
        if any(_within(file, left_out, "/") for left_out in group.files):
            yield group.reason


def unmatched(names: list[str]) -> list[str]:
    """Returns left-out tests that are not among the ``names`` of their files' tests."""
    files = {name.split("::")[0] for name in names}
    listed = [test for group in LEFT_OUT for test in group.tests if test.split("::")[0] in files]
    return [test for test in listed if not any(_within(name, test, "[", "::") for name in names)]


def _within(name: str, listed: str, *separators: str) -> bool:
    return name == listed or name.startswith(tuple(listed + separator for separator in separators))
