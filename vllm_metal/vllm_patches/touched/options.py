# SPDX-License-Identifier: Apache-2.0
"""Names that we use where options are read: configuration, arguments, the platform."""

from __future__ import annotations

from vllm_metal.vllm_patches.touched.entry import Touched

_CONFIGURATION = (
    Touched(
        "vllm.config:VllmConfig",
        by="platform settings/additional_config.py worker/worker.py memory/planner.py models "
        "spec_decode kv_transfer sample/custom.py commands/fit metrics/stat_logger.py "
        "vllm_patches/stat_loggers.py",
        fields="model_config cache_config parallel_config scheduler_config speculative_config "
        "load_config lora_config kv_transfer_config ec_transfer_config compilation_config "
        "attention_config additional_config aux_output_config offload_config mamba_config "
        "diffusion_config watermark_config weight_transfer_config "
        "use_v2_model_runner num_prefill_lookahead_tokens",
    ),
    Touched(
        "vllm.config:ModelConfig",
        by="platform/refusals.py worker/worker.py memory/planner.py models spec_decode "
        "kv_transfer/fingerprint.py serving metrics/stat_logger.py",
        fields="model served_model_name revision tokenizer trust_remote_code dtype seed "
        "max_model_len original_max_model_len max_logprobs logprobs_mode logits_processors "
        "runner_type hf_config multimodal_config enable_prompt_embeds is_encoder_decoder "
        "architectures hf_overrides hf_config_path is_hybrid "
        "is_attention_free",
        calls={"get_hidden_size": "", "get_diff_sampling_param": ""},
    ),
    Touched(
        "vllm.config:CacheConfig",
        by="platform worker/worker.py kv_cache/specs.py memory/planner.py memory/profile.py "
        "spec_decode kv_transfer",
        fields="cache_dtype block_size user_specified_block_size kv_cache_dtype_skip_layers "
        "gpu_memory_utilization num_gpu_blocks num_gpu_blocks_override kv_cache_memory_bytes "
        "kv_cache_layout "
        "enable_prefix_caching prefix_caching_hash_algo kv_offloading_size mamba_cache_mode "
        "mamba_block_size",
    ),
    Touched(
        "vllm.config.aux_output:AuxOutputConfig",
        by="platform/refused_options.py",
        fields="enable_return_routed_experts",
    ),
    Touched(
        "vllm.config:ModelConfig",
        by="platform/refused_options.py",
        fields="hf_text_config use_fp64_gumbel model_weights config_format code_revision hf_token "
        "model_impl "
        "model_class_overrides quantization_config sleep_preserve_parameter_names",
    ),
    Touched(
        "vllm.config:LoadConfig",
        by="platform/refused_options.py",
        fields="load_format model_loader_extra_config ignore_patterns",
    ),
    Touched(
        "vllm.config:CacheConfig",
        by="platform/refused_options.py",
        fields="mamba_cache_dtype mamba_ssm_cache_dtype prefix_match_unit "
        "enable_mamba_shared_prefix_checkpoint use_replayssm",
    ),
    Touched(
        "vllm.config:ParallelConfig",
        by="platform/refused_options.py",
        fields="prefill_context_parallel_size nnodes assigned_physical_gpu_ids enable_elastic_ep "
        "enable_fault_tolerance",
    ),
    Touched(
        "vllm.config.mamba:MambaConfig",
        by="platform/refused_options.py",
        fields="enable_stochastic_rounding",
    ),
    Touched(
        "vllm.config.offload:OffloadConfig",
        by="platform/refused_options.py",
        fields="uva prefetch",
    ),
    Touched(
        "vllm.config.offload:UVAOffloadConfig",
        by="platform/refused_options.py",
        fields="cpu_offload_gb",
    ),
    Touched(
        "vllm.config.offload:PrefetchOffloadConfig",
        by="platform/refused_options.py",
        fields="offload_group_size",
    ),
    Touched(
        "vllm.config:KVTransferConfig",
        by="kv_transfer/config.py platform/refusals.py spec_decode/registry.py",
        called="kv_connector= kv_connector_module_path= kv_role= kv_load_failure_policy= "
        "kv_connector_extra_config=",
        fields="kv_connector kv_connector_module_path kv_role kv_connector_extra_config "
        "enable_permute_local_kv",
    ),
    Touched(
        "vllm.config.kv_transfer:KVTransferConfig",
        by="vllm_patches/kv_transfer.py",
        fields="kv_load_failure_policy",
    ),
    Touched(
        "vllm.config:ParallelConfig",
        by="platform",
        fields="worker_cls disable_custom_all_reduce tensor_parallel_size pipeline_parallel_size "
        "data_parallel_size decode_context_parallel_size _api_process_count "
        "distributed_executor_backend",
    ),
    Touched(
        "vllm.config:SchedulerConfig",
        by="worker/worker.py memory/planner.py memory/profile.py spec_decode "
        "vllm_patches/step_budget.py",
        fields="max_num_seqs max_num_batched_tokens enable_chunked_prefill",
    ),
    Touched(
        "vllm.config:SpeculativeConfig",
        by="platform/refusals.py models/loader.py spec_decode kv_transfer "
        "vllm_patches/speculation.py",
        fields="method model num_speculative_tokens num_speculative_tokens_per_batch_size "
        "draft_model_config rejection_sample_method "
        "draft_sample_method kv_cache_dtype use_heterogeneous_vocab parallel_drafting "
        "disable_padded_drafter_batch prompt_lookup_min prompt_lookup_max "
        "suffix_decoding_max_tree_depth suffix_decoding_max_cached_requests "
        "suffix_decoding_max_spec_factor suffix_decoding_min_token_prob",
        calls={"use_multi_module_mtp": ""},
    ),
    Touched("vllm.config.attention:AttentionConfig", by="commands/fit/engine.py", called=""),
    Touched(
        "vllm.config.attention:AttentionConfig",
        by="platform/refusals.py",
        fields="use_non_causal",
    ),
    Touched("vllm.config.cache:CacheConfig", by="commands/fit/engine.py", called="block_size="),
    Touched("vllm.config.parallel:ParallelConfig", by="commands/fit/engine.py", called=""),
    Touched(
        "vllm.config.scheduler:SchedulerConfig",
        by="commands/fit/engine.py",
        called="max_num_batched_tokens= max_num_seqs= max_model_len= is_encoder_decoder= "
        "async_scheduling= disable_hybrid_kv_cache_manager=",
    ),
    Touched(
        "vllm.config.model:_is_valid_dtype", by="commands/fit/engine.py", called="model_type dtype"
    ),
    Touched("vllm.config:LoadConfig", by="models/loader.py", fields="download_dir"),
    Touched(
        "vllm.config:CompilationConfig",
        by="platform/metal_platform.py",
        fields="mode cudagraph_mode",
    ),
    Touched("vllm.config:CompilationMode", by="platform/metal_platform.py", fields="NONE"),
    Touched("vllm.config:CUDAGraphMode", by="platform/metal_platform.py", fields="NONE"),
    Touched(
        "vllm.config.cache:CacheDType",
        by="platform/metal_platform.py",
        fields="int8_per_token_head",
    ),
    Touched(
        "vllm.config.model:LogprobsMode",
        by="sample/sampler.py",
        fields="raw_logits raw_logprobs processed_logits processed_logprobs",
    ),
    Touched("vllm.config.vllm:NgramGPUTypes", by="vllm_patches/speculation.py"),
    Touched(
        "vllm.config.speculative:has_arctic_inference",
        by="vllm_patches/speculation.py",
        replaced="",
    ),
    Touched(
        "vllm.config.speculative:SpeculativeMethod",
        by="spec_decode/registry.py vllm_patches/speculation.py",
        fields="ngram ngram_gpu suffix draft_model eagle eagle3 mtp",
    ),
    Touched(
        "vllm.config.speculative:SpeculativeMethod",
        by="spec_decode/registry.py",
        fields="medusa mlp_speculator",
        releases=("0.32",),
    ),
    Touched(
        "vllm.envs:environment_variables",
        by="vllm_patches/environment.py vllm_patches/processes.py",
        fields="VLLM_USE_V2_MODEL_RUNNER VLLM_COMPUTE_NANS_IN_LOGITS "
        "VLLM_WORKER_MULTIPROC_METHOD VLLM_ENABLE_V1_MULTIPROCESSING",
    ),
    Touched(
        "vllm.envs:env_with_choices",
        by="vllm_patches/processes.py",
        called="env_name default choices",
    ),
)

_ENGINE_ARGUMENTS = (
    Touched(
        "vllm.engine.arg_utils:EngineArgs",
        by="vllm_patches/engine_args.py vllm_patches/speculation.py platform/refused_options.py",
        fields="speculative_config spec_method enable_prefix_caching max_model_len",
        methods={
            "_set_default_chunked_prefill_and_prefix_caching_args": "model_config",
            "create_model_config": "",
            "get_batch_defaults": "world_size",
            "create_speculative_config": "target_model_config target_parallel_config",
        },
    ),
    Touched(
        "vllm.engine.arg_utils:resolve_kv_cache_dtype_string",
        by="vllm_patches/engine_args.py",
        replaced="kv_cache_dtype model_config",
    ),
    Touched(
        "vllm.utils.torch_utils:resolve_kv_cache_dtype_string",
        by="vllm_patches/engine_args.py",
        called="kv_cache_dtype model_config",
    ),
    Touched(
        "vllm.utils.argparse_utils:FlexibleArgumentParser",
        by="platform/metal_platform.py vllm_patches/engine_args.py",
        fields="_actions",
    ),
    Touched("vllm.usage.usage_lib:UsageContext", by="vllm_patches/engine_args.py"),
    Touched("vllm.transformers_utils.config:_CONFIG_REGISTRY", by="vllm_patches/mlx_models.py"),
    Touched(
        "vllm.model_executor.models:ModelRegistry",
        by="vllm_patches/model_info.py vllm_patches/mlx_models.py",
        fields="models",
    ),
    Touched(
        "vllm.model_executor.models.registry:",
        by="vllm_patches/model_info.py",
        fields="_TEXT_GENERATION_MODELS _TRANSFORMERS_SUPPORTED_MODELS "
        "_SPECULATIVE_DECODING_MODELS",
    ),
    Touched(
        "vllm.model_executor.models.registry:_BaseRegisteredModel",
        by="vllm_patches/model_info.py",
        methods={"inspect_model_cls": "", "load_model_cls": ""},
    ),
    Touched(
        "vllm.model_executor.models.registry:_ModelInfo",
        by="vllm_patches/model_info.py",
        called="architecture= is_text_generation_model= is_pooling_model= attn_type= "
        "default_seq_pooling_type= default_tok_pooling_type= score_type= supports_multimodal= "
        "supports_multimodal_raw_input_only= requires_raw_input_tokens= "
        "supports_multimodal_encoder_tp_data= supports_pp= supports_hc_sp= has_inner_state= "
        "is_attention_free= is_hybrid= has_noops= supports_mamba_prefix_caching= "
        "supports_replayssm= supports_transcription= supports_transcription_only= "
        "supported_video_pruning_methods= supports_mm_device_do_normalize=",
    ),
)

_PLATFORM = (
    Touched(
        "vllm.platforms.interface:Platform",
        by="platform/metal_platform.py",
        fields="_enum device_name device_type dispatch_key dist_backend supported_dtypes",
        methods={
            "get_device_name": "device_id",
            "get_device_total_memory": "device_id",
            "get_current_memory_usage": "device",
            "import_kernels": "",
            "set_device": "device",
            "manual_seed_all": "seed",
            "inference_mode": "",
            "is_pin_memory_available": "",
            "is_sleep_mode_available": "",
            "support_hybrid_kv_cache": "",
            "verify_quantization": "quant",
            "validate_environ": "hard_fail",
            "pre_register_and_update": "parser",
            "update_block_size_for_backend": "vllm_config",
            "apply_config_platform_defaults": "vllm_config",
            "check_and_update_config": "vllm_config",
            "validate_request": "processed_inputs params",
        },
    ),
    Touched("vllm.platforms.interface:PlatformEnum", by="platform/metal_platform.py", fields="OOT"),
    Touched("vllm.platforms:current_platform", by="worker/worker.py"),
    Touched("vllm.pooling_params:PoolingParams", by="platform/metal_platform.py"),
    Touched(
        "vllm.envs:",
        by="vllm_patches/environment.py platform/refused_variables.py",
        fields="environment_variables",
    ),
    Touched("vllm.envs:is_set", by="platform/refused_variables.py", called="name"),
    Touched(
        "vllm.logger:init_logger",
        by="platform/metal_platform.py worker/worker.py memory/planner.py memory/pressure.py "
        "worker/recovery.py kv_cache/choice.py spec_decode/speculator.py kv_transfer vllm_patches "
        "serving",
        called="name",
    ),
)

_PROCESSES = (
    Touched("vllm:LLM", by="commands/doctor/children/ten_tokens.py", called="model"),
    Touched(
        "vllm.v1.engine.llm_engine:LLMEngine",
        by="vllm_patches/processes.py",
        called="vllm_config executor_class log_stats multiprocess_mode=",
    ),
    Touched(
        "vllm.v1.engine.utils:CoreEngineProcManager",
        by="vllm_patches/shutdown.py",
        fields="_request_shutdown_timeout",
        methods={"shutdown": "timeout"},
    ),
    Touched(
        "vllm.v1.engine.core_client:MPClient",
        by="vllm_patches/shutdown.py",
        fields="resources _finalizer",
        methods={"shutdown": "timeout", "_format_exception": "e"},
    ),
    Touched(
        "vllm.v1.engine.core_client:BackgroundResources",
        by="vllm_patches/shutdown.py",
        fields="engine_dead",
    ),
    Touched(
        "vllm.v1.engine.exceptions:EngineDeadError",
        by="vllm_patches/shutdown.py",
        called="suppress_context=",
    ),
)

OPTIONS = (*_CONFIGURATION, *_ENGINE_ARGUMENTS, *_PLATFORM, *_PROCESSES)
