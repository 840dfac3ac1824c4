# SPDX-License-Identifier: Apache-2.0
"""Keys of config.json that do not affect what a text model computes.

A key must not be listed if transformers' class of the family computes with it
(`tests/engine/config_json/test_inert_keys.py` reads the classes). A key with effects for some
values belongs in `fixed_values`, with the values that the module computes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping


def names(words: str) -> frozenset[str]:
    return frozenset(words.split())


#: Endings of keys for token ids and for the positions of images and audio among tokens.
_OF_TOKENS = ("_token_id", "_token_ids", "_token_index", "_token_idx", "_placeholder")
#: Keys for training only, and for dtypes, which vLLM chooses.
_OF_TRAINING = re.compile(r"dropout|_pdrop$|initializer|(^|_)(dtype|fp16|bf16|fp32)$")

#: Keys of draft layers (multi-token prediction), which are loaded separately.
_OF_DRAFTS = re.compile(r"(^|_)mtp(_|$)")

#: Inert keys by reason.
GROUPS: Mapping[str, frozenset[str]] = {
    "names and versions": names(
        "_attn_implementation _attn_implementation_autoset _attn_implementation_internal "
        "_commit_hash _flash_attn_2_enabled _name_or_path architectures attn_implementation "
        "auto_map custom_pipelines experts_implementation finetuning_task language license "
        "mlx_lm_version mlx_version model_name model_type name_or_path tags task_specific_params "
        "tokenizer_class tokenizer_type transformers.js_config transformers_version "
        "is_llama_config unsloth_fixed unsloth_version"
    ),
    "dtypes, which vLLM chooses": names(
        "bf16 dtype fp16 fp32 fp32_residual_connection mamba_ssm_cache_dtype mamba_ssm_dtype "
        "residual_in_fp32 torch_dtype use_bfloat16 use_fp16"
    ),
    "packed weights, which mlx-lm reads for itself": names(
        "compression_config hf_quant_config is_quantized pre_quantization_dtype quantization "
        "quantization_config"
    ),
    "outputs that a server does not return": names(
        "calc_logits_for_entire_prompt is_decoder keys_to_ignore_at_inference "
        "keep_mlp_outputs num_logits_to_keep output_attentions output_hidden_states "
        "output_past output_router_logits return_dict torchscript use_cache use_return_dict"
    ),
    "heads of other tasks": names(
        "classifier_bias classifier_dropout id2label label2id num_labels problem_type "
        "summary_activation summary_first_dropout summary_proj_to_labels summary_type "
        "summary_use_proj"
    ),
    "what vLLM's poolers and their routes read": names(
        "classifier_from_token head_dtype is_matryoshka is_original_qwen3_reranker "
        "matryoshka_dimensions method sbert_ce_default_activation_function sentence_transformers "
        "use_sep_token"
    ),
    "defaults of generation, which vLLM reads in generation_config.json": names(
        "bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping "
        "encoder_no_repeat_ngram_size exponential_decay_length_penalty length_penalty max_length "
        "min_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences "
        "output_scores prefix remove_invalid_values repetition_penalty return_dict_in_generate "
        "suppress_tokens temperature top_k top_p typical_p"
    ),
    "noise of training": names(
        "input_jitter_noise moe_input_jitter_eps moe_jitter_eps router_jitter_noise"
    ),
    "first weights of training": names(
        "emb_init_std final_w_init_variance_scale init_device init_method init_method_std "
        "init_std initializer_factor initializer_range linear_a_log_max linear_a_log_min "
        "linear_dt_init_floor linear_dt_max linear_dt_min rescale_prenorm_residual "
        "time_step_init_scheme use_init_std w_init_variance_scale"
    ),
    "losses of training": names(
        "aux_loss_alpha aux_loss_coef load_balance_coeff moe_aux_loss_coef "
        "moe_router_bias_update_speed moe_z_loss_coef mtp_loss_scaling_factor router_aux_loss "
        "router_aux_loss_coef router_bias_update_rate router_z_loss_coef seq_aux z_loss "
        "z_loss_coefficient"
    ),
    "how training or another engine goes about it": names(
        "chunk_size_feed_forward ep_size gradient_checkpointing moe_token_dispatcher_type "
        "pretraining_tp pruned_heads reorder_and_upcast_attn scale_attention_softmax_in_fp32 "
        "attention_softmax_in_fp32 tf_legacy_loss tp_size use_associative_scan use_flash_attention "
        "use_flash_attn use_mamba_kernels use_mambapy use_cache_kernel use_cache_quantization "
        "cache_implementation use_fused_mlp use_fused_rmsnorm use_grouped_mm"
    ),
    "the longest text, which vLLM reads": names(
        "max_model_len max_position_embeddings max_seq_len max_seq_length max_sequence_length "
        "model_max_length n_positions seq_len seq_length"
    ),
    "draft layers, which are loaded separately": names("num_nextn_predict_layers"),
    "widths of the padding of token tables": names("pad_vocab_size_multiple pad_token"),
}
GENERAL: frozenset[str] = frozenset().union(*GROUPS.values())

#: Parts of a multimodal configuration that the text model does not need.
BESIDE_TEXT: frozenset[str] = names(
    "audio_config audio_ms_per_token audio_soft_tokens_per_image ignore_index image_grid_pinpoints "
    "image_seq_length mm_tokens_per_image multimodal_projector_bias patch_size "
    "projection_hidden_size projection_layer_norm_eps projector_config projector_hidden_act "
    "projector_hidden_size media_placeholder_token_id merged_hidden_size out_hidden_size "
    "spatial_merge_size tie_word_embeddings vision_config vision_feature_layer "
    "vision_feature_select_strategy vision_soft_tokens_per_image vocab_size"
)

_OF_STEPS = names("time_step_floor time_step_max time_step_min time_step_scale")
#: Keys without effect in one module of mlx-lm.
OF_MODULE: Mapping[str, frozenset[str]] = {
    # Both transformers' class and the module read attn_config's kv_n_heads instead.
    "dbrx": names("num_key_value_heads"),
    "deepseek_v41": names(  # of layers that draft
        "dspark_markov_rank dspark_n_routed_experts dspark_num_experts_per_tok "
        "dspark_target_layer_ids"
    ),
    "ernie4_5_moe_vl": names("vision_config"),
    "falcon_h1": names("mlp_expansion_factor"),  # intermediate_size is used
    "falcon_ocr": names(  # of images, and token ids
        "channel_size eos_id img_end_id img_id img_row_sep_id img_start_id spatial_patch_size "
        "temporal_patch_size"
    ),
    "gemma3_text": names("tie_word_embeddings"),  # it checks whether a head exists
    # No key is rotated, and draft layers are loaded separately.
    "glm5_next": names("index_share_for_mtp_iteration indexer_rope_interleave"),
    "granitemoehybrid": names("mamba_chunk_size"),  # only splits a sum
    # The first is always 4, and transformers' router has no norm.
    "inkling": names("number_of_conv_states rms_norm_eps_moe_gate"),
    "jina_vlm": names(  # a dtype, and a norm that FFNs do not have
        "block_config.attn_config.fp32 block_config.ffn_config.lnorm_config.bias "
        "block_config.ffn_config.lnorm_config.eps block_config.ffn_config.lnorm_config.type "
        "block_config.ffn_config.lnorm_config.with_affine"
    ),
    "kolibri1": names("intermediate_size"),  # no layer is dense
    "lfm2-vl": names(
        "do_image_splitting downsample_factor encoder_patch_size max_image_tokens max_num_patches "
        "max_pixels_tolerance max_tiles min_image_tokens min_tiles projector_bias "
        "projector_use_layernorm tile_size use_image_special_tokens use_thumbnail"
    ),  # of images only
    "limite": names(  # notes, repetitions of other keys, and a base of ropes by layer
        "checkpoint_step checkpoint_world_size global_every mlp_formula mlp_ratio mudd_at "
        "mudd_hist_convention padded_vocab_size rope_base_global rope_frac "
        "sliding_window_convention source_format source_metadata_assumptions tokenizer_vocab_size"
    ),
    "mamba": _OF_STEPS,  # of weight initialization
    "mamba2": _OF_STEPS | names("chunk_size"),
    "molmo2": names("adapter_config vit_config"),  # of images only
    "nemotron_h": _OF_STEPS  # the width follows from the heads; shared experts, from the arrays
    | names(
        "n_shared_experts chunk_size expand moe_shared_expert_overlap rope_theta sliding_window"
    ),
    "qwen4_exp": names("intermediate_size"),  # no layer is dense
    # Only for texts longer than seq_length, which vLLM does not admit.
    "qwen": names("use_dynamic_ntk use_logn_attn"),
    "recurrent_gemma": names("tie_word_embeddings"),  # as gemma3_text
    "youtu_vl": names("vision_config"),
    "zaya1_vl": names(  # of images, and of kernels of the code that trained it
        "activation_func_fp8_input_store apply_rope_fusion bias_activation_fusion "
        "projector_hidden_act vision_config"
    ),
}


def is_inert(key: str, module: str, beside_text: bool) -> bool:
    """Whether a key has no effect on what a module computes.

    `beside_text`: whether the key is next to a `text_config` that the module reads.
    """
    return (
        key in GENERAL
        or key.endswith(_OF_TOKENS)
        or _OF_TRAINING.search(key) is not None
        or _OF_DRAFTS.search(key) is not None
        or key in OF_MODULE.get(module, ())
        or (beside_text and key in BESIDE_TEXT)
    )
