# SPDX-License-Identifier: Apache-2.0
"""Models with bidirectional prompts, drafts and preemption: transformers' tokens."""

import numpy as np
import pytest
import torch
from e2e.harness import TIE, counters, engine, generate, greedy
from e2e.test_hybrids import NGRAM
from engine.batch.test_prompt_column import CONFIG, expected_of
from engine.models import published
from engine.models.recurrent import VOCAB
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.more
WHOLE = {"enable_prefix_caching": None, "skip_tokenizer_init": True, "max_model_len": 256}
MAX_TOKENS = 40


def test_tokens_are_transformers(tmp_path):
    model = AutoModelForCausalLM.from_config(CONFIG, attn_implementation="eager").float().eval()
    published.draw(model, torch.Generator().manual_seed(3))
    model.save_pretrained(tmp_path)
    rng = np.random.default_rng(6)
    prompts = [rng.integers(3, VOCAB, length).tolist() for length in (5, 70, 33, 16, 48, 90)]
    options = WHOLE | {"max_num_batched_tokens": 256, "num_gpu_blocks_override": 24}
    with engine(str(tmp_path), speculative_config=NGRAM, **options) as llm:
        assert not llm.llm_engine.vllm_config.scheduler_config.enable_chunked_prefill
        found = generate(llm, prompts, greedy(MAX_TOKENS, detokenize=False))
        # Again, where a prefix cache would have hits.
        assert found == generate(llm, prompts, greedy(MAX_TOKENS, detokenize=False))
        seen = counters(llm)
    assert seen["vllm:num_preemptions"] > 0 and seen["vllm:spec_decode_num_accepted_tokens"] > 0
    assert seen.get("vllm:prefix_cache_hits", 0) == 0
    for prompt, tokens in zip(prompts, found, strict=True):
        logits = expected_of(model, [*prompt, *tokens], len(prompt))[len(prompt) - 1 : -1]
        chosen = np.take_along_axis(logits, np.array(tokens)[:, None], axis=1)[:, 0]
        assert (logits.max(axis=1) - chosen <= TIE).all()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (
            {"enable_prefix_caching": True},
            "--enable-prefix-caching is not supported with prefix_lm",
        ),
        ({"enable_chunked_prefill": True}, "--enable-chunked-prefill is not supported with"),
        ({"max_num_batched_tokens": 64}, "max_num_batched_tokens"),
        ({"additional_config": {"prefix_cache_dir": "/nowhere"}}, "prefix_cache_dir"),
        ({"runner": "pooling"}, "--runner pooling with prefix_lm=true"),
    ],
)
def test_what_splits_or_shares_prompts_is_rejected(options, named, tmp_path):
    from vllm.engine.arg_utils import EngineArgs

    CONFIG.architectures = ["HrmTextForCausalLM"]
    CONFIG.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=named):
        EngineArgs(model=str(tmp_path), **(WHOLE | options)).create_engine_config()
