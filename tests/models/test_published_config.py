# SPDX-License-Identifier: Apache-2.0
"""Folders as transformers writes them compute what it computes, or are refused by name."""

import json

import mlx.core as mx
import numpy as np
import pytest
from models.published import CASES, VOCAB, log_probabilities, write

from vllm_metal.models import loader
from vllm_metal.models.weight_files import ModelLoadError

#: Of log-probabilities, absolute. Both compute in float32 and sum in different orders.
TOLERANCE = 1e-3


def ours(folder, tokens, **overrides):
    model = loader.lazy_model(folder, mx.float32, overrides=overrides)
    logits = model(mx.array(tokens)).astype(mx.float32)
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


def tokens(length=40):
    return np.random.default_rng(0).integers(3, VOCAB, (2, length))


@pytest.mark.parametrize("name", CASES)
def test_a_folder_as_published_computes_what_transformers_does(name, tmp_path):
    model, text = CASES[name].make(), tokens()
    expected = log_probabilities(model, text)
    assert len(set(expected.argmax(-1).ravel().tolist())) > 10, "the weights say nothing"
    write(model, tmp_path)
    assert np.abs(ours(tmp_path, text) - expected).max() <= TOLERANCE


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A folder, and transformers' model."""
    model = CASES["llama"].make()
    return write(model, tmp_path_factory.mktemp("llama")), model


def changed(folder, out, **keys):
    """The same folder with other keys in its config.json."""
    for path in folder.iterdir():
        (out / path.name).symlink_to(path)
    config = json.loads((folder / "config.json").read_text()) | keys
    (out / "config.json").unlink()
    (out / "config.json").write_text(json.dumps(config))
    return out


def test_older_files_stay_as_they_are(llama, tmp_path):
    folder, model = llama
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    older = changed(folder, tmp_path, rope_parameters=None, rope_theta=rope["rope_theta"])
    expected = log_probabilities(model, tokens())
    assert np.abs(ours(older, tokens()) - expected).max() <= TOLERANCE


def test_an_override_counts(llama):
    folder, model = llama
    expected = log_probabilities(model, tokens())
    rope = {"rope_type": "default", "rope_theta": 50.0}
    other = ours(folder, tokens(), rope_parameters=rope, rope_theta=50.0)
    assert np.abs(other - expected).max() > 100 * TOLERANCE


PLANTED = [
    ({"rope_theta": 123.0}, "rope_theta 123.0, and in rope_parameters 10000.0"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
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
        ("gemma3_text", {"layer_types": ["full_attention"] + ["sliding_attention"] * 3}, "layer"),
        ("phi3", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope of type 'yarn'"),
        ("stablelm", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "of type 'linear'"),
    ],
)
def test_what_a_family_has_no_words_for_is_refused(name, keys, message, tmp_path):
    folder = write(CASES[name].make(), tmp_path / "published")
    (tmp_path / "changed").mkdir()
    with pytest.raises(ModelLoadError, match=message):
        loader.lazy_model(changed(folder, tmp_path / "changed", **keys), mx.float32)
