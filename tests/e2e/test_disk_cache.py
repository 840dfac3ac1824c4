# SPDX-License-Identifier: Apache-2.0
"""A disk prefix cache: the next engine finds the stored blocks and answers the same.

`e2e/fuzz` plays plain models, preemption, codes and states there, and `kv_transfer/test_traffic.py`
finds generated blocks.
"""

import pytest
from e2e.disk import (
    HITS,
    STORED,
    ask,
    check_same,
    disk_engine,
    pages,
    random_prompts,
)
from e2e.fuzz.models import VOCAB
from e2e.harness import Dense, counters, greedy, run_out
from vllm.lora.request import LoRARequest

LENGTHS = (300, 16, 17, 131, 200, 64)


def whole_blocks(prompts):
    """Tokens of each prompt that are in whole blocks. The last token of a prompt is computed in any
    case, into its block that was loaded."""
    return [len(prompt) // 16 * 16 for prompt in prompts]


def restarted(model, folder, prompts, max_tokens=8, **options):
    """Cached tokens of each prompt in the second engine on a folder, whose texts are those of
    mlx-lm, as the first one's are, and its counters."""
    dense = Dense(model)
    with disk_engine(model, folder, **options) as llm:
        cold = ask(llm, prompts, max_tokens)
        run_out(llm)
        found = counters(llm)
        assert found.get(HITS, 0) == 0
        assert found[STORED] > 0
    for prompt, answer in zip(prompts, cold, strict=True):
        dense.check(prompt, answer.tokens)
    with disk_engine(model, folder, **options) as llm:
        warm = ask(llm, prompts, max_tokens)
        found = counters(llm)
    check_same(warm, cold)
    return [answer.cached for answer in warm], found


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setenv("VLLM_METAL_KERNELS", "interpret")


@pytest.mark.more
def test_groups_with_windows(tiny_models, tmp_path):
    prompts = random_prompts(LENGTHS, VOCAB)
    model = str(tiny_models / "windowed")
    cached, found = restarted(model, tmp_path, prompts)
    # With windows, vLLM leaves the last token out of what it looks up.
    hits = whole_blocks([prompt[:-1] for prompt in prompts])
    assert cached == hits
    assert found[HITS] == sum(hits)
    # A group with a window writes only the blocks that somebody can look back on.
    whole = sum(len(prompt) // 16 for prompt in prompts)
    assert whole < len(pages(tmp_path)) < 3 * whole


@pytest.mark.slow
def test_kernels(short, tmp_path, interpreted):
    prompts = random_prompts((50, 17), VOCAB)
    options = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    options["kv_cache_memory_bytes"] = 32 << 20
    cached, _ = restarted(short, tmp_path, prompts, 3, **options)
    assert cached == whole_blocks(prompts)


@pytest.mark.more
def test_an_adapter_finds_what_its_content_has_stored(tmp_path):
    """After a restart: retrained under its name, it finds nothing; restored, everything."""
    from engine.lora.toys import Toy, greedy_tokens  # imports PEFT

    toy = Toy("llama", tmp_path / "base")
    model, path = toy.save(), tmp_path / "adapter"
    (prompt,) = random_prompts([100], VOCAB)
    options = {"enable_lora": True, "skip_tokenizer_init": True, "max_num_batched_tokens": 64}

    def loaded():
        """Returns generated tokens, and the number of prompt tokens found on disk."""
        with disk_engine(model, tmp_path / "disk", **options) as llm:
            outputs = llm.generate(
                [{"prompt_token_ids": prompt}],
                greedy(8),
                use_tqdm=False,
                lora_request=LoRARequest("mine", 1, str(path)),
            )
            run_out(llm)
            return outputs[0].outputs[0].token_ids, counters(llm).get(HITS, 0)

    for seed, found in ((1, 0), (2, 0), (1, 96), (2, 96)):
        adapted = toy.adapter(path, seed)
        assert loaded() == (greedy_tokens(adapted, prompt, 8), found)
