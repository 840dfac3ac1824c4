# SPDX-License-Identifier: Apache-2.0
"""A key of config.json is read, or known to change nothing, or refuses the model by its name."""

import json
import re
import shlex

import pytest
from models.real_configs import CONFIGS, WINDOWS

from vllm_metal.mlx_patches import registry
from vllm_metal.models import published_config
from vllm_metal.models.weight_files import ModelLoadError


def read(config):
    family, args = registry.classes(dict(config))
    return published_config.as_read(config, registry.module_of(config, family), args)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_published_files_say_is_read(name):
    read(CONFIGS[name])


@pytest.mark.parametrize("name", CONFIGS)
def test_a_key_that_nobody_knows_is_refused_by_its_name(name):
    with pytest.raises(ModelLoadError, match=r"keys .* not known .* tomorrows_scale \(0\.5\)"):
        read(CONFIGS[name] | {"tomorrows_scale": 0.5})


@pytest.mark.parametrize("name", [n for n in CONFIGS if "text_config" in CONFIGS[n]])
def test_so_it_is_in_a_text_config(name):
    text = CONFIGS[name]["text_config"] | {"tomorrows_scale": 0.5}
    with pytest.raises(ModelLoadError, match=re.escape("text_config.tomorrows_scale (0.5)")):
        read(CONFIGS[name] | {"text_config": text})


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_of_all_layers_are_read(name):
    """Their modules are patched, and compared in `tests/mlx_patches/test_registry.py`."""
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
    lost = lost or {"tomorrows_factor": 2.0}
    (name,) = lost
    with pytest.raises(ModelLoadError, match=rf"{key}\.{name}") as error:
        read(config | {key: rope | lost})
    # The loader makes one rope of both keys.
    assert pasted(error) == {"rope_parameters": rope | {name: None}}


def test_one_error_names_all_and_the_flag_that_takes_them_away():
    config = CONFIGS["Qwen/Qwen3.5-9B"]
    text = config["text_config"] | {"b": 2, "rope_parameters": {"rope_theta": 1.0, "c": 3}}
    with pytest.raises(ModelLoadError) as error:
        read(config | {"a": 1, "text_config": text})
    assert pasted(error) == {
        "a": None,
        "text_config": {"b": None, "rope_parameters": {"rope_theta": 1.0, "c": None}},
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
    with pytest.raises(ModelLoadError, match="say which counts"):
        read(config | {"rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"head_dim": 100}, r"head_dim \(100, which does not follow from hidden_size, num_att"),
        ({"tomorrows_scale": 0.5}, r"tomorrows_scale \(0\.5\)"),
    ],
)
def test_a_refusal_says_which_keys_a_value_does_not_follow_from(change, named):
    config = CONFIGS["mistralai/Mixtral-8x7B-v0.1"]
    with pytest.raises(ModelLoadError, match=named):
        read(config | change)


def test_a_null_that_the_module_needs_is_named():
    config = CONFIGS["openbmb/MiniCPM3-4B"]
    with pytest.raises(ModelLoadError, match=r"null for q_lora_rank, which .*'minicpm3' needs"):
        read(config | {"q_lora_rank": None})
