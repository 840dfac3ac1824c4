# SPDX-License-Identifier: Apache-2.0
"""Sharded ranks compute the same as the whole model."""

import json
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest
from engine.distributed import ranks, whole_and_shared
from engine.weights.toys import write_quantized

from vllm_metal.engine.distributed import sharding
from vllm_metal.engine.distributed.sharding import ShardingError, shard
from vllm_metal.engine.models.loader import lazy_model

#: Two processes, each of which builds the toys of all families, twice.
pytestmark = pytest.mark.more
#: Bound for float32 logits of about 1 to 5, with sums in another order.
APART = 2e-5


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """Output of each of two ranks."""
    out = ranks.run("engine.distributed.whole_and_shared", tmp_path_factory.mktemp("ring"))
    return [json.loads(of_rank) for of_rank in out]


@pytest.fixture
def of_ranks(printed):
    """Results of each rank for small models."""
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


def test_quantized_weights(of_ranks):
    for found in of_ranks:
        assert found["qwen3, 4 bits"]["apart"] < APART
        assert found["qwen3, 4 bits"]["share"] < 0.95


def test_heads_that_do_not_divide_are_refused(of_ranks):
    for found in of_ranks:
        assert found["step3p5"]["refused"].startswith(
            "--tensor-parallel-size 2 does not divide num_kv_heads=1 of 'step3p5'"
        )


def test_groups_of_codes_that_do_not_divide_are_refused(of_ranks):
    for found in of_ranks:
        refused = found["qwen3, 4 bits, a group in two"]["refused"]
        assert "--tensor-parallel-size 2 does not divide" in refused


def test_families_are_told_by_their_config():
    assert sharding.refusal({"model_type": "llama"}) is None
    assert sharding.refusal({"model_type": "qwen3_5_moe"}) is None  # its module is qwen3_5's
    assert "cannot split its heads" in (sharding.refusal({"model_type": "gemma3_text"}) or "")


@dataclass(frozen=True)
class Ring:
    """One of two ranks, without the other."""

    place: int

    def size(self):
        return 2

    def rank(self):
        return self.place


@pytest.mark.parametrize(
    ("family", "form"),
    [("qwen2", "fp8 rows"), ("qwen3_moe", "compressed nvfp4"), ("qwen2", "compressed mxfp4")],
)
def test_published_formats(tmp_path, monkeypatch, family, form):
    # Sums of the first layer's ranks alone: later ones would need both at once.
    write_quantized(family, form, tmp_path)
    whole, *ranks = (lazy_model(tmp_path, mx.float32) for _ in range(3))
    monkeypatch.setattr(mx.distributed, "all_sum", lambda x, **_: x)
    for place, model in enumerate(ranks):
        shard(model, Ring(place), family)
    x = mx.random.normal((1, 3, 192), key=mx.random.key(0))
    mlp = [model.layers[-1].mlp for model in (whole, *ranks)]
    one, first, second = (each(x) for each in mlp)
    np.testing.assert_allclose(np.array(first + second), np.array(one), atol=1e-3)
    key = [model.layers[0].self_attn.k_proj(x) for model in (whole, *ranks)]
    np.testing.assert_allclose(np.array(mx.concatenate(key[1:], -1)), np.array(key[0]), atol=1e-4)


def test_an_order_of_inputs_cannot_be_split(tmp_path):
    write_quantized("llama", "gptq 4 bits, ordered", tmp_path)
    with pytest.raises(ShardingError, match="desc_act"):
        shard(lazy_model(tmp_path, mx.float32), Ring(0), "llama")
