# SPDX-License-Identifier: Apache-2.0
"""No ignored key has an effect in transformers' or mlx-lm's sources."""

import ast
import functools
import re
from pathlib import Path

import mlx_lm.models
import pytest
import transformers
from mlx_lm.utils import MODEL_REMAPPING
from transformers.models.auto.configuration_auto import (
    CONFIG_MAPPING_NAMES,
    model_type_to_module_name,
)

from vllm_metal.engine.config_json import config_refusals, fixed_values, implied_values, inert_keys

SOURCES = {path.stem: path for path in Path(mlx_lm.models.__file__).parent.glob("*.py")}
WITH_ARGUMENTS = [name for name, path in SOURCES.items() if "class ModelArgs" in path.read_text()]


@functools.cache
def tree(module):
    return ast.parse(SOURCES[module].read_text())


def fields(module):
    """Returns the fields of the module's dataclasses."""
    classes = [node for node in ast.walk(tree(module)) if isinstance(node, ast.ClassDef)]
    return {
        each.target.id
        for node in classes
        if node.decorator_list
        for each in node.body
        if isinstance(each, ast.AnnAssign)
    }


@functools.cache
def used(module):
    """Returns names of attributes and strings in the module and its imports."""
    names = set()
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
        elif isinstance(node, ast.ImportFrom) and node.level == 1:
            imported = [node.module] if node.module else [alias.name for alias in node.names]
            for name in imported:
                if name in SOURCES and name != module:
                    names |= used(name)
    return names


#: Fields that modules name and do not use, and why no other value of them changes anything.
UNUSED = {
    "ernie4_5_moe": {"moe_capacity"},  # of training: no expert turns a token away
    "kimi_linear": {"rope_theta"},  # positions are not used
    "lille-130m": {"block_size"},  # the longest text
    # Layers that have experts only; `fixed_values` and `implied_values` refuse others.
    "llama4_text": {"intermediate_size"},
    "mellum": {"intermediate_size"},
    "qwen2_moe": {"intermediate_size"},
    # Fields of blocks with windows and sinks, which `config_refusals` refuses.
    "nemotron-nas": {"sparsify", "unshifted_sink", "use_prefill_window_in_sink_attention"},
    "olmo": {"vocab_size"},  # embedding_size counts
    # Refused, whatever they say.
    "plamo2": {"attention_window_size", "full_attention_idx"},
    # Fields of images.
    "plamo3": {"image_feature_size", "image_proj_type", "linear_type"},
}


@pytest.mark.parametrize("module", WITH_ARGUMENTS)
def test_what_a_module_names_and_does_not_use_is_judged(module):
    judged = fixed_values.keys(module) | implied_values.keys(module) | config_refusals.keys(module)
    lost = {
        field
        for field in fields(module) - used(module) - judged
        if not inert_keys.is_inert(field, module, False)
    }
    assert lost == UNUSED.get(module, set())


#: Names that transformers' classes read and that change no number a server returns.
READ_BY_CLASSES = {
    *["attention_dropout", "attn_pdrop", "classifier_dropout", "emb_pdrop", "embd_pdrop"],
    *["embedding_dropout", "hidden_dropout", "input_jitter_noise", "resid_pdrop"],
    *["residual_dropout", "router_jitter_noise"],  # in training only
    *["final_w_init_variance_scale", "initializer_range", "linear_a_log_max", "linear_a_log_min"],
    *["linear_dt_init_floor", "linear_dt_max", "linear_dt_min", "rescale_prenorm_residual"],
    *["time_step_floor", "time_step_init_scheme", "time_step_max", "time_step_min"],
    *["time_step_scale", "w_init_variance_scale"],  # first weights, but for nemotron_h
    *["num_labels", "problem_type", "summary_first_dropout", "summary_proj_to_labels"],
    *["summary_use_proj", "is_decoder"],  # heads of other tasks, cross-attention
    *["output_attentions", "output_hidden_states", "output_router_logits", "return_dict"],
    *["num_logits_to_keep", "router_aux_loss_coef", "use_cache"],  # what is returned
    *["attention_softmax_in_fp32", "dtype", "reorder_and_upcast_attn", "residual_in_fp32"],
    *("scale_attention_softmax_in_fp32",),  # dtypes of results in between
    *["_attn_implementation", "chunk_size", "mamba_chunk_size", "use_associative_scan"],
    *["use_mamba_kernels", "use_mambapy"],  # by which code the same is computed
    *["max_position_embeddings", "max_seq_len"],  # lengths of buffers
    *["audio_token_id", "image_token_id", "pad_token_id", "video_token_id"],  # of tokens
    "num_nextn_predict_layers",  # layers that draft
    "moe_jitter_eps",  # noise in training
}


def families():
    for model_type in CONFIG_MAPPING_NAMES:
        module = MODEL_REMAPPING.get(model_type, model_type)
        if module in SOURCES:
            yield model_type, module


@pytest.mark.parametrize(("model_type", "module"), [*families()])
def test_transformers_computes_with_no_key_that_is_passed_over(model_type, module):
    folder = Path(transformers.__file__).parent / "models" / model_type_to_module_name(model_type)
    text = "".join(path.read_text() for path in folder.glob("modeling_*.py"))
    assert text
    read = set(re.findall(r"config\.(\w+)", text))
    dropped = read - (fields(module) & used(module))
    passed_over = {key for key in dropped if inert_keys.is_inert(key, module, False)}
    passed_over -= {key for key in passed_over if "dropout" in key}  # in training only
    assert passed_over <= READ_BY_CLASSES
