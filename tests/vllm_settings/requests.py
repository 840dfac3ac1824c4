# SPDX-License-Identifier: Apache-2.0
"""The effect of each field of the requests to vLLM's OpenAI servers."""

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm_settings.row import Row, Table, honored, read_by_vllm, refused, union, without_meaning
from vllm_settings.sampling import SAMPLING_PARAMS

#: Fields with other names than the `SamplingParams` fields that they set.
_BECOMES = {
    "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "top_logprobs": "logprobs",
    "stream": "output_kind",
    "response_format": "structured_outputs",
    "text": "structured_outputs",
    "echo": "prompt_logprobs",
    "vllm_xargs": "extra_args",
    "include": "logprobs",
}


def _becoming(names: str) -> Table:
    """Maps fields that set a `SamplingParams` field to its row."""
    table = {}
    for name in names.split():
        field = _BECOMES.get(name, name)
        kind = SAMPLING_PARAMS[field].kind
        table[name] = Row(kind, f"as `SamplingParams.{field}`")
    return table


_ALL = (
    "stream temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty "
    "seed stop stop_token_ids ignore_eos logit_bias skip_special_tokens "
    "include_stop_str_in_output structured_outputs vllm_xargs watermarking "
)
_CHAT_AND_COMPLETION = _ALL + (
    "max_tokens n min_tokens spaces_between_special_tokens prompt_logprobs logprob_token_ids "
    "allowed_token_ids bad_words logprobs echo response_format repetition_detection "
    "stream_interval thinking_token_budget routed_experts_prompt_start "
)
_SERVER = "vLLM's own server reads it"
_EVERYWHERE = union(
    (
        honored(
            {
                "e2e/test_prefix_cache.py::test_tenants_share_by_salt_and_not_otherwise": (
                    "cache_salt"
                ),
                "e2e/test_serve_disaggregated.py::test_text_and_drafts_are_those_of_one_server": (
                    "kv_transfer_params"
                ),
            }
        ),
        read_by_vllm(
            {
                _SERVER: (
                    "model priority request_id session_id tools tool_choice include_reasoning "
                    "chat_template_kwargs media_io_kwargs mm_processor_kwargs mm_payload "
                    "return_mm_kwargs"
                )
            }
        ),
        without_meaning(
            {
                "only used with --ec-transfer-config, which is rejected": "ec_transfer_params",
                "vLLM's server ignores it, too": "user",
            }
        ),
    )
)


def _without(names: str) -> Table:
    """Returns the fields that all classes share, without some that a class lacks or changes."""
    return {name: row for name, row in _EVERYWHERE.items() if name not in names.split()}


_BOTH = honored(
    {
        "e2e/test_parameters.py::test_a_beam_is_the_greedy_text_and_more_find_one_as_likely": (
            "use_beam_search"
        )
    }
) | read_by_vllm(
    {
        _SERVER: (
            "stream_options length_penalty truncate_prompt_tokens "
            "truncation_side add_special_tokens return_tokens_as_token_ids "
            "return_token_ids return_token_offsets return_weight_versions"
        )
    }
)

CHAT = union(
    (
        _becoming(_CHAT_AND_COMPLETION + "max_completion_tokens top_logprobs"),
        _EVERYWHERE,
        _BOTH,
        read_by_vllm(
            {
                _SERVER: (
                    "messages reasoning_effort parallel_tool_calls add_generation_prompt "
                    "continue_final_message documents chat_template return_prompt_text"
                )
            }
        ),
    )
)

COMPLETION = union(
    (
        _becoming(_CHAT_AND_COMPLETION),
        _without(
            "tools tool_choice include_reasoning chat_template_kwargs media_io_kwargs "
            "mm_processor_kwargs"
        ),
        _BOTH,
        read_by_vllm({_SERVER: "prompt suffix"}),
        refused({"only tokens are accepted as input": "prompt_embeds"}),
    )
)

RESPONSES = union(
    (
        _becoming(
            _ALL + "max_output_tokens top_logprobs text include spaces_between_special_tokens"
        ),
        _without("user"),
        read_by_vllm(
            {
                _SERVER: (
                    "background input instructions max_tool_calls parallel_tool_calls "
                    "previous_response_id reasoning store truncation enable_response_messages "
                    "previous_input_messages"
                )
            }
        ),
        without_meaning(
            {
                "vLLM's server only repeats it in the response": (
                    "metadata service_tier user safety_identifier prompt_cache_options "
                    "prompt_cache_retention"
                ),
                "vLLM's server only repeats it in the response; `cache_salt` separates prompts": (
                    "prompt_cache_key"
                ),
            }
        ),
        refused({"vLLM's server stores no prompt templates": "prompt"}),
    )
)

#: Rows by class.
TABLES = {
    ChatCompletionRequest: CHAT,
    CompletionRequest: COMPLETION,
    ResponsesRequest: RESPONSES,
}
