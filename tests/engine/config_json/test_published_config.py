# SPDX-License-Identifier: Apache-2.0
"""Folders written by transformers compute the same, or are rejected."""

import json
import shutil
from pathlib import Path

import mlx.core as mx
import mlx_lm.models
import numpy as np
import pytest
from engine.models.cases import cases
from engine.models.left_out import LEFT_OUT, SINCE_5_20
from engine.models.published import (
    FAMILIES,
    REFUSED,
    VOCAB,
    log_probabilities,
    make,
    write,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from vllm_metal.engine.config_json.ropes import fit_context
from vllm_metal.engine.models import loader
from vllm_metal.identity.model_files import ModelLoadError
from vllm_metal.patches.mlx_patches import registry
from vllm_metal.settings.mlx_vlm_models import MLX_VLM_MODELS

pytestmark = pytest.mark.usefixtures("unfused")

#: Absolute bound of log-probabilities: both compute in float32, with sums in different orders.
TOLERANCE = 1e-3
#: Compared in mlx_patches/test_registry.py or vision/test_towers.py; of Llama's module, Mistral's
#: files are.
PATCHED = {*registry.PATCHES, *registry.TEXT_MODELS} - {"llama"}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "factor": 3.0}
#: Families whose module leaves scaling out, and two whose module does not.
SCALED = (
    "llama4_text",
    "mixtral",
    "qwen3_moe",
    "qwen2_moe",
    "cohere",
    "ernie4_5",
    "llama",
    "qwen3",
)


def ours(folder, tokens, **overrides):
    model = loader.lazy_model(folder, mx.float32, overrides=overrides)
    fit_context(model, 128)
    logits = model(mx.array([tokens]))[0].astype(mx.float32)
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


def tokens(length=40):
    return np.random.default_rng(0).integers(3, VOCAB, length).tolist()


def compare(model, folder):
    """Returns the largest difference from transformers' log-probabilities, which must vary."""
    (expected,) = log_probabilities(model, [tokens()])
    assert len(set(expected.argmax(-1).tolist())) > 5, "the weights say nothing"
    return np.abs(ours(folder, tokens()) - expected).max()


#: Rejected small models, and the error's text.
NOT_READ = {
    "bitnet": "weight_scale",  # mlx-lm reads packed weights only
}


@pytest.mark.parametrize("name", NOT_READ)
def test_what_mlx_lm_cannot_read_is_refused(name, tmp_path):
    write(make(FAMILIES[name]), tmp_path)
    with pytest.raises(ModelLoadError, match=NOT_READ[name]):
        loader.lazy_model(tmp_path, mx.float32)


#: Compared elsewhere, or refused.
OTHERS = {*PATCHED, *NOT_READ}


COMPARED = [name for name in FAMILIES if name.partition(",")[0] not in OTHERS]
#: Keys under the same names, experts, and multipliers.
QUICK = ("llama", "qwen3_moe", "granite")
#: Rows of `published_config` that these modules alone have, and ropes of other types.
MORE = (
    *("apertus", "dbrx", "deepseek_v2", "exaone4", "gemma4_text", "granitemoehybrid", "laguna"),
    *("lfm2", "minicpm3", "ministral3", "phimoe", "solar_open"),
)


@pytest.mark.parametrize("name", cases(COMPARED, QUICK, MORE))
def test_a_folder_as_published_computes_what_transformers_does(name, tmp_path):
    model = make(FAMILIES[name])
    write(model, tmp_path)
    assert compare(model, tmp_path) <= TOLERANCE


@pytest.mark.parametrize(
    "rope",
    [pytest.param(YARN, id="yarn"), pytest.param(LINEAR, id="linear", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("name", cases(SCALED, ["mixtral"], ["llama4_text", "llama"]))
def test_positions_are_scaled_in_every_family(name, rope, tmp_path):
    model = make(FAMILIES[name], rope_parameters={"rope_theta": 10000.0} | rope)
    write(model, tmp_path)
    assert compare(model, tmp_path) <= TOLERANCE


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A folder, and transformers' model of it."""
    model, folder = make(FAMILIES["llama"]), tmp_path_factory.mktemp("llama")
    write(model, folder)
    return folder, model


def changed(folder, out, **keys):
    """Copies the folder with changed config.json keys."""
    shutil.copytree(folder, out, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text()) | keys
    (out / "config.json").write_text(json.dumps(config))
    return out


def test_older_files_stay_as_they_are(llama, tmp_path):
    folder, model = llama
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    older = changed(folder, tmp_path, rope_parameters=None, rope_theta=rope["rope_theta"])
    assert compare(model, older) <= TOLERANCE


def test_an_override_counts(llama):
    folder, model = llama
    (expected,) = log_probabilities(model, [tokens()])
    rope = {"rope_type": "default", "rope_theta": 50.0}
    other = ours(folder, tokens(), rope_parameters=rope, rope_theta=50.0)
    assert np.abs(other - expected).max() > 100 * TOLERANCE


PLANTED = [
    ({"rope_theta": 123.0}, "rope_theta=123.0, but rope_parameters sets 700.0"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu', but mlx-lm's module 'llama' supports only silu"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    (
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e4},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            }
        },
        "another rope_theta for sliding_attention layers",
    ),
]


@pytest.mark.parametrize(("keys", "message"), PLANTED, ids=[message for _, message in PLANTED])
def test_what_the_module_would_drop_is_refused(keys, message, llama, tmp_path):
    folder = changed(llama[0], tmp_path, **keys)
    with pytest.raises(ModelLoadError, match=message.replace("(", r"\(")):
        loader.lazy_model(folder, mx.float32)


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("cohere2", {"layer_types": ["full_attention", "chunked_attention"] * 2}, "chunked"),
        ("qwen3_next", {"layer_types": ["full_attention"] * 4}, "without linear_attention"),
        ("llama4_text", {"attention_chunk_size": 64}, "attention_chunk_size=64"),
        ("phi3", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_type='yarn'"),
        pytest.param(
            *("stablelm", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "type='linear'"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_a_family_has_no_words_for_is_refused(name, keys, message, tmp_path):
    write(make(FAMILIES[name]), tmp_path / "published")
    folder = changed(tmp_path / "published", tmp_path / "changed", **keys)
    with pytest.raises(ModelLoadError, match=message):
        loader.lazy_model(folder, mx.float32)


#: The module that reads a configuration of another name.
OF_ANOTHER = {**registry.MODEL_REMAPPING, **registry.TEXT_MODELS}


def with_transformers_class():
    """Returns mlx-lm's modules that read a whole transformers configuration or its text part."""
    folder = Path(mlx_lm.models.__path__[0])
    paths = folder.glob("*.py")
    found = {path.stem for path in paths if "class ModelArgs" in path.read_text()}
    return {
        module
        for module in found
        if {
            module,
            f"{module}_text",
            *(key for key, value in OF_ANOTHER.items() if value == module),
        }
        & {*CONFIG_MAPPING_NAMES}
    }


def test_no_module_is_left_out_without_a_reason():
    tried = {
        OF_ANOTHER.get(family.model_type, family.model_type)
        for family in (*FAMILIES.values(), *(family for family, _ in REFUSED.values()))
    }
    left_out = LEFT_OUT | SINCE_5_20
    assert with_transformers_class() - {*SINCE_5_20} == tried - {*MLX_VLM_MODELS} | {*LEFT_OUT}
    assert not tried & {*left_out}
    print("left out:", *(f"{name}: {reason}" for name, reason in left_out.items()), sep="\n  ")


def test_steps_are_bounded_as_transformers_has_it_where_the_file_does_not_say(tmp_path):
    model = make(FAMILIES["granitemoehybrid"])
    for name, parameter in model.named_parameters():
        if name.endswith("dt_bias"):  # steps of 1e-5, below the bound that mlx-lm's module assumes
            parameter.data = parameter.data - 12
    write(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["time_step_limit"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert compare(model, tmp_path) <= TOLERANCE
