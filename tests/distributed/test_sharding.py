# SPDX-License-Identifier: Apache-2.0
"""Ranks that share a model compute what the whole model computes; the reference is the latter."""

import json

import pytest
from distributed import ranks, whole_and_shared

from vllm_metal.distributed import sharding

#: Two processes, each of which builds the toys of all families, twice.
pytestmark = pytest.mark.more
#: Of float32 logits about 1 to 5, whose sums are in another order.
APART = 2e-5


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """What each of two ranks found."""
    out = ranks.run("distributed.whole_and_shared", tmp_path_factory.mktemp("ring"))
    return [json.loads(of_rank) for of_rank in out]


@pytest.fixture
def of_ranks(printed):
    """What each rank found of small models."""
    return [of_rank["models"] for of_rank in printed]


def test_all_ranks_go_on_with_what_the_first_one_sampled(printed):
    for of_rank in printed:
        assert of_rank["tokens"] == [[7, 8, 9], [False, False, True], [9], [0]]


def test_all_24_families(of_ranks):
    families = whole_and_shared.shardable()
    assert len(families) == 24
    for found in of_ranks:
        for family in {*families, "step3p5, 2 groups"} - {"step3p5"}:
            of_family = found[family]
            assert of_family["largest"] > 0.5, (family, of_family)
            assert of_family["apart"] < APART, (family, of_family)
            assert of_family["share"] < 0.95, (family, of_family)


def test_quantised_weights(of_ranks):
    for found in of_ranks:
        assert found["qwen3, 4 bits"]["apart"] < APART
        assert found["qwen3, 4 bits"]["share"] < 0.95


def test_heads_that_do_not_divide_are_refused(of_ranks):
    for found in of_ranks:
        assert found["step3p5"]["refused"].startswith(
            "--tensor-parallel-size 2 does not divide num_kv_heads 1 of 'step3p5'"
        )


def test_groups_of_codes_that_do_not_divide_are_refused(of_ranks):
    for found in of_ranks:
        refused = found["qwen3, 4 bits, a group in two"]["refused"]
        assert "--tensor-parallel-size 2 does not divide" in refused


def test_families_are_told_by_their_config():
    assert sharding.refusal({"model_type": "llama"}) is None
    assert sharding.refusal({"model_type": "qwen3_5_moe"}) is None  # its module is qwen3_5's
    assert "cannot split its heads" in (sharding.refusal({"model_type": "gemma3_text"}) or "")
