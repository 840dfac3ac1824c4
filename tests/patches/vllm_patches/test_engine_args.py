# SPDX-License-Identifier: Apache-2.0
"""Defaults of the engine's arguments."""

import json
from pathlib import Path

import pytest
from huggingface_hub import constants
from patches.vllm_patches.doubles import MODEL
from vllm.engine.arg_utils import EngineArgs

from vllm_metal.patches.vllm_patches.start_failures import StartError

TOYS = Path(__file__).parents[2] / "engine" / "weights" / "gguf" / "toys"
MAMBA = {
    "architectures": ["MambaForCausalLM"],
    "model_type": "mamba",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": 96,
}


@pytest.mark.parametrize(
    ("config", "asked", "length", "original"),
    [
        (MODEL, None, 512, -1),
        (MODEL, -1, 512, -1),
        (MODEL, 256, 256, 256),
        (MAMBA, None, 2048, -1),  # it names no length, of which vLLM makes its own default
    ],
)
def test_a_length_that_nobody_gave_is_what_fits(config, asked, length, original, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = EngineArgs(model=str(tmp_path), skip_tokenizer_init=True, max_model_len=asked)
    made = args.create_engine_config().model_config
    assert (made.max_model_len, made.original_max_model_len) == (length, original)
    assert args.max_model_len == asked


def test_sizes_that_no_model_has_are_refused_before_anything_is_built(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODEL | {"num_hidden_layers": 10**9}))
    args = EngineArgs(model=str(tmp_path), skip_tokenizer_init=True)
    with pytest.raises(StartError, match="num_hidden_layers=1000000000"):
        args.create_engine_config()


SUFFIX = {"method": "suffix"}
NGRAM = {"method": "ngram", "num_speculative_tokens": 5}


@pytest.mark.parametrize(
    ("drafts", "given", "seqs", "tokens"),
    [
        (SUFFIX, {}, 20, 512),  # 24 drafts
        (NGRAM, {}, 85, 512),
        (NGRAM, {"max_num_seqs": 100}, 100, 600),
        (NGRAM, {"max_num_batched_tokens": 64}, 10, 64),
        (NGRAM, {"max_num_batched_tokens": 60, "max_num_seqs": 10}, 10, 60),
        (NGRAM, {"enable_lora": False}, 256, 512),
    ],
)
def test_batches_have_room_for_adapters_with_drafts(drafts, given, seqs, tokens, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    options = {"enable_lora": True, "skip_tokenizer_init": True} | given
    args = EngineArgs(model=str(tmp_path), speculative_config=dict(drafts), **options)
    made = args.create_engine_config().scheduler_config
    assert (made.max_num_seqs, made.max_num_batched_tokens) == (seqs, tokens)


def test_batches_that_a_user_gave_too_small_for_drafts_are_refused_with_numbers(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    options = {"enable_lora": True, "skip_tokenizer_init": True, "max_num_seqs": 20}
    args = EngineArgs(
        str(tmp_path), speculative_config=dict(NGRAM), max_num_batched_tokens=64, **options
    )
    with pytest.raises(ValueError, match=r"batched-tokens to 120 or more, or .* to 10 or fewer"):
        args.create_engine_config()


def test_a_gguf_file_becomes_a_folder_and_keeps_its_name(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_METAL_CACHE", str(tmp_path))
    monkeypatch.chdir(TOYS)
    drafts = {"model": "llama.gguf", "num_speculative_tokens": 2}
    args = EngineArgs(model="llama3.gguf", speculative_config=drafts)
    made = args.create_engine_config()
    folders = (made.model_config.model, made.speculative_config.draft_model_config.model)
    assert all(Path(folder).is_relative_to(tmp_path) for folder in folders)
    assert folders[0] != folders[1]
    assert made.model_config.served_model_name == "llama3.gguf"
    assert made.model_config.tokenizer == made.model_config.model
    assert made.model_config.max_model_len == 131072


def test_a_tag_names_a_file_of_the_hubs_cache_offline(tmp_path, monkeypatch):
    folder = tmp_path / "models--own--toys-GGUF"
    (folder / "snapshots" / "1").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("1")
    (folder / "snapshots" / "1" / "toy-Q8_0.gguf").write_bytes((TOYS / "llama3.gguf").read_bytes())
    monkeypatch.setenv("VLLM_METAL_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    made = EngineArgs(model="own/toys-GGUF:Q8_0").create_engine_config().model_config
    assert made.served_model_name == "own/toys-GGUF:Q8_0"
    assert Path(made.model).name.startswith("toy-Q8_0")


def test_a_model_keeps_the_tokenizer_that_its_user_names(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_METAL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "config.json").write_text(json.dumps(MODEL))
    args = EngineArgs(
        model=str(TOYS / "qwen3.gguf"),
        tokenizer=str(tmp_path / "tokenizer"),
        served_model_name="mine",
        skip_tokenizer_init=True,
    )
    made = args.create_engine_config().model_config
    assert made.tokenizer == str(tmp_path / "tokenizer")
    assert made.served_model_name == "mine"
    assert not (Path(made.model) / "tokenizer.json").exists()
