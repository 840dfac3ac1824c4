# SPDX-License-Identifier: Apache-2.0
"""A fitted assistant of Gemma 4 is right, and no longer where anything that it needs is off."""

import numpy as np
import pytest
from e2e.harness import counters
from e2e.test_block_drafts import BLOCK, CHANCE, K, Shifted, accepted_a_step, prompts, serving
from engine.spec_decode import repeating_gemma4

from vllm_metal.engine.spec_decode.assistant import (
    Assistant,
    AssistantNetwork,
    AssistantProposer,
)

READ = "layers.0"  # the target's layer whose keys and values tell the next tokens


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return repeating_gemma4.write_target(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def assistant(target):
    return repeating_gemma4.write_assistant(target.parent / "assistant", target)


def drafting(target, head):
    speculation = {"method": "mtp", "model": str(head), "num_speculative_tokens": K}
    return serving(target, head, speculative_config=speculation)


def test_a_fitted_assistant_is_right_until_what_it_reads_is_missing(target, assistant, monkeypatch):
    """Also behind a hit, of which no token is computed again; the text is right all the time."""
    pools, proposer = [], AssistantNetwork.proposer
    begin = AssistantProposer.begin_request

    def noting(self, pool):
        pools.append(pool)
        return proposer(self, pool)

    def losing(self, req_idx, num_computed):
        """Clears the part that the assistant reads of the last block that a hit has found."""
        begin(self, req_idx, num_computed)
        if num_computed:
            pool, storage = pools[-1], pools[-1].layer_states[READ].storage
            table_np = pool.block_tables.tables_np[pool.group_of[READ]]
            storage.wait_for_device()
            block = table_np[req_idx, num_computed // BLOCK - 1]
            storage.clear_blocks(np.array([block], np.int32))

    monkeypatch.setattr(AssistantNetwork, "proposer", noting)
    with drafting(target, assistant) as llm:
        cold, hits = accepted_a_step(llm), counters(llm).get("vllm:prefix_cache_hits", 0)
        warm = accepted_a_step(llm)
        found = counters(llm)["vllm:prefix_cache_hits"] - hits
        monkeypatch.setattr(AssistantProposer, "begin_request", losing)
        lost = accepted_a_step(llm)
    assert found == 4 * len(prompts()) * BLOCK
    assert min(cold, warm) >= 1.0 > 20 * CHANCE
    assert lost < warm / 2


@pytest.mark.more
def test_an_untrained_assistant_is_wrong(target, tmp_path):
    untrained = repeating_gemma4.write_assistant(tmp_path / "untrained", target, trained=False)
    with drafting(target, untrained) as llm:
        assert accepted_a_step(llm) < 0.5


@pytest.mark.more
@pytest.mark.parametrize("what", ["positions", "hidden states"])
def test_drafts_fail_where_what_it_is_given_is_off(target, assistant, monkeypatch, what):
    """Positions by one; or hidden states, which count the passes: all are the first pass's."""
    call = Assistant.__call__

    def other(self, embeds, hidden, caches):
        if what == "positions":
            return call(self, embeds, hidden, [*map(Shifted, caches)])
        return call(self, embeds, hidden, caches)[0], hidden

    with drafting(target, assistant) as llm:
        right = accepted_a_step(llm)
    monkeypatch.setattr(Assistant, "__call__", other)
    with drafting(target, assistant) as llm:
        assert accepted_a_step(llm) < right / 2
