# SPDX-License-Identifier: Apache-2.0
"""Drafters that cannot be are refused when the engine is configured, before any weights load."""

import json

import mlx.core as mx
import pytest
from engine.spec_decode.heads import CONFIG, HIDDEN, MAX_LEN, VOCAB, write_target
from vllm.engine.arg_utils import EngineArgs


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("models") / "target")


def configure(target, **speculation):
    return EngineArgs(
        model=str(target),
        skip_tokenizer_init=True,
        max_model_len=MAX_LEN,
        speculative_config={"num_speculative_tokens": 3} | speculation,
    ).create_engine_config()


def folder_of(path, changes, weights=True):
    """A checkpoint, whose weights are none of a head's."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG | changes))
    if weights:
        mx.save_safetensors(
            str(path / "model.safetensors"), {"none": mx.zeros(1)}, {"format": "mlx"}
        )
    return str(path)


def refuse(target, why, **speculation):
    with pytest.raises(ValueError, match=why) as caught:
        configure(target, **speculation)
    assert "\n" not in str(caught.value)


def test_a_draft_model_of_another_vocabulary(target, tmp_path):
    draft = folder_of(tmp_path / "draft", {"vocab_size": VOCAB - 32})
    why = f"same vocabulary size. Target model vocab_size={VOCAB}. Draft model vocab_size=96"
    refuse(target, why, method="draft_model", model=draft)


@pytest.mark.parametrize("method", ["draft_model", "ngram_gpu"])
def test_more_drafts_than_the_longest_text_has_room_for(target, method):
    most = MAX_LEN - 2  # after a prompt of one token, and with one that is sampled
    options = {"method": method} | ({"model": str(target)} if method == "draft_model" else {})
    assert configure(target, num_speculative_tokens=most, **options)
    why = rf"num_speculative_tokens {most + 1} .*within --max-model-len {MAX_LEN}"
    refuse(target, why, num_speculative_tokens=most + 1, **options)


@pytest.mark.parametrize("method", ["eagle", "eagle3", "medusa", "draft_model"])
def test_a_folder_without_weights(target, tmp_path, method):
    changes = {"model_type": "medusa", "num_heads": 3} if method == "medusa" else {}
    head = folder_of(tmp_path / "head", changes, weights=False)
    why = f"--speculative-config model {head!r} .*no weights, .*safetensors.*: fetch them"
    refuse(target, why, method=method, model=head)


@pytest.mark.parametrize("method", ["eagle", "medusa", "draft_model"])
def test_a_path_that_does_not_exist(target, tmp_path, method):
    missing = str(tmp_path / "missing")
    with pytest.raises(ValueError, match=f"there is no folder {missing}"):
        configure(target, method=method, model=missing)


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_a_head_for_hidden_states_of_another_size(target, tmp_path, method):
    narrow = {"hidden_size": HIDDEN // 2, "num_hidden_layers": 1}
    head = folder_of(tmp_path / "head", narrow)
    why = rf"model {head!r} \(made for hidden states of size 32, .*are of 64: choose a head"
    refuse(target, why, method=method, model=head)
    wide = folder_of(tmp_path / "wide", narrow | {"target_hidden_size": HIDDEN})
    assert configure(target, method="eagle3", model=wide)
