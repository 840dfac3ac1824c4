# SPDX-License-Identifier: Apache-2.0
"""A fitted block drafter is right, and wrong if any of its inputs is changed."""

from contextlib import contextmanager

import numpy as np
import pytest
from e2e.harness import counters, engine, generate, greedy, run_out
from engine.spec_decode import repeating
from engine.spec_decode.repeating import DRAFTER, PERIOD, TAPS, VOCAB
from vllm import SamplingParams

from vllm_metal.engine.spec_decode.block import BlockNetwork, BlockProposer
from vllm_metal.engine.spec_decode.block_drafter import BlockDrafter
from vllm_metal.patches.mlx_patches.seam import AttendingCache

BLOCK, K, NUM_TOKENS = 16, 4, PERIOD
CHANCE = 1 / (repeating.VOCAB - 1)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return repeating.write_target(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def drafter(target):
    return repeating.write_drafter(target.parent / "drafter", target)


def prompts():
    """Untrained texts of whole blocks and one token."""
    rng = np.random.default_rng(7)
    return [repeating.text(rng, 4 * BLOCK + 1) for _ in range(4)]


@contextmanager
def serving(target, drafter, **options):
    settings = {"max_model_len": 128, "skip_tokenizer_init": True, "block_size": BLOCK}
    speculation = {"method": "dflash", "model": str(drafter), "num_speculative_tokens": K}
    fixed = {"fixed_draft_length": True, "prompt_lookup": False}
    fixed |= options.pop("additional_config", {})
    settings |= {"speculative_config": speculation, "additional_config": fixed}
    with engine(str(target), **(settings | options)) as llm:
        yield llm


def accepted_a_step(llm, asked=None):
    """Answers the prompts and checks them; returns accepted drafts per verifying step."""
    before, asked = counters(llm), asked or prompts()
    outputs = generate(llm, asked, greedy(NUM_TOKENS, detokenize=False))
    after = counters(llm)
    assert outputs == [repeats(prompt) for prompt in asked]
    name = "vllm:spec_decode_num_{}"
    taken = [
        after[name.format(part)] - before.get(name.format(part), 0)
        for part in ("accepted_tokens", "drafts")
    ]
    return taken[0] / taken[1]


def repeats(prompt):
    """Returns the continuation of a repetitive text."""
    whole = np.resize(prompt[:PERIOD], len(prompt) + NUM_TOKENS)
    return whole[len(prompt) :].tolist()


def test_a_fitted_drafter_is_right_on_texts_it_never_saw(target, drafter):
    with serving(target, drafter) as llm:
        cold, hits = accepted_a_step(llm), counters(llm).get("vllm:prefix_cache_hits", 0)
        warm = accepted_a_step(llm)
        found = counters(llm)["vllm:prefix_cache_hits"] - hits
    assert found == 4 * len(prompts()) * BLOCK
    assert min(cold, warm) >= 1.0 > 20 * CHANCE
    assert warm == pytest.approx(cold, abs=0.2)


def _untrained(target):
    return repeating.write_drafter(target.parent / "untrained", target, trained=False)


def _changed(name, **changes):
    return lambda target: repeating.write_drafter(target.parent / name, target, **changes)


WRONG = {
    "untrained": _untrained,
    "causal": _changed("causal", is_causal=True),
} | {
    f"tap {'later' if layer > 2 else 'earlier'}": _changed(
        f"tap-{layer}",
        dflash_config=DRAFTER["dflash_config"] | {"target_layer_ids": [*TAPS[:-1], layer]},
    )
    for layer in (1, 3)
}


@pytest.mark.parametrize("name", list(WRONG))
def test_drafts_fail_where_the_network_is_another(target, drafter, name):
    with serving(target, drafter) as llm:
        right = accepted_a_step(llm)
    with serving(target, WRONG[name](target)) as llm:
        assert accepted_a_step(llm) < right / 2


class Shifted(AttendingCache):
    """A cache whose rows lie one position further."""

    def __init__(self, cache):
        self._cache = cache

    @property
    def offset(self):
        return self._cache.offset + 1

    def update_and_fetch(self, keys, values):
        return self._cache.update_and_fetch(keys, values)

    def attend(self, *arguments):
        return self._cache.attend(*arguments)

    def keys_and_values(self):
        return self, self  # as SharedCache's


def test_drafts_fail_where_positions_are_off_by_one(target, drafter, monkeypatch):
    with serving(target, drafter) as llm:
        right = accepted_a_step(llm)
    hidden = BlockDrafter.hidden
    monkeypatch.setattr(
        BlockDrafter,
        "hidden",
        lambda self, ids, caches: hidden(self, ids, [*map(Shifted, caches)]),
    )
    with serving(target, drafter) as llm:
        assert accepted_a_step(llm) < right / 2


def test_drafts_fail_where_a_block_of_context_is_missing_after_a_hit(target, drafter, monkeypatch):
    pools, proposer = [], BlockNetwork.proposer

    def noting(self, pool):
        pools.append(pool)
        return proposer(self, pool)

    def losing(self, req_idx, num_computed):
        """Clears the drafter's part of a hit's last block."""
        if num_computed:
            pool, last = pools[-1], num_computed // BLOCK - 1
            for name in (name for name in pool.layer_states if name.startswith("draft.")):
                storage = pool.layer_states[name].storage
                storage.wait_for_device()
                block = pool.block_tables.tables_np[pool.group_of[name]][req_idx, last]
                storage.clear_blocks(np.array([block], np.int32))

    monkeypatch.setattr(BlockNetwork, "proposer", noting)
    with serving(target, drafter) as llm:
        right = accepted_a_step(llm)
        monkeypatch.setattr(BlockProposer, "begin_request", losing)
        assert accepted_a_step(llm) < right / 2


def test_drafts_are_right_behind_blocks_from_disk(target, drafter, tmp_path):
    disk = {"prefix_cache_dir": str(tmp_path / "disk"), "prefix_cache_bytes": 64 << 20}
    with serving(target, drafter, additional_config=disk) as llm:
        right = accepted_a_step(llm)
        run_out(llm)
    with serving(target, drafter, additional_config=disk) as llm:
        assert accepted_a_step(llm) == pytest.approx(right, abs=0.2)
        found = counters(llm)["vllm:external_prefix_cache_hits"]
    assert found == 4 * len(prompts()) * BLOCK


#: Many requests: in chunks beside others that decode, preempted, in a pool of quantized values.
TRAFFIC = {
    "chunks": {"max_num_batched_tokens": 40},
    "preemption": {"num_gpu_blocks_override": 34, "max_num_batched_tokens": 160},
    "fp8": {"kv_cache_dtype": "fp8"},
    "a step at a time": {"async_scheduling": False},
}


@pytest.mark.parametrize(
    "name",
    [
        "preemption",
        *(pytest.param(x, marks=pytest.mark.more) for x in TRAFFIC if x != "preemption"),
    ],
)
def test_many_requests_of_any_length_are_drafted_for(target, drafter, name):
    rng = np.random.default_rng(9)
    asked = [repeating.text(rng, 2 * PERIOD + 5 * number) for number in range(16)]
    with serving(target, drafter, **TRAFFIC[name]) as llm:
        assert accepted_a_step(llm, asked) >= 1.0
        assert accepted_a_step(llm, asked[::-1]) >= 1.0
        found = counters(llm)
    assert (found["vllm:num_preemptions"] > 0) == (name == "preemption")
    assert found["vllm:prefix_cache_hits"] > 0


FILE, OLD, NEW = 128, 1, VOCAB - 1  # tokens of a file; a token that is edited, and what it becomes


@pytest.fixture(scope="module")
def rewriting(tmp_path_factory):
    """A model that repeats its last FILE tokens, and an often wrong drafter."""
    folder = tmp_path_factory.mktemp("rewriting")
    target = repeating.write_target(folder / "target", FILE)
    return target, repeating.write_drafter(
        folder / "drafter", target, period=FILE, num_unknown=VOCAB // 3
    )


def rewritten(rewriting, asked, lookup, **options):
    """Tokens of requests that write files again without one of the tokens, and counters.

    They are asked for twice. Every other one is sampled.

    Args:
        rewriting: model and drafter.
        asked: prompts.
        lookup: as `prompt_lookup`; None: no drafts at all.
        options: of the engine.
    """
    target, drafter = rewriting
    edit = {"logit_bias": {OLD: -100.0, NEW: 1.0}, "detokenize": False}
    sampled = {"temperature": 0.3, "max_tokens": FILE, "ignore_eos": True} | edit
    params = [
        greedy(FILE, **edit) if number % 2 else SamplingParams(seed=number, **sampled)
        for number in range(len(asked))
    ]
    speculation = {"method": "dflash", "model": str(drafter), "num_speculative_tokens": 7}
    settings = {"max_model_len": 3 * FILE + 32, "speculative_config": speculation}
    settings["additional_config"] = {"prompt_lookup": lookup}
    if lookup is None:
        settings |= {"speculative_config": None, "additional_config": {}}
    with serving(target, drafter, **(settings | options)) as llm:
        cold, warm = generate(llm, asked, params), generate(llm, asked, params)
        assert cold == warm
        return cold, counters(llm)


def accepted_of(found):
    """Calculates accepted drafts per verifying step from counters."""
    return found["vllm:spec_decode_num_accepted_tokens"] / found["vllm:spec_decode_num_drafts"]


def test_a_file_that_is_written_again_is_copied(rewriting):
    rng = np.random.default_rng(3)
    asked = [repeating.text(rng, 2 * FILE + 1, FILE) for _ in range(3)]
    assert sum(prompt[-FILE:].count(OLD) for prompt in asked) > 6
    found = {lookup: rewritten(rewriting, asked, lookup) for lookup in (None, False, True)}
    assert found[None][0] == found[False][0] == found[True][0]
    assert found[None][0][1] == [NEW if token == OLD else token for token in asked[1][-FILE:]]
    assert accepted_of(found[False][1]) >= 1.5
    assert accepted_of(found[True][1]) >= 2 * accepted_of(found[False][1])
    for _, seen in found.values():
        assert seen["vllm:prefix_cache_hits"] == len(asked) * 2 * FILE


@pytest.mark.more
@pytest.mark.parametrize(
    "name",
    [
        "preemption",
        *(pytest.param(x, marks=pytest.mark.slow) for x in TRAFFIC if x != "preemption"),
    ],
)
def test_copies_change_no_token(rewriting, name):
    rng = np.random.default_rng(4)
    asked = [repeating.text(rng, 2 * FILE + 1 + 5 * number, FILE) for number in range(4)]
    few = {"num_gpu_blocks_override": 85} if name == "preemption" else {}
    expected, _ = rewritten(rewriting, asked, None)
    tokens, found = rewritten(rewriting, asked, True, **(TRAFFIC[name] | few))
    if name != "fp8":  # samples are others
        assert tokens == expected
    assert (found["vllm:num_preemptions"] > 0) == (name == "preemption")
    assert found["vllm:prefix_cache_hits"] > 0
    assert accepted_of(found) > 3.0  # far more than the drafter's
