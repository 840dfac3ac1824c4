# SPDX-License-Identifier: Apache-2.0
"""Token ids for which the model has no embedding are rejected with the id and the model's size."""

import json
import logging

import pytest
import torch
from patches.vllm_patches.doubles import MODEL
from vllm import PoolingParams, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.inputs import PlaceholderRange
from vllm.v1.engine.input_processor import InputProcessor

VOCAB = MODEL["vocab_size"]
UNKNOWN = [-1, VOCAB, 10**6, 10**30]


def write_model(folder, tokenizer=False):
    """Writes MODEL, optionally with a tokenizer that has three extra tokens."""
    (folder / "config.json").write_text(json.dumps(MODEL))
    if tokenizer:
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        vocab = {f"w{id}": id for id in range(VOCAB)}
        made = Tokenizer(models.WordLevel(vocab, unk_token="w0"))
        made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="w1")
        fast.add_tokens(["<image>", "<pad>", "<more>"])
        fast.save_pretrained(folder)
    return str(folder)


def make_processor(folder, tokenizer=False, **options):
    model = write_model(folder, tokenizer)
    made = EngineArgs(model, max_model_len=256, skip_tokenizer_init=not tokenizer, **options)
    return InputProcessor(made.create_engine_config())


@pytest.fixture(scope="module", params=["generate", "embed", "generate with a tokenizer"])
def admit(request, tmp_path_factory):
    """Adds a prompt to an engine with either runner, as every route does."""
    embeds = request.param == "embed"
    processor = make_processor(
        tmp_path_factory.mktemp("model"),
        tokenizer="tokenizer" in request.param,
        runner="pooling" if embeds else "generate",
    )
    default = PoolingParams(task="embed") if embeds else SamplingParams()

    def admitted(prompt, params=default):
        tasks = ("embed",) if embeds else ("generate",)
        prompt = {"type": "token", "prompt_token_ids": prompt} if type(prompt) is list else prompt
        return processor.process_inputs("a", prompt, params, tasks)

    return admitted


@pytest.mark.parametrize("unknown", UNKNOWN)
def test_prompts(admit, unknown):
    assert admit([0, VOCAB - 1]).prompt_token_ids == [0, VOCAB - 1]
    with pytest.raises(VLLMValidationError, match=f"token id {unknown} .* it has {VOCAB} tokens"):
        admit([3, unknown, 4])


@pytest.fixture(scope="module")
def generate(tmp_path_factory):
    processor = make_processor(tmp_path_factory.mktemp("model"), tokenizer=True)

    def admitted(**options):
        prompt = {"type": "token", "prompt_token_ids": [3]}
        return processor.process_inputs("a", prompt, SamplingParams(**options), ("generate",))

    return admitted


@pytest.mark.parametrize(
    ("parameter", "known", "unknown"),
    [
        ("logit_bias", {VOCAB - 1: 1.0}, {3: 1.0, VOCAB: 1.0}),
        ("allowed_token_ids", [VOCAB - 1], [3, VOCAB]),
        ("stop_token_ids", [VOCAB - 1], [3, VOCAB]),
        ("bad_words", ["w4 w5"], ["w4 <image>"]),
    ],
)
def test_parameters(generate, parameter, known, unknown):
    generate(**{parameter: known})
    with pytest.raises(VLLMValidationError, match=f"{parameter}: token id {VOCAB} .* {VOCAB} tok"):
        generate(**{parameter: unknown})


def test_places_of_images_may_have_any_token(tmp_path):
    """A tower computes an image's place; text between its rows is embedded."""
    processor = make_processor(tmp_path, tokenizer=True)
    processor.mm_encoder_cache_size = 8  # of a model that takes images
    rows = PlaceholderRange(offset=1, length=3, is_embed=torch.tensor([True, False, True]))

    def prompt(between):
        token_ids = [3, VOCAB, between, VOCAB, 4]
        ranges = {"image": [rows]}
        places = {"prompt_token_ids": token_ids, "mm_placeholders": ranges}
        image = {"mm_kwargs": {"image": [None]}, "mm_hashes": {"image": ["a"]}}
        return {"type": "multimodal", **places, **image}

    def admit(between):
        return processor.process_inputs("a", prompt(between), SamplingParams(), ("generate",))

    assert admit(5).prompt_token_ids == [3, VOCAB, 5, VOCAB, 4]
    with pytest.raises(VLLMValidationError, match=f"token id {VOCAB + 1} "):
        admit(VOCAB + 1)


def test_a_start_names_the_tokens_that_only_the_tokenizer_has(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("vllm_metal"), "propagate", True)
    caplog.set_level(logging.INFO, "vllm_metal")
    make_processor(tmp_path, tokenizer=True)
    assert "'<image>' (96), '<pad>' (97), '<more>' (98)" in caplog.text
