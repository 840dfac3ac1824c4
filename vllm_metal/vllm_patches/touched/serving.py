# SPDX-License-Identifier: Apache-2.0
"""Names that we use where requests come in, before the engine."""

from __future__ import annotations

from vllm_metal.vllm_patches.touched.entry import Touched

_RENDERING = "serving/response_cache/rendering.py"
_REQUESTS = f"{_RENDERING} vllm_patches/first_mistake.py"

SERVING = (
    Touched(
        "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest",
        by=_REQUESTS,
    ),
    Touched(
        "vllm.entrypoints.openai.completion.protocol:CompletionRequest",
        by=_REQUESTS,
    ),
    Touched(
        "vllm.entrypoints.anthropic.protocol:AnthropicMessagesRequest",
        by=_REQUESTS,
    ),
    Touched(
        "vllm.entrypoints.openai.responses.protocol:ResponsesRequest",
        by="vllm_patches/first_mistake.py",
    ),
    Touched(
        "vllm.entrypoints.scale_out.render.serving:ServingRender",
        by=_RENDERING,
        calls={
            "render_chat_request": "request",
            "render_completion_request": "request",
            "render_messages_request": "request",
        },
    ),
    Touched("vllm.entrypoints.serve.engine.protocol:ErrorResponse", by=_RENDERING),
    Touched(
        "vllm.utils.argparse_utils:FlexibleArgumentParser",
        by="serving/start.py",
        calls={"load_config_file": "file_path"},
    ),
    Touched(
        "vllm.v1.engine.async_llm:AsyncLLM",
        by=f"serving/deadline.py {_RENDERING}",
        calls={"abort": "request_id"},
    ),
    Touched(
        "vllm.v1.engine.async_llm:AsyncLLM",
        by="vllm_patches/server_end.py",
        fields="errored",
        methods={"shutdown": "timeout"},
    ),
    Touched(
        "vllm.entrypoints.launchers.api_server.entry:serve_http",
        by="vllm_patches/server_end.py",
    ),
    Touched(
        "vllm.v1.engine.output_processor:OutputProcessor",
        by="serving/deadline.py",
        fields="external_req_ids",
    ),
    Touched(
        "vllm.v1.engine.output_processor:OutputProcessor",
        by="vllm_patches/streaming_sessions.py",
        fields="request_states",
        methods={
            "process_outputs": "engine_core_outputs engine_core_timestamp iteration_stats "
            "weight_version",
            "add_request": "request prompt parent_req request_index queue",
        },
    ),
    Touched(
        "vllm.v1.engine.output_processor:OutputProcessor",
        by="vllm_patches/engine_outputs.py",
        methods={"abort_requests": "request_ids internal"},
    ),
    Touched(
        "vllm.v1.engine.output_processor:RequestState",
        by="vllm_patches/streaming_sessions.py",
        fields="streaming_input",
    ),
    Touched(
        "vllm.v1.engine.output_processor:OutputProcessorOutput",
        by="vllm_patches/streaming_sessions.py",
        fields="request_outputs reqs_to_abort",
    ),
    Touched(
        "vllm.v1.engine.input_processor:InputProcessor",
        by="vllm_patches/streaming_sessions.py vllm_patches/cache_salts.py",
        methods={
            "process_inputs": "request_id prompt params supported_tasks arrival_time lora_request "
            "tokenization_kwargs trace_headers priority data_parallel_rank resumable session_id "
            "kv_hints"
        },
    ),
    Touched(
        "vllm.v1.engine:FinishReason",
        by="vllm_patches/streaming_sessions.py",
        fields="ERROR ABORT",
    ),
    Touched(
        "vllm.v1.engine:EngineCoreRequest",
        by="vllm_patches/streaming_sessions.py vllm_patches/cache_salts.py",
        fields="request_id resumable sampling_params cache_salt",
    ),
)
