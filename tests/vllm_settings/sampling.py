# SPDX-License-Identifier: Apache-2.0
"""The effect of each field of `SamplingParams` and `PoolingParams`."""

from vllm_settings.row import honored, read_by_vllm, refused, union, without_meaning

_PROCESSORS = (
    "engine/sample/test_custom.py::"
    "test_processor_follows_requests_through_adds_removes_and_reorderings"
)
_LAW = "engine/sample/test_sampler.py::test_draws_follow_the_defined_distribution"
_EFFECT = "e2e/test_parameters.py::test_a_field_changes_the_answer"

SAMPLING_PARAMS = union(
    (
        honored(
            {
                _LAW: "temperature top_p top_k min_p logit_bias allowed_token_ids",
                "engine/sample/test_penalties.py::test_same_penalised_logits_as_vllm": (
                    "presence_penalty frequency_penalty repetition_penalty"
                ),
                "engine/sample/test_sampler.py::"
                "test_seeded_request_draws_the_same_alone_and_in_a_batch": "seed",
                "engine/sample/test_bad_words.py::"
                "test_words_are_matched_against_tokens_never_fetched": "_bad_words_token_ids",
                "e2e/test_sampling.py::test_json_schema_bias_bad_words_and_min_tokens": (
                    "structured_outputs bad_words min_tokens"
                ),
                "e2e/test_logprobs.py::test_sample_and_prompt_logprobs": "logprobs prompt_logprobs",
                "engine/sample/test_logprobs.py::"
                "test_logprob_token_ids_are_reported_in_the_order_given": "logprob_token_ids",
                _EFFECT: (
                    "n stop stop_token_ids ignore_eos max_tokens flat_logprobs detokenize "
                    "skip_special_tokens "
                    "include_stop_str_in_output output_kind stream_interval repetition_detection "
                    "skip_reading_prefix_cache"
                ),
                _PROCESSORS: "extra_args",
            }
        ),
        read_by_vllm({"vLLM's own detokenizer reads it": "spaces_between_special_tokens"}),
        without_meaning(
            {
                "internal to vLLM": "skip_clone",
                "vLLM sets it from other fields": (
                    "output_text_buffer_length _eos_token_id _all_stop_token_ids "
                    "_watermarking_skipped"
                ),
                "only used with --enable-return-routed-experts, which is rejected": (
                    "routed_experts_prompt_start"
                ),
            }
        ),
        refused(
            {
                "reasoning tokens are not counted": "thinking_token_budget",
                "the sampler has no watermark": "watermarking",
                "`prompt_logprobs` gives the most likely ones": (
                    "prompt_logprob_token_ids prompt_logprob_start"
                ),
                "tokens are always sampled": "trace_decode_token_ids",
            }
        ),
    )
)

POOLING_PARAMS = refused(
    {
        "by a model that generates text; --runner pooling accepts them": (
            "use_activation dimensions step_tag_id returned_token_ids task requires_token_ids "
            "skip_reading_prefix_cache late_interaction_params late_chunking_params extra_kwargs "
            "output_kind"
        )
    }
)
