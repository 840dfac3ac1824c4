# SPDX-License-Identifier: Apache-2.0
"""A model with an MTP layer on this disk drafts by default, only where that is free."""

import json
import logging
import pickle
import shutil
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from e2e.harness import Dense, counters, engine, generate, greedy
from e2e.server import serve
from engine.spec_decode import assistants
from engine.spec_decode.hybrids import write_hybrid
from engine.spec_decode.splitter import split
from engine.spec_decode.test_mtp_split import without_layers
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs

from vllm_metal.platform import default_drafts
from vllm_metal.settings.draft_methods import OFF_SWITCH, are_default

DRAFTS, DRAFTED = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_draft_tokens"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A model with its MTP layer, which is mostly right."""
    return write_hybrid(tmp_path_factory.mktemp("models") / "whole", "qwen3_next", guessable=True)


@pytest.fixture
def alone(whole, tmp_path):
    """The same model without the layer."""
    return without_layers(whole, tmp_path / "alone")


@pytest.fixture
def messages(caplog):
    """The engine's log messages."""
    names = ("vllm_metal.platform.default_drafts", "vllm_metal.engine.worker")
    loggers = [logging.getLogger(name) for name in names]
    for logger in loggers:
        logger.addHandler(caplog.handler)
        logger.setLevel(logging.INFO)
    yield lambda: [record.getMessage() for record in caplog.records]
    for logger in loggers:
        logger.removeHandler(caplog.handler)
        logger.setLevel(logging.NOTSET)


def played(target, vocab=128, **options):
    """The counters of an engine, whose text is mlx-lm's."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, vocab, length).tolist() for length in (1, 17, 40)]
    dense = Dense(str(target))
    settings = {"skip_tokenizer_init": True, "max_model_len": 256} | options
    with engine(str(target), **settings) as llm:
        for prompt, tokens in zip(
            prompts, generate(llm, prompts, greedy(40, detokenize=False)), strict=True
        ):
            dense.check(prompt, tokens)
        return counters(llm)


@pytest.fixture(autouse=True)
def in_process(monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def test_a_models_own_layer_drafts_and_the_key_turns_it_off(whole, messages):
    seen = played(whole)
    assert seen[DRAFTED] / 3 < seen[ACCEPTED] < seen[DRAFTED]
    (said,) = {message for message in messages() if "Drafts up to" in message}
    assert said.startswith("Drafts up to 3 tokens with the MTP layer of the model's checkpoint")
    assert OFF_SWITCH in said
    assert not {DRAFTED, DRAFTS} & played(whole, additional_config={"drafts": "off"}).keys()


@pytest.mark.more  # test_mtp_split serves one beside a model
def test_a_layer_beside_a_model_drafts_and_without_it_the_model_is_served(whole, alone, messages):
    assert DRAFTS not in played(alone)
    (said,) = {message for message in messages() if "rafts" in message}
    assert said.startswith("Serving without drafts") and f"{alone}/mtp, or folders of" in said
    layers = split(whole, alone.parent / "alone-MTP", q_bits=4, q_group_size=32)
    assert played(alone)[ACCEPTED] > 0
    assert any(f"MTP layer in {layers}" in message for message in messages())


def test_another_models_layer_beside_it_is_left_alone(alone, tmp_path):
    other = write_hybrid(tmp_path / "other", "qwen3_next", vocab_size=96)
    split(other, alone / "mtp")
    assert configured(alone).speculative_config is None


@pytest.mark.more
def test_an_assistant_beside_a_model_drafts(tmp_path, messages):
    target, head = assistants.write_pair(tmp_path, 8)
    beside = head.rename(f"{target}-Assistant")
    assert played(target, 8)[ACCEPTED] > 0
    assert any(f"with the assistant in {beside}" in message for message in messages())
    assert DRAFTS not in played(target, 8, additional_config={"drafts": "off"})


@pytest.fixture
def assisted(tmp_path):
    """A model and its assistant, which is elsewhere."""
    return assistants.write_pair(tmp_path, 8)


@pytest.mark.parametrize("where", ["{}/assistant", "{}-assistant", "{}/mtp"])
def test_an_assistant_is_found_where_mtp_layers_are(assisted, where):
    target, head = assisted
    own = {"speculative_config": {"method": "mtp"}}
    assert configured(target).speculative_config is None
    with pytest.raises(ValueError, match=r"needs Gemma 4's assistant .*gemma4/assistant, or fold"):
        configured(target, **own)
    place = head.rename(where.format(target))
    for options in ({}, own):
        config = configured(target, **options)
        speculation = config.speculative_config
        assert speculation.draft_model_config.model == str(place)
        assert (speculation.method, speculation.num_speculative_tokens) == ("mtp", 3)
        assert are_default(config) == (not options)
    assert configured(target, enable_lora=True).speculative_config is None


#: Changes of an assistant's config.json.
UNFIT = {
    "of another width": {"backbone_hidden_size": 96},
    "of another vocabulary": {"text_config": assistants.CONFIG["text_config"]},
    "with an unknown key": {"sliding_window": 8},
}


@pytest.mark.parametrize("name", UNFIT)
def test_an_assistant_that_does_not_suit_the_model_is_left_alone(assisted, name, messages):
    target, head = assisted
    path = head.rename(f"{target}-assistant") / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | UNFIT[name]))
    assert configured(target).speculative_config is None
    assert any("sliding_window=8" in message for message in messages()) == ("key" in name)


def configured(target, **options):
    return EngineArgs(
        model=str(target), skip_tokenizer_init=True, max_model_len=256, **options
    ).create_engine_config()


def test_an_engine_in_its_own_process_knows_that_nobody_asked(whole):
    config = configured(whole)
    assert are_default(pickle.loads(pickle.dumps(config)))
    assert not are_default(configured(whole, speculative_config={"method": "mtp"}))


def test_two_configurations_of_the_same_arguments(whole):
    args = EngineArgs(model=str(whole), skip_tokenizer_init=True)
    first, second = args.create_engine_config(), args.create_engine_config()
    assert are_default(first) and are_default(second)


#: Options that drafts are rejected with, or would change, and drafts of the user's.
OBSTACLES = {
    "off": {"additional_config": {"drafts": "off"}},
    "pooling": {"runner": "pooling"},
    "pipeline parallel": {"pipeline_parallel_size": 2},
    "tensor parallel": {"tensor_parallel_size": 2},
    "processors": {"logits_processors": ["a.B"]},
    "connector": {"kv_transfer_config": KVTransferConfig("MetalKVConnector", kv_role="kv_both")},
    "disk cache": {"additional_config": {"prefix_cache_dir": "/tmp/cache"}},
    "adapters": {"enable_lora": True},
    "shared K/V": {"kv_sharing_fast_prefill": True},
    "a short context": {"max_model_len": 4},
    "a short step": {"max_num_batched_tokens": 3},
}


@pytest.mark.parametrize("name", OBSTACLES)
def test_drafts_stay_out(whole, name):
    args = EngineArgs(model=str(whole), skip_tokenizer_init=True, max_model_len=256)
    args.create_engine_config()  # with the platform's patches
    own = {"method": "mtp", "num_speculative_tokens": 3}
    assert default_drafts.default_drafts(args, args.create_model_config()) == own
    args = replace(args, **OBSTACLES[name])
    model = replace(args, logits_processors=None).create_model_config()
    assert default_drafts.default_drafts(args, model) is None


def test_a_model_that_reads_images_drafts_too(tmp_path):
    seeing = write_hybrid(tmp_path / "seeing", "qwen3_5")
    for text_alone in (False, True):
        assert are_default(configured(seeing, language_model_only=text_alone))


def test_drafts_stay_out_beside_installed_processors(whole, monkeypatch):
    monkeypatch.setattr(default_drafts, "entry_points", lambda group: [group])
    assert configured(whole).speculative_config is None


def test_users_own_drafts_stay(whole):
    given = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    for options in ({"speculative_config": given}, {"spec_method": "mtp", "spec_tokens": 1}):
        config = configured(whole, **options)
        assert config.num_speculative_tokens < 3 and not are_default(config)


def test_drafts_that_leave_no_room_for_a_context_are_dropped(whole, messages):
    # Blocks of 4096 bytes, 23 for a context; with drafts 8192 bytes, and 21.
    seen = played(whole, kv_cache_memory_bytes=1 << 17)
    assert DRAFTS not in seen
    (said,) = {message for message in messages() if "without drafts" in message}
    assert "one request of --max-model-len 256 needs" in said and OFF_SWITCH in said
    assert played(whole, kv_cache_memory_bytes=1 << 18)[DRAFTS] > 0


def test_a_layer_that_cannot_be_loaded_is_left_out(whole, tmp_path, messages):
    damaged = tmp_path / "damaged"
    shutil.copytree(whole, damaged)
    path = damaged / "model.safetensors"
    arrays = mx.load(str(path))
    arrays["mtp.fc.weight"] = arrays["mtp.fc.weight"][:32]
    mx.save_safetensors(str(path), arrays, {"format": "pt"})
    assert DRAFTS not in played(damaged)
    (said,) = {message for message in messages() if "without drafts" in message}
    assert "does not fit the target" in said
    with pytest.raises(Exception, match="does not fit the target"):
        played(damaged, speculative_config={"method": "mtp"})


@pytest.mark.heavy
@pytest.mark.more
def test_a_server_shows_its_drafts(whole, smollm2, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(f"{smollm2}/{name}", folder)
    options = ("--max-model-len", "256", "--kv-cache-memory-bytes", str(64 << 20))
    with serve(str(folder), options, tmp_path / "log") as server:
        with server.client() as client:
            client.completions.create(
                model=str(folder), prompt=[[1, 2, 3]], max_tokens=40, temperature=0
            )
        assert server.metric(f"{DRAFTS}_total") > 0
        assert server.log.read_text().count("Drafts up to 3 tokens") == 1
