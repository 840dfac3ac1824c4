# SPDX-License-Identifier: Apache-2.0
"""Random traffic on the real engine: tokens that are right, and nothing kept behind."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from e2e.fuzz import loading
from e2e.fuzz.campaign import Campaign, reproduction
from e2e.fuzz.shrink import MOST_REPLAYS, Part, shrink
from e2e.fuzz.traffic import NUM_REQUESTS, SIMPLER, Space, cut, draw
from e2e.harness import TIE
from vllm.v1.core import kv_cache_utils

from vllm_metal.engine.batch.requests import BlockTables
from vllm_metal.engine.kv_cache.pages import BlockPages
from vllm_metal.kv_transfer.disk.view import DiskView
from vllm_metal.platform.metal_platform import MetalPlatform

NUM_SEEDS = 12
#: Seeds in `make test`: lookup in a pool of codes, windows with a block drafter, and states with
#: drafts, with so few blocks that requests are preempted; and, beside a disk, states and a draft
#: model, and K/V alone.
QUICK, QUICK_ON_DISK, NUM_QUICK = (21, 64, 39), (5, 48), 14
#: The same with the contract of vLLM's second model runner, which 39 of QUICK also has.
SECOND = (51, 55, 63)
#: Sparse attention with n-gram drafts, with a draft model, and without drafts.
SPARSE = (277, 317, 337)
SALT_SEED = 3  # of which few requests hit one another's prefixes across tenants
SLEEPING = MetalPlatform().is_sleep_mode_available()


def served(campaign, seeds, **options):
    """Returns totals of the seeds' runs; fails if a run fails."""
    runs = (draw(seed, sleeping=SLEEPING, **options) for seed in seeds)
    failure = campaign.first_failure(runs)
    assert failure is None, str(failure)
    return campaign.totals


@pytest.mark.parametrize(
    ("seeds", "num_requests"),
    [
        pytest.param(QUICK, NUM_QUICK, id="quick"),
        pytest.param(range(2), NUM_REQUESTS, marks=pytest.mark.more, id="first"),
        pytest.param(SECOND, NUM_QUICK, marks=pytest.mark.more, id="second contract"),
        pytest.param(SPARSE, NUM_QUICK, marks=pytest.mark.more, id="sparse attention"),
        pytest.param(range(2, NUM_SEEDS), NUM_REQUESTS, marks=pytest.mark.slow, id="others"),
    ],
)
def test_every_request_gets_the_text_it_gets_alone(campaign, seeds, num_requests):
    totals = served(campaign, seeds, num_requests=num_requests)
    assert NUM_SEEDS * NUM_REQUESTS >= 500
    assert totals["requests"] == len(seeds) * num_requests
    tried = "preemptions", "cached tokens", "accepted drafts", "prompts in chunks"
    for name in (*tried, "aborted", "resets"):
        assert totals[name] > 0, name
    # Ties must stay rare, or they would hide faults.
    assert totals["ties"] <= totals["tokens"] / 500


@pytest.mark.parametrize(
    ("seeds", "num_requests", "kills"),
    [
        pytest.param(QUICK_ON_DISK, NUM_QUICK, False, id="quick"),
        # Of 69 every whole block is found again: fp8 in blocks of 32. 141 has windows, too.
        pytest.param((69, 141), NUM_REQUESTS, False, id="first", marks=pytest.mark.more),
        # So is of 23 and 38: int8, and steps that are not scheduled ahead.
        pytest.param(
            (1, 2, 3, 4, 5, 10, 23, 38), NUM_REQUESTS, True, id="others", marks=pytest.mark.slow
        ),
    ],
)
def test_with_a_disk_and_a_restart(campaign, seeds, num_requests, kills):
    on_disk = Campaign(campaign.models, disk=True, kills=kills)
    totals = on_disk.totals
    for seed in seeds:
        before = totals["tokens from disk"]
        served(on_disk, [seed], num_requests=num_requests)
        assert totals["tokens from disk"] > before, seed
    assert totals["requests"] == 2 * len(seeds) * num_requests
    assert totals["bad files"] == 0
    assert totals["killed"] == (kills and 1)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 1050, 10))
def test_more_seeds(campaign, first):
    served(campaign, range(first, first + 10))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(0, 300, 60))
def test_random_folders(first):
    totals = Counter()
    assert loading.first_failure(first, 60, totals) is None
    assert totals.total() == 60 and len(totals) == len(set(loading.CASES))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_real_weights(smollm2, tmp_path):
    for name in ("smollm2", "smollm2-draft"):
        (tmp_path / name).symlink_to(smollm2)
    space = Space(vocab=49152, max_len=128, longest_output=12)
    campaign = Campaign(tmp_path, tie=TIE)
    served(campaign, range(6), num_requests=10, model="smollm2", space=space)


def test_a_seed_is_one_run_and_its_parts_keep_what_they_keep():
    run = draw(7)
    assert run == draw(7) != draw(8)
    assert cut(run, None, ()) == run
    part = cut(run, [3, 5], ["speculation"])
    assert [request.index for request in part.requests] == [3, 5]
    assert part.requests == tuple(run.requests[index] for index in (3, 5))
    assert part.setting == replace(run.setting, method=None)
    for name in SIMPLER:
        assert len(cut(run, None, [name]).requests) == NUM_REQUESTS


def test_a_failure_is_reported_by_the_command_that_shows_it():
    part = Part(1234, (3, 7), ("speculation", "async"))
    assert reproduction(part) == "make fuzz FUZZ='1234 --only 3,7 --without speculation,async'"


def fails_with(requests, name):
    """Returns a predicate: the run has these requests and a feature that `name` removes."""
    return lambda run: (
        set(requests) <= {request.index for request in run.requests}
        and cut(run, None, [name]) != run
    )


@pytest.mark.parametrize("requests", [(41,), (3, 7), (0, 20, 41)])
def test_a_failure_is_made_as_small_as_it_gets(requests):
    run, replays = draw(1), []
    fails = fails_with(requests, "speculation")
    assert fails(run)

    def counted(part):
        replays.append(part)
        return fails(part)

    assert shrink(run, counted, max(requests)).only == requests
    assert len(replays) <= MOST_REPLAYS
    part = shrink(run, fails, most_replays=10)
    assert fails(part.of(run)) and len(part.only) < NUM_REQUESTS


def test_only_what_the_failure_needs_stays():
    run = draw(1)
    part = shrink(run, fails_with((5,), "speculation"), 5)
    assert sorted((*part.without, "speculation")) == sorted(SIMPLER)


def explained(campaign, seed, num_requests, most_replays):
    run = draw(seed, num_requests=num_requests)
    problem = campaign.examine(run)
    assert problem is not None, "the planted fault went unseen"
    return campaign.explain(run, problem, most_replays)


@pytest.mark.slow
def test_a_hash_without_the_salt_is_found_and_made_small(campaign, monkeypatch):
    keys = kv_cache_utils.generate_block_hash_extra_keys

    def unsalted(request, start, *others):
        return keys(request, start + 1, *others)  # only the first block's has the salt

    monkeypatch.setattr(kv_cache_utils, "generate_block_hash_extra_keys", unsalted)
    failure = explained(campaign, SALT_SEED, 8, 8)
    assert failure.problem.kind == "cached"
    assert len(failure.part.only) <= 3


def one_row_off(monkeypatch):
    """Swaps pages within a load."""
    load = BlockPages.import_pages

    def shifted(self, group, blocks_np, rows):
        load(self, group, blocks_np, np.roll(rows[: len(blocks_np)], 1, axis=0))

    monkeypatch.setattr(BlockPages, "import_pages", shifted)


def some_not_kept(monkeypatch):
    wants = DiskView.wants
    monkeypatch.setattr(
        DiskView, "wants", lambda self, name, key: key[0] % 5 > 0 and wants(self, name, key)
    )


@pytest.mark.more
@pytest.mark.parametrize(
    ("plant", "kind"),
    [
        (one_row_off, "token"),
        pytest.param(some_not_kept, "missed", marks=pytest.mark.slow),
    ],
)
def test_pages_that_are_wrong_or_missing_on_a_disk_are_found(campaign, monkeypatch, plant, kind):
    plant(monkeypatch)
    run = draw(QUICK_ON_DISK[-1], num_requests=NUM_QUICK)
    assert Campaign(campaign.models, disk=True).examine(run).kind == kind


@pytest.mark.slow
def test_a_block_table_with_two_blocks_swapped_is_found_and_made_small(campaign, monkeypatch):
    append = BlockTables.append

    def swapped(self, req_idx, block_ids):
        append(self, req_idx, [[*ids[:-2], *reversed(ids[-2:])] for ids in block_ids])

    monkeypatch.setattr(BlockTables, "append", swapped)
    failure = explained(campaign, 1, NUM_REQUESTS, MOST_REPLAYS)
    assert failure.problem.kind == "token"
    assert len(failure.part.only) <= 2  # one that fills the blocks, one that reads them
