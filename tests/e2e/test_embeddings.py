# SPDX-License-Identifier: Apache-2.0
"""Decoders that embed, against sentence-transformers and transformers in float32: whatever the
batch, the chunks and the prefix hits."""

import numpy as np
import pytest
import torch
from e2e.harness import counters, engine
from engine.pooling import checkpoints
from transformers import AutoModel, AutoTokenizer
from vllm.exceptions import VLLMValidationError

HITS, PREEMPTIONS = "vllm:prefix_cache_hits", "vllm:num_preemptions"
#: Texts of increasing length, half of which share several blocks.
INSTRUCTION = "Instruct: Given a question, find the passages that answer it.\nQuery: "
TEXTS = [
    (INSTRUCTION if count % 2 else "") + " ".join(f"word{count} {n * count}" for n in range(count))
    for count in range(1, 21)
]
SMALL = {"max_model_len": 256, "max_num_batched_tokens": 32, "kv_cache_memory_bytes": 8 << 20}


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    """A toy Qwen3-Embedding as published: a decoder's arrays, last token, normalized."""
    folder = checkpoints.qwen3(tmp_path_factory.mktemp("embedder") / "model")
    checkpoints.as_decoder_alone(folder)
    checkpoints.as_sentence_transformer(folder)
    return folder


@pytest.fixture(scope="module")
def llm(embedder):
    with engine(embedder, hf_overrides={"matryoshka_dimensions": [8, 32]}, **SMALL) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(embedder):
    """Returns [n, H] of TEXTS by sentence-transformers."""
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(embedder, device="cpu").encode(TEXTS)


def embedded(llm, texts, **options):
    return np.array(
        [each.outputs.embedding for each in llm.embed(texts, use_tqdm=False, **options)]
    )


def cosines(found, expected):
    lengths = np.linalg.norm(found, axis=-1) * np.linalg.norm(expected, axis=-1)
    return (found * expected).sum(axis=-1) / lengths


def test_embeddings_are_those_of_sentence_transformers(llm, expected):
    before = counters(llm)[HITS]
    together = embedded(llm, TEXTS)
    assert counters(llm)[HITS] > before  # half of the texts begin alike
    again, middle = embedded(llm, TEXTS[::-1])[::-1], counters(llm)[HITS]
    alone = embedded(llm, TEXTS[7:8])
    assert counters(llm)[HITS] - middle >= 16
    for found, wanted in ((together, expected), (again, expected), (alone, expected[7:8])):
        assert cosines(found, wanted).min() >= 0.9999
        np.testing.assert_allclose(found, wanted, atol=1e-4)
    apart = cosines(expected[:, None], expected[None])
    assert (apart + 2 * np.eye(len(TEXTS)) > 0.9999).sum() == len(TEXTS)  # texts differ by more


def test_dimensions_and_normalization_are_a_request_s(llm, expected):
    from vllm import PoolingParams

    asked = [
        PoolingParams(dimensions=8),
        PoolingParams(use_activation=False),
        PoolingParams(dimensions=32, use_activation=False),
    ]
    found = llm.embed(TEXTS[:3], pooling_params=asked, use_tqdm=False)
    cut, whole, long_cut = (np.array(each.outputs.embedding) for each in found)
    assert (len(cut), len(whole), len(long_cut)) == (8, checkpoints.HIDDEN, 32)
    np.testing.assert_allclose(np.linalg.norm(cut), 1, atol=1e-5)
    assert cosines(cut, expected[0, :8]) >= 0.9999
    assert np.linalg.norm(whole) > 1.5
    assert cosines(whole, expected[1]) >= 0.9999
    assert cosines(long_cut, expected[2, :32]) >= 0.9999


@pytest.mark.more
def test_every_token_of_a_text_in_chunks(embedder):
    """Also after a prefix hit, where the pooler still needs all rows."""
    text = TEXTS[-1]
    with engine(embedder, pooler_config={"task": "token_embed"}, **SMALL) as llm:
        found, again = (
            llm.encode([text], pooling_task="token_embed", use_tqdm=False)[0] for _ in range(2)
        )
    ids = AutoTokenizer.from_pretrained(embedder)(text, return_tensors="pt")
    assert ids["input_ids"].shape[1] > 3 * SMALL["max_num_batched_tokens"]
    with torch.no_grad():
        hidden = AutoModel.from_pretrained(embedder)(**ids).last_hidden_state[0]
    wanted = torch.nn.functional.normalize(hidden, dim=-1)
    for each in (found, again):
        torch.testing.assert_close(each.outputs.data, wanted, atol=1e-4, rtol=0)


def test_a_text_that_is_too_long_is_cut_or_refused(llm, expected):
    long = TEXTS[-1] * 8
    with pytest.raises(VLLMValidationError, match="maximum context length is 256"):
        llm.embed([long], use_tqdm=False)
    found = embedded(llm, [TEXTS[3] + " and more" * 300], tokenization_kwargs=kept(llm, TEXTS[3]))
    assert cosines(found, expected[3:4]).min() >= 0.9999


def kept(llm, text):
    """Returns parameters that truncate a longer text to this one."""
    count = len(llm.get_tokenizer()(text)["input_ids"])
    return {"truncate_prompt_tokens": count, "truncation_side": "right"}


def test_a_pooler_that_fails_fails_its_step_alone(llm, expected, monkeypatch):
    core = llm.llm_engine.engine_core.engine_core
    pooler = core.model_executor.driver_worker.worker.networks.pooler

    def failing(*args, **options):
        monkeypatch.undo()
        raise RuntimeError("the pooler has had enough")

    monkeypatch.setattr(pooler, "forward", failing)
    (failed,) = llm.embed(TEXTS[:1], use_tqdm=False)
    assert "the pooler has had enough" in failed.error.message
    found = embedded(llm, TEXTS[:2])
    assert cosines(found, expected[:2]).min() >= 0.9999


@pytest.mark.more
def test_preempted_requests(embedder, expected):
    """Two texts grow side by side until the pool holds only one."""
    options = {"num_gpu_blocks_override": 17, "long_prefill_token_threshold": 16}
    with engine(embedder, max_model_len=256, max_num_batched_tokens=64, **options) as llm:
        found = embedded(llm, TEXTS[::-1])[::-1]
        assert counters(llm)[PREEMPTIONS] > 0
    assert cosines(found, expected).min() >= 0.9999


@pytest.mark.more
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_poolings_that_read_a_whole_text(tmp_path, pooling):
    """Also with a Dense layer behind them, without a norm."""
    from sentence_transformers import SentenceTransformer

    folder = checkpoints.qwen3(tmp_path / "model")
    checkpoints.as_sentence_transformer(folder, pooling, normalize=False, dense=24)
    wanted = SentenceTransformer(folder, device="cpu").encode(TEXTS)
    with engine(
        folder,
        max_model_len=256,
        max_num_batched_tokens=256,
        kv_cache_memory_bytes=8 << 20,
        enable_prefix_caching=None,
    ) as llm:
        found = embedded(llm, TEXTS)
    assert found.shape == (len(TEXTS), 24)
    np.testing.assert_allclose(found, wanted, atol=1e-4)
