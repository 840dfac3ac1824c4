# SPDX-License-Identifier: Apache-2.0
"""Unsupported drafters are rejected when the engine is configured, before weights load."""

import json

import mlx.core as mx
import pytest
from engine.spec_decode import blocks
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
    """Writes a checkpoint with no array of a head, or without weights."""
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


def block_drafter(path, **changes):
    """Writes a block drafter's folder."""
    return folder_of(path, blocks.CONFIG | changes)


#: Changes of config.json, and the error's text.
NOT_COMPUTED = {
    "a key": ({"attention_gate": True}, "attention_gate=True"),
    "a nested key": (
        {"dflash_config": {"draft_window_size": 64}},
        "dflash_config.draft_window_size",
    ),
    "an activation": ({"hidden_act": "gelu"}, "hidden_act='gelu'.*only 'silu'"),
    "a head": ({"dflash_config": {"projector_type": "domino"}}, "projector_type='domino'"),
    "no hidden states": (
        {"dflash_config": {"use_aux_hidden_state": False}},
        "use_aux_hidden_state",
    ),
    "the anchor": ({"dflash_config": {"sample_from_anchor": True}}, "sample_from_anchor"),
    "no window": ({"dflash_config": {"use_swa": True}}, "no sliding_window"),
    "LiLiCorr": ({"architectures": ["LiLiCorrDraftModel"]}, "with LiLiCorrDraftModel .*served are"),
    "Domino": ({"architectures": ["DominoDraftModel"]}, "DominoDraftModel"),
}


@pytest.mark.parametrize("name", list(NOT_COMPUTED))
def test_a_block_drafter_that_is_not_computed(target, tmp_path, name):
    changes, why = NOT_COMPUTED[name]
    nested = {"dflash_config": blocks.CONFIG["dflash_config"] | changes.get("dflash_config", {})}
    drafter = block_drafter(tmp_path / "draft", **(changes | nested))
    refuse(target, why, method="dflash", model=drafter)


def test_a_block_has_five_rows_and_at_most_those_it_was_trained_for(target, tmp_path):
    wide, narrow = (block_drafter(tmp_path / str(n), block_size=n) for n in (16, 3))
    for drafter, count in ((wide, 4), (narrow, 2)):
        config = configure(target, method="dflash", model=drafter, num_speculative_tokens=None)
        assert config.speculative_config.num_speculative_tokens == count
    assert configure(target, method="dflash", model=wide, num_speculative_tokens=15)
    why = "num_speculative_tokens 16 .*trained to draft 15 tokens at once: choose 15 or fewer"
    refuse(target, why, method="dflash", model=wide, num_speculative_tokens=16)
    dspark = {"architectures": ["Qwen3DSparkModel"], "markov_rank": 8, "block_size": 7}
    drafter = block_drafter(tmp_path / "dspark", **dspark)
    assert configure(target, method="dspark", model=drafter, num_speculative_tokens=7)
    refuse(target, "draft 7 tokens", method="dspark", model=drafter, num_speculative_tokens=8)
