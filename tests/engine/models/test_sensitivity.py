# SPDX-License-Identifier: Apache-2.0
"""Small models are sensitive to each key and array, or it is listed here.

A family is blind to a key where transformers' own log-probabilities stay as they are when it
changes. No comparison could then tell whether ours reads it.
"""

from fnmatch import fnmatch

import numpy as np
import pytest
import torch
from engine.config_json.test_published_config import TOLERANCE
from engine.models.changed import of_text, shapes, toy
from engine.models.published import FAMILIES

pytestmark = pytest.mark.slow

#: Least effect on log-probabilities of a change that is seen.
SEEN = 100 * TOLERANCE
LARGE = 3.0  # standard deviations that an array is changed by; a number alone by 3
OTHER_ARRAYS = float("inf")  # of other shapes or names, so that files themselves would differ


def _names(words):
    return frozenset(words.split())


#: Keys that change nothing of what any family's class computes, by reason.
WITHOUT_EFFECT = {
    "training": _names(
        "attention_dropout attn_pdrop classifier_dropout dropout embd_pdrop emb_pdrop "
        "embedding_dropout hidden_dropout resid_pdrop residual_dropout summary_first_dropout "
        "initializer_range router_aux_loss_coef input_jitter_noise w_init_variance_scale "
        "final_w_init_variance_scale rescale_prenorm_residual time_step_init_scheme "
        "time_step_scale linear_a_log_max linear_a_log_min linear_dt_init_floor "
        "linear_dt_max linear_dt_min moe_jitter_eps moe_loss_weight altup_coef_clip"
    ),
    "tokens": _names("bos_token_id eos_token_id pad_token_id eod_token_id"),
    "what else is returned": _names(
        "output_attentions output_hidden_states output_router_logits problem_type use_cache "
        "id2label label2id num_logits_to_keep"
    ),
    "other heads than that of the next token": _names(
        "summary_type summary_use_proj summary_activation summary_proj_to_labels"
    ),
    "how it is computed": _names(
        "chunk_size chunk_size_feed_forward mamba_chunk_size pretraining_tp "
        "use_associative_scan use_mamba_kernels use_mambapy residual_in_fp32 "
        "mamba_ssm_cache_dtype moe_shared_expert_overlap reorder_and_upcast_attn "
        "attention_softmax_in_fp32 scale_attention_softmax_in_fp32"
    ),
    "a decoder is a decoder": _names("is_decoder is_encoder_decoder"),
    "the longest text, which is vLLM's to limit": _names(
        "max_position_embeddings max_seq_len model_max_length"
    ),
    "layers that draft, which transformers does not build": _names(
        "num_nextn_predict_layers mtp_layers_block_type"
    ),
}
GENERAL = frozenset().union(*WITHOUT_EFFECT.values())
#: The same of single families, by reason and pattern of `family:key`. For the first, transformers
#: builds no model: shapes are bound to one another, and one key alone cannot change.
OF_FAMILY = {
    "bound to other keys": _names(
        "deepseek_v[23]*:head_dim deepseek_*:num_key_value_heads "
        "deepseek_v4:rope_parameters.compress.partial_rotary_factor "
        "glm4_moe_lite:num_key_value_heads glm_moe_dsa:num_key_value_heads "
        "glm5_next:num_attention_heads glm5_next:num_key_value_heads glm5_next:qk_rope_head_dim "
        "glm5_next:index_topk "
        "longcat_flash:head_dim "
        "longcat_flash:num_key_value_heads minicpm3:num_key_value_heads "
        "minicpm3:qk_rope_head_dim kimi_linear:num_key_value_heads "
        "mistral4:num_key_value_heads mistral4:rope_parameters.partial_rotary_factor "
        "phimoe:num_attention_heads phimoe:hidden_size mamba2:expand mamba2:head_dim "
        "mamba2:hidden_size mamba2:num_heads granitemoehybrid:hidden_size "
        "granitemoehybrid:mamba_n_heads granitemoehybrid:mamba_d_head "
        "granitemoehybrid:mamba_expand falcon_h1:mamba_d_head falcon_h1:mamba_d_ssm "
        "falcon_h1:mamba_n_heads jamba:attn_layer_period lfm2:full_attn_idxs "
        "gemma3n_text:intermediate_size gemma3n_text:num_hidden_layers "
        "gemma4_text:num_hidden_layers gemma4_text:layer_types "
        "ernie4_5_vl_moe:hidden_size ernie4_5_vl_moe:num_attention_heads "
        "ernie4_5_vl_moe:moe_intermediate_size qwen4_exp:layer_types qwen4_exp:ngram_size "
        "qwen4_exp:ple_embed_dim qwen4_exp:ple_layer_ids"
    ),
    "transformers' class refuses or does not build it": _names(
        "dbrx:tie_word_embeddings laguna:moe_apply_router_weight_on_input "
        "gpt_bigcode:add_cross_attention "
        "recurrent_gemma:rope_parameters.rope_type ministral3:rope_parameters.rope_type "
        "mistral4:rope_parameters.rope_type cohere_compass:pooling "
        "cohere_compass:rope_parameters.*.rope_type glm_ocr:rope_parameters.rope_type "
        "ernie4_5_vl_moe:rope_parameters.rope_type ernie4_5_vl_moe:rope_parameters.mrope_section "
        "glm_ocr:rope_parameters.partial_rotary_factor glm_ocr:rope_parameters.mrope_section "
        "qwen4_exp:indexer_budget qwen4_exp:indexer_kv_heads qwen4_exp:output_gate_type"
    ),
    "derived from other keys, or other keys say the same layer by layer": _names(
        "deepseek_*:qk_head_dim glm4_moe_lite:qk_head_dim kimi_linear:qk_head_dim "
        "glm_moe_dsa:qk_head_dim glm_moe_dsa:head_dim glm_moe_dsa:first_k_dense_replace "
        "deepseek_v32:first_k_dense_replace "
        "hy_v4:head_dim hy_v4:num_key_value_heads hy_v4:qk_head_dim "
        "glm5_next:head_dim glm5_next:qk_head_dim glm5_next:first_k_dense_replace "
        "deepseek_v4:rope_theta deepseek_v4:compress_rope_theta deepseek_v4:qk_rope_head_dim "
        "deepseek_v4:partial_rotary_factor "
        "minicpm3:qk_head_dim mistral4:qk_head_dim minicpm3:head_dim deepseek_v2:head_dim "
        "kimi_linear:head_dim "
        "laguna:num_attention_heads *:sliding_window_pattern *:_sliding_window_pattern "
        "*:no_rope_layer_interval *:interleave_moe_layer_step "
        "exaone_moe:first_k_dense_replace afmoe:global_attn_every_n_layers mamba:expand "
        "falcon_mamba:expand nemotron_h:expand falcon_h1:mamba_expand "
        "llama4_text:layer_types dbrx:num_key_value_heads dbrx:ffn_config.hidden_size "
        "dbrx:attn_config.rope_theta minimax_m3_vl:rotary_dim qwen4_exp:number_of_conv_states"
    ),
    "of layers or ropes that the small model does not have": _names(
        "qwen2_moe:intermediate_size mellum:intermediate_size "
        "phi3:original_max_position_embeddings phimoe:original_max_position_embeddings "
        "phimoe:rope_parameters.long_* minicpm3:rope_parameters.long_factor "
        "gemma4_text:moe_intermediate_size gemma4_text:num_experts gemma4_text:top_k_experts"
    ),
    "it counts while the model is trained": _names("[!p]*:router_jitter_noise"),
    "how the first weights are drawn": _names(
        "*mamba*:time_step_max *mamba*:time_step_min *mamba*:time_step_floor "
        "nemotron_h:time_step_max nemotron_h:time_step_floor hy_v4:learnable_sink_init"
    ),
    "the class does not compute with it": _names(
        "gemma:use_bidirectional_attention gemma2:use_bidirectional_attention gptj:n_positions "
        "gemma3_text:attn_logit_softcapping deepseek_v2:norm_topk_prob gpt_oss:hidden_act "
        "phimoe:num_experts_per_tok dots1:max_window_layers nemotron_h:attention_bias "
        "nemotron_h:mamba_proj_bias nemotron_h:n_shared_experts nemotron_h:sliding_window "
        "nemotron_h:time_step_limit nemotron_h:tie_word_embeddings "
        "deepseek_v4:n_shared_experts deepseek_v4:norm_topk_prob deepseek_v4:attention_bias "
        "deepseek_v32:mlp_bias glm_moe_dsa:mlp_bias minimax_m3_vl:hidden_act "
        "cohere_compass:rope_parameters.*.mrope_interleaved mllama:tie_word_embeddings "
        "ernie4_5_vl_moe:tie_word_embeddings glm5_next:tie_word_embeddings "
        "kimi_linear:tie_word_embeddings mamba2:time_step_rank gpt_bigcode:num_key_value_heads "
        "qwen4_exp:tie_word_embeddings qwen4_exp:rope_parameters.mrope_section"
    ),
    "files have what is computed by it": _names(
        "qwen4_exp:ngram_vocab_size_base qwen4_exp:seed qwen4_exp:split_ngram_parts"
    ),
}
#: Keys that change nothing elsewhere, by which a family computes: n-grams end with a text.
COUNTED = _names("qwen4_exp:eos_token_id")
#: Patterns of `family:array` that change nothing, with the reason.
ARRAYS: dict[str, str] = {
    "*:model.multi_modal_projector.*": "of images",
    "ernie4_5_vl_moe:*.vision_moe.*": "of images",
    "ernie4_5_vl_moe:model.resampler_model.*": "of images",
    "*:model.vision*": "of images",
    "*:model.visual.*": "of images",
    "mllama:model.language_model.layers.[02].*": "of layers that attend to images",
    "deepseek_v4:*.layers.2.self_attn.compressor.*": "of groups that the text does not fill",
    # It adds the same to all scores where no position is rotated.
    "cohere_compass:*.layers.[12].self_attn.k_proj.bias": "without RoPE",
}

PATTERNS = frozenset().union(*OF_FAMILY.values())


def family(original):
    return original.name.partition(",")[0]


def listed(table, name):
    return any(fnmatch(name, pattern) for pattern in table)


@pytest.fixture
def original(request, tmp_path):
    return toy(request.param, tmp_path / "published")


def seen(original, model):
    """Returns the largest difference of log-probabilities."""
    if shapes(model) != shapes(original.model):
        return OTHER_ARRAYS
    return float(np.abs(of_text(model) - original.expected).max())


def effects(original):
    """Returns the largest effect of each key's changes; None if transformers lacks the model."""
    found = {}
    for change in original.changes():
        if change.added:
            continue
        try:
            effect = seen(original, original.changed(change))
        except Exception:
            found.setdefault(change.key, None)
            continue
        if np.isfinite(effect) or effect == OTHER_ARRAYS:
            found[change.key] = max(effect, found.get(change.key) or 0.0)
    return found


@pytest.mark.parametrize("original", FAMILIES, indirect=True)
def test_each_key_counts_or_is_listed(original):
    wrong, moved = {}, 0
    for key, effect in effects(original).items():
        moved += effect is not None and effect >= SEEN
        last = key.rpartition(".")[2]
        of_family = f"{family(original)}:{key}"
        silent = (last in GENERAL and of_family not in COUNTED) or listed(PATTERNS, of_family)
        if silent and effect is not None and effect > TOLERANCE:
            wrong[key] = f"is listed, and changes {effect:.2g}"
        if not silent and effect is None:
            wrong[key] = "no change of it is a model"
        if not silent and effect is not None and effect < SEEN:
            wrong[key] = f"changes {effect:.2g} only"
    print(f"\n{original.name}: {moved} keys move transformers' model")
    assert not wrong, "\n".join(f"{original.name}:{key} {why}" for key, why in wrong.items())


def arrays(model):
    """Returns the model's parameters and stored buffers by name."""
    files = model.state_dict()
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    for name, array in (*model.named_parameters(), *model.named_buffers()):
        if name in files and array.is_floating_point() and name not in tied:
            yield name, array


@pytest.mark.parametrize("original", FAMILIES, indirect=True)
def test_each_array_counts_or_is_listed(original):
    wrong, generator = {}, torch.Generator().manual_seed(1)
    base = original.expected
    for name, array in arrays(original.model):
        before = array.data.clone()
        noise = torch.full(before.shape, LARGE)
        if before.numel() > 1:
            spread = max(before.std().item(), 0.2)
            noise = LARGE * spread * torch.randn(array.shape, generator=generator)
        effect = 0.0
        for each in (noise, -noise):  # a bound may only count on one side
            array.data = before + each
            effect = max(effect, float(np.abs(of_text(original.model) - base).max()))
        array.data = before
        silent = listed(ARRAYS, f"{family(original)}:{name}")
        if silent and effect > TOLERANCE:
            wrong[name] = f"is listed, and changes {effect:.2g}"
        if not silent and effect < SEEN:
            wrong[name] = f"changes {effect:.2g} only"
    assert not wrong, "\n".join(f"{original.name}:{name} {why}" for name, why in wrong.items())
