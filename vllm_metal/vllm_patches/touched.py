# SPDX-License-Identifier: Apache-2.0
"""Every name of vLLM's that this plugin imports, extends, changes or reads: a table, for the probe.

tests/vllm_patches/test_touched.py compares it with the sources.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm_metal.vllm_patches.releases import KNOWN_VLLM

#: vLLM's worker for GPUs: says what is asked of a worker beyond the base class. vLLM does not load
#: it for this platform, and importing it takes seconds.
GPU_WORKER = "vllm.v1.worker.gpu_worker"


@dataclass(frozen=True)
class Touched:
    """One name of vLLM's, and what of it is relied on.

    Parameters are names in order, without `self`; a lone `*` goes before those that are passed by
    keyword only. Arguments are the same, `name=` for those we pass by keyword.
    """

    name: str  # "module:name", or "module:" for what is read of the module itself
    by: str  # our files that touch it, below vllm_metal/
    called: str | None = None  # arguments that we call it with; None: we do not
    replaced: str | None = None  # its parameters, where a function of ours takes its place
    fields: str = ""  # attributes, keys or values
    calls: Mapping[str, str] = field(default_factory=dict)  # methods of its that we call: arguments
    methods: Mapping[str, str] = field(default_factory=dict)  # that ours replace: parameters
    releases: tuple[str, ...] = KNOWN_VLLM  # that have it


_CONFIGURATION = (
    Touched(
        "vllm.config:VllmConfig",
        by="platform.py worker.py memory.py models spec_decode sample/custom.py",
        fields="model_config cache_config parallel_config scheduler_config speculative_config "
        "load_config lora_config kv_transfer_config compilation_config additional_config "
        "use_v2_model_runner num_prefill_lookahead_tokens",
    ),
    Touched(
        "vllm.config:ModelConfig",
        by="platform.py worker.py memory.py models spec_decode",
        fields="model revision tokenizer trust_remote_code dtype seed max_model_len "
        "original_max_model_len max_logprobs logprobs_mode logits_processors runner_type hf_config "
        "multimodal_config enable_prompt_embeds is_encoder_decoder architectures",
        calls={"get_hidden_size": ""},
    ),
    Touched(
        "vllm.config:CacheConfig",
        by="platform.py worker.py memory.py models/profile.py spec_decode",
        fields="cache_dtype block_size user_specified_block_size kv_cache_dtype_skip_layers "
        "gpu_memory_utilization num_gpu_blocks_override kv_cache_memory_bytes",
    ),
    Touched(
        "vllm.config:ParallelConfig",
        by="platform.py",
        fields="worker_cls disable_custom_all_reduce tensor_parallel_size pipeline_parallel_size "
        "data_parallel_size decode_context_parallel_size",
    ),
    Touched(
        "vllm.config:SchedulerConfig",
        by="worker.py memory.py models/profile.py spec_decode",
        fields="max_num_seqs max_num_batched_tokens",
    ),
    Touched(
        "vllm.config:SpeculativeConfig",
        by="platform.py models/loader.py spec_decode",
        fields="method model num_speculative_tokens draft_model_config rejection_sample_method "
        "draft_sample_method kv_cache_dtype use_heterogeneous_vocab parallel_drafting "
        "disable_padded_drafter_batch prompt_lookup_min prompt_lookup_max "
        "suffix_decoding_max_tree_depth suffix_decoding_max_cached_requests "
        "suffix_decoding_max_spec_factor suffix_decoding_min_token_prob",
        calls={"use_multi_module_mtp": ""},
    ),
    Touched("vllm.config:LoadConfig", by="models/loader.py", fields="download_dir"),
    Touched("vllm.config:CompilationConfig", by="platform.py", fields="mode cudagraph_mode"),
    Touched("vllm.config:CompilationMode", by="platform.py", fields="NONE"),
    Touched("vllm.config:CUDAGraphMode", by="platform.py", fields="NONE"),
    Touched("vllm.config.cache:CacheDType", by="platform.py", fields="int8_per_token_head"),
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
        by="platform.py vllm_patches/speculation.py",
        fields="ngram ngram_gpu suffix draft_model eagle eagle3 mtp",
    ),
    Touched(
        "vllm.config.speculative:SpeculativeMethod",
        by="platform.py",
        fields="medusa mlp_speculator",
        releases=("0.32",),
    ),
    Touched(
        "vllm.envs:environment_variables",
        by="platform.py",
        fields="VLLM_USE_V2_MODEL_RUNNER VLLM_COMPUTE_NANS_IN_LOGITS",
    ),
)

_ENGINE_ARGUMENTS = (
    Touched(
        "vllm.engine.arg_utils:EngineArgs",
        by="vllm_patches/engine_args.py vllm_patches/speculation.py",
        fields="speculative_config spec_method",
        methods={
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
    Touched("vllm.utils.argparse_utils:FlexibleArgumentParser", by="platform.py vllm_patches"),
    Touched("vllm.usage.usage_lib:UsageContext", by="vllm_patches/engine_args.py"),
    Touched(
        "vllm.model_executor.models:ModelRegistry",
        by="vllm_patches/mlp_speculators.py",
        fields="models",
        calls={"register_model": "model_arch model_cls"},
    ),
    Touched(
        "vllm.model_executor.models.mlp_speculator:MLPSpeculator",
        by="vllm_patches/mlp_speculators.py",
        releases=("0.32",),
    ),
)

_PLATFORM = (
    Touched(
        "vllm.platforms.interface:Platform",
        by="platform.py",
        fields="_enum device_name device_type dispatch_key dist_backend supported_dtypes",
        methods={
            "get_device_name": "device_id",
            "get_device_total_memory": "device_id",
            "get_current_memory_usage": "device",
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
    Touched("vllm.platforms.interface:PlatformEnum", by="platform.py", fields="OOT"),
    Touched("vllm.platforms:current_platform", by="worker.py"),
    Touched("vllm.pooling_params:PoolingParams", by="platform.py"),
    Touched("vllm.envs:", by="platform.py", fields="environment_variables"),
    Touched(
        "vllm.logger:init_logger",
        by="platform.py worker.py memory.py memory_pressure.py guard.py kv_cache/choice.py "
        "spec_decode/speculator.py vllm_patches",
        called="name",
    ),
)

_WORKER = (
    Touched(
        "vllm.v1.worker.worker_base:WorkerBase",
        by="worker.py",
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
        by="worker.py (inherited, called by the engine)",
        calls={"set_kv_cache_layout": "kv_cache_layout"},
        releases=("0.32",),
    ),
    Touched(
        "vllm.v1.worker.worker_base:WorkerBase",
        by="worker.py (inherited, called by the engine)",
        calls={"set_kv_cache_layout": "kv_cache_layout cp_kv_cache_interleave_size"},
        releases=("0.33",),
    ),
    Touched(
        f"{GPU_WORKER}:Worker",
        by="worker.py",
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
        by="worker.py",
        methods={"profile": "is_start profile_prefix * delay_iterations max_iterations"},
        releases=("0.32",),
    ),
    Touched(
        f"{GPU_WORKER}:Worker",
        by="worker.py",
        methods={
            "profile": "is_start profile_prefix * delay_iterations max_iterations profiler_kwargs"
        },
        releases=("0.33",),
    ),
    Touched(
        "vllm.v1.worker.worker_base:CompilationTimes",
        by="worker.py",
        called="language_model= encoder=",
    ),
    Touched("vllm.utils.torch_utils:set_random_seed", by="worker.py", called="seed"),
    Touched("vllm.utils.torch_utils:STR_DTYPE_TO_TORCH_DTYPE", by="kv_cache/formats.py"),
    Touched("vllm.tasks:SupportedTask", by="worker.py", fields="generate"),
    Touched(
        "vllm.utils.func_utils:_supports_kw", by="vllm_patches/tokenizers.py", fields="cache_clear"
    ),
)

_STEP = (
    Touched(
        "vllm.v1.core.sched.output:SchedulerOutput",
        by="runner.py guard.py vllm_patches/scheduler.py",
        fields="scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens finished_req_ids "
        "preempted_req_ids scheduled_spec_decode_tokens num_invalid_spec_tokens "
        "new_block_ids_to_zero kv_cache_block_copies",
    ),
    # Tells drafters of vLLM's own second model runner, which this plugin refuses, to skip a step;
    # with the first, the scheduler never sets it.
    Touched(
        "vllm.v1.core.sched.output:SchedulerOutput",
        by="runner.py (not heeded)",
        fields="skip_drafts",
        releases=("0.33",),
    ),
    Touched(
        "vllm.v1.core.sched.output:NewRequestData",
        by="requests.py",
        fields="req_id prompt_token_ids sampling_params block_ids num_computed_tokens",
    ),
    Touched(
        "vllm.v1.core.sched.output:CachedRequestData",
        by="runner.py requests.py",
        fields="req_ids resumed_req_ids new_block_ids num_computed_tokens all_token_ids",
    ),
    Touched(
        "vllm.v1.core.sched.output:GrammarOutput",
        by="grammar.py runner.py",
        fields="structured_output_request_ids grammar_bitmask num_acceptable_drafts",
    ),
    Touched(
        "vllm.v1.outputs:ModelRunnerOutput",
        by="failures.py outputs.py guard.py",
        called="req_ids= req_id_to_index= sampled_token_ids= logprobs= prompt_logprobs_dict=",
    ),
    Touched("vllm.v1.outputs:EMPTY_MODEL_RUNNER_OUTPUT", by="guard.py"),
    Touched(
        "vllm.v1.outputs:AsyncModelRunnerOutput",
        by="vllm_patches/async_output.py worker.py guard.py",
        methods={"get_output": ""},
    ),
    Touched(
        "vllm.v1.outputs:AsyncModelRunnerOutput",
        by="vllm_patches/async_output.py",
        methods={"get_kv_connector_output": ""},
        releases=("0.33",),
    ),
    Touched(
        "vllm.v1.outputs:DraftTokenIds", by="runner.py guard.py", called="req_ids draft_token_ids"
    ),
    Touched(
        "vllm.v1.outputs:LogprobsLists",
        by="sample/logprobs.py outputs.py",
        called="logprob_token_ids logprobs sampled_token_ranks",
        fields="cu_num_generated_tokens",
        calls={"_replace": "logprob_token_ids= logprobs= sampled_token_ranks="},
    ),
    Touched(
        "vllm.v1.outputs:LogprobsTensors",
        by="outputs.py",
        called="logprob_token_ids logprobs selected_token_ranks",
    ),
)

_SCHEDULER = (
    Touched(
        "vllm.v1.core.sched.scheduler:Scheduler",
        by="vllm_patches/scheduler.py",
        fields="requests kv_cache_manager kv_cache_config grammar_compile_error_reqs",
        calls={"reset_prefix_cache": "reset_running_requests="},
        methods={
            "update_from_output": "scheduler_output model_runner_output",
            "_get_new_block_ids_to_zero": "",
        },
    ),
    Touched(
        "vllm.v1.core.kv_cache_manager:KVCacheManager",
        by="vllm_patches/scheduler.py",
        fields="block_pool",
        calls={"get_block_ids": "request_id", "evict_blocks": "block_ids"},
    ),
    Touched(
        "vllm.v1.core.block_pool:BlockPool",
        by="vllm_patches/scheduler.py",
        fields="blocks",
        calls={"get_cached_block": "block_hash kv_cache_group_ids"},
    ),
    Touched(
        "vllm.v1.core.kv_cache_utils:KVCacheBlock",
        by="vllm_patches/scheduler.py",
        fields="block_id ref_cnt",
    ),
    Touched("vllm.v1.request:Request", by="vllm_patches/scheduler.py", fields="block_hashes"),
    Touched("vllm.v1.engine:EngineCoreOutputs", by="vllm_patches/scheduler.py", fields="outputs"),
    Touched(
        "vllm.v1.engine:EngineCoreOutput",
        by="vllm_patches/scheduler.py",
        fields="request_id stop_reason num_nans_in_logits",
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
            by="kv_cache/specs.py memory.py",
            called="block_size= num_kv_heads= head_size= dtype= kv_quant_mode= "
            f"state_content_bytes={window}",
            fields=fields,
        )
        for name, window, fields in (
            ("FullAttentionSpec", "", ""),
            ("SlidingWindowSpec", " sliding_window=", "extra_retained_tokens"),
        )
    ),
    Touched("vllm.v1.kv_cache_interface:KVCacheSpec", by="worker.py memory.py kv_cache/specs.py"),
    Touched(
        "vllm.v1.kv_cache_interface:KVQuantMode",
        by="kv_cache/specs.py",
        fields="NONE FP8_PER_TOKEN_HEAD INT8_PER_TOKEN_HEAD",
    ),
    Touched(
        "vllm.v1.kv_cache_interface:KVCacheConfig",
        by="worker.py memory.py kv_cache/specs.py",
        fields="num_blocks kv_cache_tensors kv_cache_groups",
    ),
    Touched(
        "vllm.v1.kv_cache_interface:KVCacheTensor",
        by="memory.py kv_cache/specs.py",
        fields="size layers offset layer_stride",
    ),
    Touched("vllm.v1.kv_cache_interface:KVCacheGroupSpec", by="worker.py", fields="layer_names"),
)

_SAMPLING = (
    Touched(
        "vllm.sampling_params:SamplingParams",
        by="sample requests.py runner.py platform.py models/profile.py",
        called="top_p= min_p= seed= repetition_penalty= presence_penalty= logprobs=",
        fields="temperature top_p top_k min_p seed repetition_penalty frequency_penalty "
        "presence_penalty min_tokens num_logprobs prompt_logprobs all_stop_token_ids "
        "allowed_token_ids logit_bias bad_words_token_ids logprob_token_ids structured_outputs "
        "extra_args thinking_token_budget watermarking prompt_logprob_token_ids "
        "prompt_logprob_start trace_decode_token_ids",
    ),
    Touched("vllm:SamplingParams", by="sample models/profile.py"),
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

TOUCHED = (
    *_CONFIGURATION,
    *_ENGINE_ARGUMENTS,
    *_PLATFORM,
    *_WORKER,
    *_STEP,
    *_SCHEDULER,
    *_KV_CACHE,
    *_SAMPLING,
)
