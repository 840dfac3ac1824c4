# SPDX-License-Identifier: Apache-2.0
"""Names that we use where steps are planned and run: worker, scheduler, cache, sampling."""

from __future__ import annotations

from vllm_metal.vllm_patches.touched.entry import GPU_WORKER, Touched

_WORKER = (
    Touched(
        "vllm.v1.worker.worker_base:WorkerBase",
        by="worker/worker.py",
        fields="vllm_config model_config cache_config scheduler_config current_platform vocab_size",
        methods={
            "init_device": "",
            "load_model": "* load_dummy_weights",
            "get_kv_cache_spec": "",
            "get_supported_kv_cache_layouts": "",
            "compile_or_warm_up_model": "",
            "execute_model": "scheduler_output",
            "sample_tokens": "grammar_output",
            "get_model": "",
            "check_health": "",
            "synchronize_device": "",
            "shutdown": "",
        },
    ),
    Touched(
        "vllm.v1.worker.worker_base:WorkerBase",
        by="worker/worker.py (inherited, called by the engine)",
        calls={"set_kv_cache_layout": "kv_cache_layout"},
        releases=("0.32",),
    ),
    Touched(
        "vllm.v1.worker.worker_base:WorkerBase",
        by="worker/worker.py (inherited, called by the engine)",
        calls={"set_kv_cache_layout": "kv_cache_layout cp_kv_cache_interleave_size"},
        releases=("0.33",),
    ),
    Touched(
        f"{GPU_WORKER}:Worker",
        by="worker/worker.py",
        methods={
            "determine_available_memory": "",
            "initialize_from_config": "kv_cache_config",
            "take_draft_token_ids": "",
            "sleep": "level",
            "discard": "tags",
            "wake_up": "tags",
            "reload_weights": "*args **kwargs",
            "get_supported_tasks": "",
            "update_max_model_len": "max_model_len",
            "reset_encoder_cache": "",
            "execute_dummy_batch": "",
        },
    ),
    Touched(  # what goes beyond the first two is refused by vLLM where a worker does not take it
        f"{GPU_WORKER}:Worker",
        by="worker/worker.py",
        methods={"profile": "is_start profile_prefix * delay_iterations max_iterations"},
        releases=("0.32",),
    ),
    Touched(
        f"{GPU_WORKER}:Worker",
        by="worker/worker.py",
        methods={
            "profile": "is_start profile_prefix * delay_iterations max_iterations profiler_kwargs"
        },
        releases=("0.33",),
    ),
    Touched(
        "vllm.v1.worker.worker_base:CompilationTimes",
        by="worker/worker.py",
        called="language_model= encoder=",
    ),
    Touched("vllm.utils.torch_utils:set_random_seed", by="worker/worker.py", called="seed"),
    Touched("vllm.utils.torch_utils:STR_DTYPE_TO_TORCH_DTYPE", by="kv_cache/formats.py"),
    Touched("vllm.tasks:SupportedTask", by="worker/worker.py", fields="generate"),
    Touched(
        "vllm.utils.func_utils:_supports_kw", by="vllm_patches/tokenizers.py", fields="cache_clear"
    ),
)

_STEP = (
    Touched(
        "vllm.v1.core.sched.output:SchedulerOutput",
        by="batch/requests.py metrics/step_rows.py worker/model_runner.py worker/recovery.py "
        "worker/rehearsal.py vllm_patches/scheduler.py vllm_patches/step_budget.py",
        called="scheduled_new_reqs= scheduled_cached_reqs= num_scheduled_tokens= "
        "total_num_scheduled_tokens= scheduled_spec_decode_tokens= scheduled_encoder_inputs= "
        "finished_req_ids= free_encoder_mm_hashes=",
        fields="scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens "
        "total_num_scheduled_tokens finished_req_ids "
        "preempted_req_ids scheduled_spec_decode_tokens num_invalid_spec_tokens "
        "new_block_ids_to_zero kv_cache_block_copies kv_connector_metadata "
        "has_structured_output_requests",
    ),
    # Tells drafters of vLLM's own second model runner, which this plugin refuses, to skip a step;
    # with the first, the scheduler never sets it.
    Touched(
        "vllm.v1.core.sched.output:SchedulerOutput",
        by="worker/model_runner.py (not heeded)",
        fields="skip_drafts",
        releases=("0.33",),
    ),
    Touched(
        "vllm.v1.core.sched.output:NewRequestData",
        by="batch/requests.py worker/rehearsal.py",
        called="req_id prompt_token_ids mm_features sampling_params pooling_params block_ids "
        "num_computed_tokens lora_request",
        fields="req_id prompt_token_ids sampling_params block_ids num_computed_tokens",
    ),
    Touched(
        "vllm.v1.core.sched.output:CachedRequestData",
        by="batch/requests.py metrics/step_rows.py worker/rehearsal.py",
        called="req_ids= resumed_req_ids= new_token_ids= all_token_ids= new_block_ids= "
        "num_computed_tokens= num_output_tokens=",
        calls={"make_empty": ""},
        fields="req_ids resumed_req_ids new_block_ids num_computed_tokens all_token_ids "
        "num_output_tokens",
    ),
    Touched(
        "vllm.v1.core.sched.output:GrammarOutput",
        by="batch/grammar.py worker/model_runner.py",
        fields="structured_output_request_ids grammar_bitmask num_acceptable_drafts",
    ),
    Touched(
        "vllm.v1.outputs:ModelRunnerOutput",
        by="vllm_patches/step_result.py batch/outputs.py worker/recovery.py metrics/step_meter.py",
        fields="ec_connector_output",
        called="req_ids= req_id_to_index= sampled_token_ids= logprobs= prompt_logprobs_dict= "
        "kv_connector_output=",
    ),
    Touched("vllm.v1.outputs:EMPTY_MODEL_RUNNER_OUTPUT", by="worker/recovery.py"),
    Touched(
        "vllm.v1.outputs:KVConnectorOutput",
        by="vllm_patches/async_output.py worker/recovery.py kv_transfer/step_hooks.py "
        "kv_transfer/transfer_hooks.py kv_transfer/connector.py metrics/step_meter.py",
        fields="failed_recving kv_connector_worker_meta",
        called="finished_recving= failed_recving= kv_connector_stats= kv_connector_worker_meta=",
    ),
    Touched(
        "vllm.v1.outputs:AsyncModelRunnerOutput",
        by="vllm_patches/async_output.py worker/worker.py worker/recovery.py metrics/step_meter.py",
        methods={"get_output": ""},
    ),
    Touched(
        "vllm.v1.outputs:AsyncModelRunnerOutput",
        by="vllm_patches/async_output.py",
        methods={"get_kv_connector_output": ""},
        releases=("0.33",),
    ),
    Touched(
        "vllm.v1.outputs:DraftTokenIds",
        by="worker/model_runner.py worker/recovery.py",
        called="req_ids draft_token_ids",
    ),
    Touched(
        "vllm.v1.outputs:LogprobsLists",
        by="sample/logprobs.py batch/outputs.py",
        called="logprob_token_ids logprobs sampled_token_ranks",
        fields="cu_num_generated_tokens",
        calls={"_replace": "logprob_token_ids= logprobs= sampled_token_ranks="},
    ),
    Touched(
        "vllm.v1.outputs:LogprobsTensors",
        by="batch/outputs.py",
        called="logprob_token_ids logprobs selected_token_ranks",
    ),
)

_SCHEDULER = (
    Touched(
        "vllm.v1.core.sched.scheduler:Scheduler",
        by="vllm_patches/scheduler.py vllm_patches/step_budget.py vllm_patches/prefill_chunks.py "
        "vllm_patches/streaming_sessions.py",
        fields="vllm_config cache_config scheduler_config block_size num_spec_tokens "
        "max_num_scheduled_tokens requests kv_cache_manager kv_cache_config "
        "grammar_compile_error_reqs finished_req_ids connector waiting kv_holding_waiting "
        "failed_recving_kv_req_ids "
        "_inflight_prefills deferred_frees defer_block_free running finished_recving_kv_req_ids "
        "_pause_state has_mamba_layers max_model_len max_num_active_reqs "
        "num_waiting_for_streaming_input reset_preempted_req_ids",
        calls={
            "_handle_blocked_waiting_request": "request",
            "_free_request_blocks": "request",
            "_enqueue_waiting_request": "request",
        },
        methods={
            "schedule": "throttle_prefills",
            "add_request": "request",
            "_handle_stopped_request": "request",
            "_update_request_as_session": "session update",
            "update_from_output": "scheduler_output model_runner_output",
            "_get_new_block_ids_to_zero": "",
            "reset_prefix_cache": "reset_running_requests reset_connector",
            "_mamba_block_aligned_split": "request num_new_tokens num_new_local_computed_tokens "
            "num_external_computed_tokens",
        },
    ),
    Touched(
        "vllm.v1.core.kv_cache_manager:KVCacheManager",
        by="vllm_patches/scheduler.py",
        fields="block_pool",
        calls={"get_block_ids": "request_id", "evict_blocks": "block_ids", "free": "request"},
    ),
    Touched(
        "vllm.v1.core.block_pool:BlockPool",
        by="vllm_patches/scheduler.py",
        fields="blocks",
        calls={
            "get_cached_block": "block_hash kv_cache_group_ids",
            "free_blocks": "ordered_blocks",
        },
    ),
    Touched(
        "vllm.v1.core.kv_cache_utils:KVCacheBlock",
        by="vllm_patches/scheduler.py",
        fields="block_id ref_cnt",
    ),
    Touched(
        "vllm.v1.request:Request",
        by="vllm_patches/scheduler.py vllm_patches/step_budget.py kv_transfer/connector.py "
        "vllm_patches/streaming_sessions.py",
        fields="request_id resumable streaming_queue num_in_flight_tokens stop_reason "
        "num_output_tokens block_hashes cache_salt status num_computed_tokens num_tokens "
        "kv_transfer_params skip_reading_prefix_cache num_tokens_with_spec "
        "num_output_placeholders is_prefill_chunk sampling_params",
        calls={"is_finished": "", "get_skip_reading_prefix_cache": ""},
    ),
    Touched(
        "vllm.v1.request:RequestStatus",
        by="vllm_patches/scheduler.py vllm_patches/streaming_sessions.py",
        fields="WAITING PREEMPTED WAITING_FOR_REMOTE_KVS WAITING_FOR_STREAMING_REQ "
        "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR",
    ),
    Touched(
        "vllm.v1.core.sched.request_queue:RequestQueue",
        by="vllm_patches/scheduler.py vllm_patches/step_budget.py",
        calls={"remove_request": "request", "prepend_request": "request", "peek_request": ""},
    ),
    Touched(
        "vllm.v1.core.sched.interface:PauseState",
        by="vllm_patches/scheduler.py vllm_patches/step_budget.py",
        fields="PAUSED_ALL",
    ),
    Touched(
        "vllm.v1.engine:EngineCoreOutputs",
        by="vllm_patches/scheduler.py vllm_patches/streaming_sessions.py",
        fields="outputs",
    ),
    Touched(
        "vllm.v1.engine:EngineCoreOutput",
        by="vllm_patches/scheduler.py vllm_patches/streaming_sessions.py",
        fields="request_id stop_reason num_nans_in_logits finish_reason",
    ),
)

_KV_CACHE = (
    *(
        Touched(
            f"{module}:{name}",
            by="vllm_patches/kv_cache_planning.py",
            called=args,
            releases=(release,),
        )
        for release, module in (
            ("0.32", "vllm.v1.core.kv_cache_utils"),
            ("0.33", "vllm.v1.core.kv_cache_planning"),
        )
        for name, args in (
            ("get_kv_cache_groups", "vllm_config kv_cache_spec"),
            ("get_kv_cache_config_from_groups", "vllm_config kv_cache_groups available_memory"),
        )
    ),
    Touched(
        "vllm.v1.core.kv_cache_utils:get_max_concurrency_for_kv_cache_config",
        by="vllm_patches/kv_cache_planning.py",
        called="vllm_config kv_cache_config",
    ),
    *(
        Touched(
            f"vllm.v1.kv_cache_interface:{name}",
            by="attention/attention_layer.py memory/planner.py kv_cache/specs.py",
            called="block_size= num_kv_heads= head_size= dtype= kv_quant_mode= "
            f"state_content_bytes={window}",
            fields=fields,
        )
        for name, window, fields in (
            ("FullAttentionSpec", "", "page_size_padded"),
            ("SlidingWindowSpec", " sliding_window=", "extra_retained_tokens page_size_padded"),
        )
    ),
    Touched(
        "vllm.v1.kv_cache_interface:MambaSpec",
        by="attention/recurrent_layer.py",
        called="block_size= shapes= dtypes= mamba_cache_mode=",
        fields="page_size_padded",
    ),
    Touched(
        "vllm.v1.kv_cache_interface:KVCacheSpec",
        by="worker/worker.py memory/planner.py kv_cache/specs.py attention/attention_layer.py",
    ),
    Touched(
        "vllm.v1.kv_cache_interface:KVQuantMode",
        by="attention/attention_layer.py",
        fields="NONE FP8_PER_TOKEN_HEAD INT8_PER_TOKEN_HEAD",
    ),
    Touched(
        "vllm.v1.kv_cache_interface:KVCacheConfig",
        by="worker/worker.py memory/planner.py kv_cache/specs.py kv_transfer/fingerprint.py",
        fields="num_blocks kv_cache_tensors kv_cache_groups",
    ),
    Touched(
        "vllm.v1.kv_cache_interface:KVCacheTensor",
        by="memory/planner.py kv_cache/specs.py",
        fields="size layers offset layer_stride",
    ),
    Touched(
        "vllm.v1.kv_cache_interface:KVCacheGroupSpec",
        by="worker/worker.py kv_transfer/fingerprint.py",
        fields="layer_names kv_cache_spec",
    ),
    Touched(
        "vllm.v1.core.kv_cache_utils:resolve_none_hash_seed",
        by="kv_transfer/fingerprint.py",
        called="hash_fn",
    ),
    Touched(
        "vllm.utils.hashing:get_hash_fn_by_name",
        by="kv_transfer/fingerprint.py",
        called="hash_fn_name",
    ),
)

_SAMPLING = (
    Touched(
        "vllm.sampling_params:SamplingParams",
        by="sample batch/requests.py worker/model_runner.py platform/metal_platform.py "
        "memory/profile.py vllm_patches/step_budget.py",
        called="temperature= top_p= min_p= seed= repetition_penalty= presence_penalty= logprobs=",
        fields="temperature top_p top_k min_p seed repetition_penalty frequency_penalty "
        "presence_penalty min_tokens num_logprobs prompt_logprobs all_stop_token_ids "
        "allowed_token_ids logit_bias bad_words_token_ids logprob_token_ids structured_outputs "
        "extra_args thinking_token_budget watermarking prompt_logprob_token_ids "
        "prompt_logprob_start trace_decode_token_ids output_kind",
    ),
    Touched(
        "vllm.sampling_params:SamplingParams",
        by="worker/rehearsal.py",
        calls={"from_optional": "temperature= top_p="},
    ),
    Touched(
        "vllm.sampling_params:RequestOutputKind",
        by="vllm_patches/step_budget.py",
        fields="FINAL_ONLY",
    ),
    Touched("vllm:SamplingParams", by="sample memory/profile.py"),
    Touched(
        "vllm:SamplingParams",
        by="vllm_patches/refusals.py",
        methods={"_validate_spec_decode": "speculative_config"},
    ),
    Touched(
        "vllm.exceptions:VLLMValidationError", by="sample/validate.py", called="message parameter="
    ),
    Touched(
        "vllm.v1.sample.logits_processor:LogitsProcessor",
        by="sample/custom.py",
        called="vllm_config device is_pin_memory",
        calls={"apply": "logits", "update_state": "batch_update"},
    ),
    Touched(
        "vllm.v1.sample.logits_processor:LogitsProcessors",
        by="sample/custom.py",
        called="logitsprocs",
        fields="all argmax_invariant non_argmax_invariant",
    ),
    Touched(
        "vllm.v1.sample.logits_processor:BatchUpdateBuilder",
        by="sample/custom.py",
        called="",
        fields="added moved",
        calls={
            "pop_removed": "",
            "peek_removed": "",
            "removed_append": "index",
            "get_and_reset": "batch_size",
        },
    ),
    Touched(
        "vllm.v1.sample.logits_processor:MoveDirectionality",
        by="sample/custom.py",
        fields="UNIDIRECTIONAL",
    ),
    Touched(
        "vllm.v1.sample.logits_processor:cached_load_custom_logitsprocs",
        by="sample/custom.py",
        called="logits_processors",
    ),
    Touched(
        "vllm.v1.sample.logits_processor:STR_SPEC_DEC_REJECTS_LOGITSPROCS", by="sample/custom.py"
    ),
)

ENGINE = (*_WORKER, *_STEP, *_SCHEDULER, *_KV_CACHE, *_SAMPLING)
