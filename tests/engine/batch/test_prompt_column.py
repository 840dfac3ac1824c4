# SPDX-License-Identifier: Apache-2.0
"""Prompts whose tokens attend to all of the prompt: logits equal transformers' HRM Text."""

from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
import torch
from engine.models import published
from engine.models.recurrent import VOCAB
from engine.models.test_executor import BLOCK, executor, new_request
from transformers import AutoModelForCausalLM, HrmTextConfig

from vllm_metal.engine.batch.input_batch import prepare
from vllm_metal.engine.batch.per_request_state import RequestsRefused
from vllm_metal.engine.batch.prompt_column import PromptColumn
from vllm_metal.engine.batch.requests import BlockTables, Requests
from vllm_metal.engine.models.loader import lazy_model

CONFIG = HrmTextConfig(
    vocab_size=VOCAB,
    hidden_size=96,
    intermediate_size=88,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=6,
    head_dim=16,
    H_cycles=2,
    L_cycles=2,
    prefix_lm=True,
    embedding_scale=3.0,
    tie_word_embeddings=False,
)
PROMPTS = (21, 2 * BLOCK + 3)  # tokens
LENGTH = 45


@pytest.fixture(scope="module")
def reference():
    model = AutoModelForCausalLM.from_config(CONFIG, attn_implementation="eager").float().eval()
    published.draw(model, torch.Generator().manual_seed(3))
    return model


def expected_of(model, text, num_prompt_tokens):
    """Returns logits of a text whose prompt is one bidirectional block."""
    kinds = (torch.arange(len(text)) < num_prompt_tokens).long()[None]
    with torch.no_grad():
        return model(torch.tensor([text]), token_type_ids=kinds).logits[0].numpy()


class Step:
    """Two requests with known texts, computed in steps."""

    def __init__(self, model, texts):
        self.run = executor(model, "hrm_text", num_blocks=20)
        self.tables, self.column = BlockTables(1, 2, 9), PromptColumn(2)
        self.requests = Requests(2, 128, self.tables)
        for index, (text, length) in enumerate(zip(texts, PROMPTS, strict=True)):
            blocks = list(range(1 + 6 * index, 7 + 6 * index))
            self.requests.add_request(new_request(str(index), text, blocks))
            state = SimpleNamespace(req_idx=index, req_id=str(index), num_prompt_tokens=length)
            self.column.enter(state)

    def compute(self, counts, done):
        """Returns logits of each request's next `counts` tokens; `done` are computed."""
        for req_id, number in done.items():
            self.requests.num_computed_tokens_np[self.requests[req_id].req_idx] = number
        batch = prepare(self.requests, counts, mx.zeros(2, mx.int32))
        inputs = self.column.inputs(batch, batch.inputs)
        hidden = self.run.forward_hidden(batch, self.tables, inputs)
        logits = np.array(self.run.compute_logits(hidden))
        return np.split(logits, batch.query_start_loc_np[1:-1])


@pytest.mark.more
def test_prompts_attend_as_a_whole_and_the_rest_to_what_precedes(reference, tmp_path):
    reference.save_pretrained(tmp_path)
    model = lazy_model(tmp_path, mx.float32)
    rng = np.random.default_rng(5)
    texts = [rng.integers(3, VOCAB, LENGTH).tolist() for _ in PROMPTS]
    expected = [expected_of(reference, text, n) for text, n in zip(texts, PROMPTS, strict=True)]
    causal = expected_of(reference, texts[0], 0)
    assert np.abs(expected[0] - causal).max() > 0.1, "whether prompts are whole makes no difference"
    step = Step(model, texts)
    # The second prompt starts while the first request decodes; it has tokens behind its prompt, as
    # after a preemption.
    steps = [
        ({"0": 21}, {}),
        ({"0": 1, "1": 40}, {"0": 21}),
        ({"0": 3, "1": 5}, {"0": 22, "1": 40}),
    ]
    found = {"0": [], "1": []}
    for counts, done in steps:
        for req_id, logits in zip(counts, step.compute(counts, done), strict=True):
            found[req_id].append(logits)
    for index, parts in enumerate(found.values()):
        logits = np.concatenate(parts)
        np.testing.assert_allclose(logits, expected[index][: len(logits)], atol=2e-3)


def test_a_part_of_a_prompt_is_rejected_with_its_request(tmp_path):
    column = PromptColumn(2)
    column.enter(SimpleNamespace(req_idx=1, req_id="b", num_prompt_tokens=9))
    for start, count in ((0, 8), (4, 5)):
        rows = SimpleNamespace(
            query_start_loc_np=np.array([0, count]),
            req_indices_np=np.array([1]),
            positions_np=np.arange(start, start + count),
        )
        with pytest.raises(RequestsRefused) as refused:
            column.inputs(rows, SimpleNamespace(runs=()))
        assert "--max-num-batched-tokens" in str(refused.value.errors["b"])
    column.leave(1)
    assert column.inputs(rows, inputs := SimpleNamespace(runs=())) is inputs
