# SPDX-License-Identifier: Apache-2.0
"""Decoders that score and classify, against transformers in float32."""

import numpy as np
import pytest
import torch
from e2e.harness import counters, engine
from engine.pooling import checkpoints
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Qwen3Config,
    Qwen3ForSequenceClassification,
)

QUERY = "which of these lines is about the weather in the north?"
DOCUMENTS = [f"line {n}: " + " ".join(f"{n * m} degrees" for m in range(n)) for n in range(1, 13)]
SMALL = {"max_model_len": 256, "max_num_batched_tokens": 32, "kv_cache_memory_bytes": 8 << 20}
RERANKER = {
    "architectures": ["Qwen3ForSequenceClassification"],
    "classifier_from_token": ["no", "yes"],
    "is_original_qwen3_reranker": True,
}


def last_logits(model, token_ids):
    """Returns [n, V or labels] after the last token of each text, one at a time."""
    with torch.no_grad():
        found = [model(torch.tensor([ids])).logits[0] for ids in token_ids]
    return torch.stack([each[-1] if each.ndim == 2 else each for each in found])


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.more)])
def test_a_reranker_compares_two_tokens_of_its_head(tmp_path, tied):
    folder = checkpoints.qwen3(tmp_path / "model", tied=tied)
    with engine(folder, runner="pooling", hf_overrides=RERANKER, **SMALL) as llm:
        scored = llm.score(QUERY, DOCUMENTS, use_tqdm=False)
        again = llm.score(QUERY, DOCUMENTS, use_tqdm=False)
        assert counters(llm)["vllm:prefix_cache_hits"] > 0
    ids = [each.prompt_token_ids for each in scored]
    assert [len(each) for each in ids] == sorted(len(each) for each in ids)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    compared = tokenizer.convert_tokens_to_ids(["no", "yes"])
    logits = last_logits(AutoModelForCausalLM.from_pretrained(folder), ids)
    wanted = logits[:, compared].softmax(dim=-1)[:, 1].numpy()
    assert wanted.std() > 0.01
    for found in (scored, again):
        np.testing.assert_allclose([each.outputs.score for each in found], wanted, atol=1e-4)


@pytest.mark.more
def test_a_classifier_reads_its_layer_of_the_files(tmp_path):
    folder = checkpoints.qwen3(tmp_path / "model")
    labels = {str(n): name for n, name in enumerate(("cold", "mild", "hot"))}
    config = Qwen3Config.from_pretrained(folder, id2label=labels, pad_token_id=0)
    torch.manual_seed(3)
    Qwen3ForSequenceClassification(config).save_pretrained(folder)
    with engine(folder, **SMALL) as llm:
        classified = llm.classify(DOCUMENTS, use_tqdm=False)
    with engine(folder, pooler_config={"task": "token_classify"}, **SMALL) as llm:
        per_token = llm.encode(DOCUMENTS[-1:], pooling_task="token_classify", use_tqdm=False)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    wanted = last_logits(model, [each.prompt_token_ids for each in classified]).softmax(dim=-1)
    assert wanted.shape == (len(DOCUMENTS), 3)
    found = torch.tensor([each.outputs.probs for each in classified])
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)
    torch.testing.assert_close(per_token[0].outputs.data[-1], wanted[-1], atol=1e-4, rtol=0)
