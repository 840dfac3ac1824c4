# SPDX-License-Identifier: Apache-2.0
"""Keys of config.json are used, known to have no effect, or rejected."""

import json
import shlex
import sys
from contextlib import nullcontext

import pytest
from engine.config_json.real_configs import CONFIGS, FILES, WINDOWS

from vllm_metal.engine.config_json import (
    config_keys,
    published_config,
    reference_code,
    rope_keys,
)
from vllm_metal.engine.pooling.encoders import served
from vllm_metal.identity.model_files import ModelLoadError
from vllm_metal.patches.mlx_patches import registry


def read(config, folder=None):
    family, args = registry.classes(dict(config))
    return published_config.as_read(config, registry.module_of(config, family), args, folder)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_published_files_say_is_read(name):
    read(CONFIGS[name])


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@pytest.mark.parametrize("file", [pytest.param(file, id=name) for name, file in FILES])
def test_a_whole_published_file_is_read(file):
    """Reads it as published, quantized, and as an MLX conversion that copied its keys."""
    packed = {"quantization_config": file.get("quantization_config", FP8)}
    for added in ({}, packed, packed | {"quantization": {"group_size": 64, "bits": 4}}):
        config = file | added
        encoder = served.of_content(config)
        if encoder is None:
            changed = read(config)
            _, args = registry.classes(dict(config))
            args.from_dict({**config, **changed})
        else:
            served.check_config(config, encoder.family)


_MIMO = {"model_type": "mimo_v2_flash", "hybrid_layer_pattern": [0, 1], "moe_layer_freq": [0, 1]}
#: Files that leave keys out, and what transformers' class takes for them.
LEFT_OUT = [
    (
        {
            "model_type": "gemma3",
            "text_config": {
                "model_type": "gemma3_text",
                "hidden_size": 2560,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            },
        },
        {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "num_attention_heads": 8},
    ),
    (  # whose class has names of its own for both, and passes over the usual ones
        {"model_type": "gpt_neox", "partial_rotary_factor": 0.5},
        {"rotary_pct": 0.25, "rotary_emb_base": 1e4},
    ),
    ({"model_type": "qwen2", "vocab_size": 9}, {"rope_theta": 1e4, "num_key_value_heads": 32}),
    (
        {"model_type": "gemma4_text"},
        {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": 1e6,
                    "partial_rotary_factor": 0.25,
                },
            }
        },
    ),
    (_MIMO, {"rope_theta": 5e6, "swa_rope_theta": 1e4}),
    (  # null, as transformers writes it
        {
            "model_type": "granitemoehybrid",
            "position_embedding_type": None,
            "layer_types": ["mamba"],
        },
        {"position_embedding_type": "nope"},
    ),
    ({"model_type": "llama", "attention_bias": None}, {"attention_bias": False}),
    (  # whose class rotates by the share alone, and has no share for an absent one
        {
            "model_type": "minimax_m3_vl",
            "text_config": {"model_type": "minimax_m3", "head_dim": 96, "rope_theta": 1e4},
        },
        {"rotary_dim": 96, "index_topk_blocks": 16, "index_n_heads": 4},
    ),
    ({"model_type": "falcon_h1"}, {"ssm_multipliers": [1.0] * 5, "embedding_multiplier": 1.0}),
]


@pytest.mark.parametrize(("config", "taken"), LEFT_OUT)
def test_keys_left_out_are_as_transformers_takes_them(config, taken):
    changed = read(config)
    changed = changed.get("text_config", changed)
    assert {key: changed[key] for key in taken} == taken


#: Keys that transformers' class of a model reads, and that mlx-lm's module does not.
READ = {
    "meta-llama/Llama-2-7b": {"is_causal": False},
    "openai/gpt-oss-20b": {"attention_bias": False},
}


@pytest.mark.parametrize("name", READ)
def test_a_key_that_the_reference_reads_is_rejected_by_its_name(name):
    (key,) = READ[name]
    with pytest.raises(ModelLoadError, match=key):
        read(CONFIGS[name] | READ[name])


_TEXT_OF_M3 = CONFIGS["MiniMaxAI/MiniMax-M3"]["text_config"]
_NOT_OF_M3 = [
    *(
        {key: value}
        for key, value in {
            "attention_output_gate": True,
            "n_shared_experts": 2,
            "qk_norm_type": "per_layer",
            "rotary_dim": 32,
            "sparse_attention_freq": [0, 1],
            "swiglu_beta": 0.5,
            "use_gemma_norm": False,
            "use_routing_bias": False,
        }.items()
    ),
    *(
        {"sparse_attention_config": {key: value}}
        for key, value in {
            "sparse_attention_freq": [0, 1, 1],
            "sparse_disable_index_value": [0, 0],
            "sparse_index_dim": 32,
            "sparse_init_block": 1,
            "sparse_init_tokens": 64,
            "sparse_local_block": 17,
            "sparse_num_index_heads": 3,
            "sparse_score_type": "sum",
            "use_sparse_attention": False,
        }.items()
    ),
]
#: Keys of the older names that have one of their own in messages.
_INDEX = {
    "sparse_index_dim": "index_head_dim",
    "sparse_local_block": "index_local_blocks",
    "sparse_num_index_heads": "index_n_heads",
}


@pytest.mark.parametrize("changes", _NOT_OF_M3, ids=str)
def test_what_sparse_attention_does_not_compute_is_rejected_by_its_name(changes):
    """Also keys that transformers ignores: their effect was never compared."""
    heads = {"num_attention_heads": 64, "num_key_value_heads": 4, "hidden_size": 6144}
    sparse = changes.get("sparse_attention_config", {})
    (key,) = sparse or changes
    sparse = _TEXT_OF_M3["sparse_attention_config"] | sparse
    text = _TEXT_OF_M3 | heads | changes | {"sparse_attention_config": sparse}
    config = CONFIGS["MiniMaxAI/MiniMax-M3"] | {"text_config": text}
    with pytest.raises((ModelLoadError, ValueError), match=_INDEX.get(key, key)):
        changed = read(config)
        _, args = registry.classes(dict(config))
        args.from_dict(config | changed)


_ROPE = {"rope_theta": 5e6, "partial_rotary_factor": 0.334}
_M3 = {
    "model_type": "minimax_m3_vl",
    "text_config": {"architectures": ["MiniMaxM3SparseForCausalLM"], "head_dim": 128},
    "vision_config": {"img_token_compression_config": {"spatial_merge_size": 2}},
    "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
}
#: Keys of published files that change nothing in the reference, by the reason; then another value
#: or another file, which are rejected where they would.
WITHOUT_EFFECT = {
    "another word for layers with an indexer": (
        {"model_type": "glm_moe_dsa", "num_hidden_layers": 2},
        {"layer_types": ["deepseek_sparse_attention"] * 2},
        {"layer_types": ["deepseek_sparse_attention", "full_attention"]},
    ),
    "the class sets it from others": ({"model_type": "glm_moe_dsa"}, {"head_dim": 192}, None),
    "the class sets it": (_M3, {"text_config": {"hidden_act": "swigluoai"}}, None),
    "layers have types, and none is of chunks": (
        _MIMO | _ROPE | {"swa_rope_theta": 1e4},
        {"attention_chunk_size": 128},
        {"layer_types": ["chunked_attention"], "attention_chunk_size": 128},
    ),
    "of layers that draft": ({"model_type": "nemotron_h"}, {"mtp_anything": "*E"}, None),
    "of images, and said there again": (
        _M3,
        {"img_token_compression_config": {"spatial_merge_size": 2}},
        {"img_token_compression_config": {"spatial_merge_size": 3}},
    ),
    "vLLM's class takes it": (
        _M3,
        {"text_config": {"scoring_func": "sigmoid"}},
        {"text_config": {"scoring_func": "softmax"}},
    ),
    "computed": ({"model_type": "deepseek"}, {"norm_topk_prob": False}, {"norm_topk_prob": True}),
    "experts by another name": (
        {"model_type": "glm_moe_dsa", "n_routed_experts": 8},
        {"num_experts": 8},
        {"num_experts": 4},
    ),
}


@pytest.mark.parametrize("reason", WITHOUT_EFFECT)
def test_a_key_without_effect_is_accepted(reason):
    config, same, other = WITHOUT_EFFECT[reason]

    def changed(by):
        text = config.get("text_config", {}) | by.get("text_config", {})
        return config | by | ({"text_config": text} if text else {})

    read(changed(same))
    if other is not None:
        with pytest.raises(ModelLoadError):
            read(changed(other))


@pytest.mark.parametrize("key", ["routed_scaling_factor", "layer_types"])
def test_a_class_that_a_patch_derives_uses_what_the_library_s_uses(key):
    """Checks a key that mlx-lm's module reads and one that the patch reads."""
    registry.classes({"model_type": "minimax_m3_vl"})
    args = sys.modules["mlx_lm.models.minimax_m3_vl"].TextArgs
    assert reference_code.is_used(args, key)
    assert not reference_code.is_used(args, "keys_that_nobody_has")


def test_a_value_that_the_reference_takes_for_an_absent_key_is_accepted():
    gptj = next(file for _, file in FILES if file["model_type"] == "gptj")
    read(gptj | {"rotary": True})
    with pytest.raises(ModelLoadError, match=r"rotary \(false\)"):
        read(gptj | {"rotary": False})


@pytest.mark.parametrize("name", ["meta-llama/Llama-2-7b", "Qwen/Qwen3.5-9B"])
def test_keys_that_no_reference_reads_are_logged_once(name, monkeypatch):
    lines = []
    monkeypatch.setattr(config_keys.logger, "info", lambda text, *words: lines.append(text % words))
    read(CONFIGS[name] | {"tomorrows_scale": 0.5, "todays_scale": 0.5})
    (line,) = lines
    assert "tomorrows_scale, todays_scale" in line


@pytest.mark.parametrize("name", ["internlm/internlm2_5-7b-chat", "moonshotai/Kimi-K2-Instruct"])
def test_without_a_reference_an_unknown_key_is_rejected_by_its_name(name):
    with pytest.raises(ModelLoadError, match=r"tomorrows_scale \(0\.5\) \(no reference"):
        read(CONFIGS[name] | {"tomorrows_scale": 0.5})


@pytest.mark.parametrize(
    ("code", "is_read"),
    [
        ("x = x * config.tomorrows_scale", True),
        ('x = x * getattr(config, "tomorrows_scale", 1.0)', True),
        ("# config.tomorrows_scale", False),
        ("self.tomorrows_scale = tomorrows_scale", False),
    ],
)
def test_a_folder_s_own_code_is_a_reference(code, is_read, tmp_path):
    config = CONFIGS["internlm/internlm2_5-7b-chat"] | {
        "auto_map": {"AutoModelForCausalLM": "modeling_internlm2.InternLM2ForCausalLM"},
        "tomorrows_scale": 0.5,
    }
    (tmp_path / "modeling_internlm2.py").write_text("from .layers import Layer\nLayer()\n")
    (tmp_path / "layers.py").write_text(f"class Layer:\n    {code}\n")
    with pytest.raises(ModelLoadError, match="tomorrows_scale") if is_read else nullcontext():
        read(config, tmp_path)


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_of_all_layers_are_read(name):
    """`tests/patches/mlx_patches/test_registry.py` compares the patched modules."""
    read(WINDOWS[name])


def test_windows_that_a_module_has_not_are_refused():
    config = CONFIGS["Qwen/Qwen3-8B"] | {
        "use_sliding_window": True,
        "sliding_window": 4096,
        "max_window_layers": 9,
    }
    with pytest.raises(ModelLoadError, match="sliding_window"):
        read(config)


def test_a_key_without_a_value_says_nothing():
    read(CONFIGS["Qwen/Qwen3-8B"] | {"tomorrows_scale": None})


ROPES = [
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, {}),
    ({"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, {}),
    ({"rope_type": "default"}, {}),
    ({"rope_type": "linear", "factor": 4.0}, {"attention_factor": 1.5}),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, {"mscale": 0.5}),
]


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize(("rope", "lost"), ROPES)
def test_parameters_of_a_rope_are_read_or_refused(rope, lost, key):
    config = {k: v for k, v in CONFIGS["meta-llama/Llama-2-7b"].items() if k != "rope_scaling"}
    read(config | {key: rope})
    lost = lost or {"max_position_embeddings": 2.0}
    (name,) = lost
    with pytest.raises(ModelLoadError, match=rf"{key}\.{name}") as error:
        read(config | {key: rope | lost})
    # The loader makes one rope of both keys.
    assert pasted(error) == {"rope_parameters": rope | {name: None}}


@pytest.mark.parametrize("module", ["muse_spark", "llama"])
def test_a_rope_without_a_type_is_a_plain_one(module):
    assert (
        rope_keys.unread({"rope_parameters": {"rope_theta": 1e4}}, module, "rope_parameters") == {}
    )


def test_one_error_names_all_and_the_flag_that_takes_them_away():
    config = CONFIGS["Qwen/Qwen3.5-9B"]
    rope = {"rope_theta": 1.0, "is_causal": 3}
    text = config["text_config"] | {"rope_parameters": rope}
    with pytest.raises(ModelLoadError) as error:
        read(config | {"is_causal": False, "text_config": text})
    assert pasted(error) == {
        "is_causal": None,
        "text_config": {"rope_parameters": rope | {"is_causal": None}},
    }


def pasted(error):
    words = shlex.split(str(error.value)[str(error.value).index("--hf-overrides") :])
    return json.loads(words[1])


def test_a_key_by_both_names_is_read_where_they_agree_only():
    config = CONFIGS["Qwen/Qwen3-30B-A3B"] | {"num_experts": 128, "num_local_experts": 128}
    read(config)
    with pytest.raises(ModelLoadError, match="num_local_experts"):
        read(config | {"num_local_experts": 64})


def test_windows_of_single_blocks_are_refused():
    blocks = [{"attention": {"n_heads_in_group": 8}}, {"attention": {"window_length": 64}}]
    config = CONFIGS["meta-llama/Llama-3.1-8B"] | {"model_type": "nemotron-nas"}
    with pytest.raises(ModelLoadError, match="window_length in block 1"):
        read(config | {"block_configs": blocks})


def test_a_rope_s_base_by_both_names_must_agree_in_modules_that_read_both():
    config = CONFIGS["Qwen/Qwen3-8B"]
    read(config | {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}})
    with pytest.raises(ModelLoadError, match="choose one"):
        read(config | {"rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"head_dim": 100}, r"head_dim \(100, which does not follow from hidden_size, num_att"),
        ({"is_causal": False}, r"is_causal \(false\)"),
    ],
)
def test_a_refusal_says_which_keys_a_value_does_not_follow_from(change, named):
    config = CONFIGS["mistralai/Mixtral-8x7B-v0.1"]
    with pytest.raises(ModelLoadError, match=named):
        read(config | change)


def test_a_null_that_the_module_needs_is_named():
    config = CONFIGS["openbmb/MiniCPM3-4B"]
    with pytest.raises(ModelLoadError, match=r"q_lora_rank, which .*'minicpm3' needs"):
        read(config | {"q_lora_rank": None})
