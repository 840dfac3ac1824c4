# SPDX-License-Identifier: Apache-2.0
"""No step exceeds the engine's memory limit.

The devices are small (`e2e.small_device`), and states large against all else.
"""

from dataclasses import replace
from statistics import median

import numpy as np
import pytest
from e2e.small_device import MIB, ngram, options, play, play_in_the_least
from engine.models.recurrent import FAMILIES, VOCAB, Family, write_model

pytestmark = pytest.mark.more

#: The shapes of qwen3_next whose steps took 1,846 MiB of 1,446: 3.2 MiB of states a request.
HEADS = {
    "linear_num_value_heads": 16,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
#: Settings that make a family's states large.
LARGE = {
    "qwen3_next": [
        HEADS,
        HEADS | {"linear_num_value_heads": 4, "linear_num_key_heads": 4},
        HEADS | {"linear_key_head_dim": 64, "linear_value_head_dim": 64},
    ],
    "falcon_h1": [
        {"mamba_n_heads": 16, "mamba_d_head": 64, "mamba_d_ssm": 1024, "mamba_d_state": size}
        for size in (32, 128)
    ],
    "jamba": [{"hidden_size": 256, "mamba_d_state": size} for size in (16, 64)],
    "lfm2": [{"conv_L_cache": size, "hidden_size": 128, "block_dim": 128} for size in (3, 32)],
    "mamba2": [
        {"num_heads": heads, "head_dim": 64, "hidden_size": heads * 32, "state_size": size}
        for heads, size in ((8, 64), (16, 128))
    ],
    "recurrent_gemma": [
        {"hidden_size": size, "lru_width": size, "num_attention_heads": size // 16}
        for size in (256, 1024)
    ],
}
#: A family without states.
PLAIN = Family("llama", "LlamaForCausalLM", {"num_hidden_layers": 4, "head_dim": 64})
QUICK, ALL = 1, 300


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Model folders, each written once."""
    folder = tmp_path_factory.mktemp("large-states")

    def write(name, index):
        path = folder / f"{name}-{index}"
        if name == "llama":
            family = PLAIN
        else:
            family = FAMILIES[name]
            family = replace(family, config=family.config | LARGE[name][index])
        return str(path) if path.exists() else write_model(family, path)

    return write


def prompts_of(rng, count, longest):
    """Makes repetitive texts, so that drafts are found."""
    found = []
    for _ in range(count):
        period = rng.integers(3, VOCAB, int(rng.integers(2, 8))).tolist()
        found.append((period * longest)[: int(rng.integers(2, longest + 1))])
    return found


@pytest.fixture(scope="module")
def ratios():
    """Ratio of peak to limit per setting; printed at the end."""
    found = {}
    yield found
    if found:
        worst = max(found, key=found.get)
        print(
            f"\npeak / limit of {len(found)} settings: worst {found[worst]:.3f} (seed {worst}), "
            f"median {median(found.values()):.3f}"
        )


def test_32_requests_that_verify_drafts_each(written):
    """All requests verify 6 drafts in one step."""
    share = 1446 * MIB
    prompts = prompts_of(np.random.default_rng(0), 32, 8)
    settings = {"max_model_len": 256, "max_num_batched_tokens": 256, "max_num_seqs": 32}
    # A network always has drafts.
    drafting = {"method": "draft_model", "model": written("llama", 0), "num_speculative_tokens": 6}
    played = play(
        written("qwen3_next", 0),
        prompts,
        5,
        **options(share, speculative_config=drafting, **settings),
    )
    assert max(played.requests) == 32
    assert max(played.drafts) == 32 * 6
    assert played.limit >= share * 0.999  # more where this process holds other things
    assert max(played.peaks) <= played.limit, played


@pytest.mark.timeout(1800)  # mlx-lm computes Jamba's recurrence in Python, token by token
@pytest.mark.parametrize(
    "seed",
    [*range(QUICK), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(QUICK, ALL))],
)
def test_random_settings(written, ratios, seed):
    rng = np.random.default_rng(seed)
    name = [*LARGE, "llama"][seed % (1 + len(LARGE))]
    model = written(name, int(rng.integers(len(LARGE.get(name, [None])))))
    drafts = int(rng.choice([0, 1, 2, 3, 6, 10]))
    chunk = int(rng.choice([16, 64, 256, 512]))
    requests = min(int(rng.choice([1, 2, 8, 16, 32, 48])), chunk)
    settings = {
        "max_model_len": 256,
        "max_num_batched_tokens": chunk + requests * drafts * int(rng.integers(2)),
        "max_num_seqs": requests,
        "speculative_config": ngram(drafts) if drafts else None,
        "async_scheduling": bool(rng.integers(2)),
        "enable_prefix_caching": bool(rng.integers(2)),
        "block_size": 32 if name == "mamba2" else 16,
    }
    prompts = prompts_of(rng, 1 + requests * 3 // 2, int(rng.choice([8, 40, 150])))
    share = int(rng.integers(48, 512)) * MIB
    played = play_in_the_least(model, prompts, int(rng.integers(3, 12)), share, **settings)
    ratios[seed] = played.ratio
    assert max(played.peaks) <= played.limit, (name, settings, played)
