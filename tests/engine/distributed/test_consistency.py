# SPDX-License-Identifier: Apache-2.0
"""Ranks with different models all report the differences."""

from types import SimpleNamespace

import pytest

from vllm_metal.engine.distributed import consistency

FACTS = {"vllm": "0.32.0", "weights": "aa"}


def test_ranks_that_have_the_same_go_on():
    consistency.check(FACTS, lambda mine: [mine, dict(FACTS), dict(FACTS)])


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [("weights", "bb", "weights differ"), ("vllm", "0.33.0", "vllm 0.33.0, rank 0 has 0.32.0")],
    ids=["weights", "version"],
)
def test_what_differs_is_named_on_every_rank(name, value, said):
    everyone = [FACTS, FACTS, FACTS | {name: value}]
    for mine in everyone:
        with pytest.raises(consistency.RanksDiffer) as refused:
            consistency.check(mine, lambda _: everyone)
        assert f"ranks 0 and 2 of the engine differ: {said}. " in str(refused.value)


def test_a_setting_is_compared_by_its_option():
    values = dict.fromkeys((place.partition(".")[2] for place in consistency.SETTINGS.values()), 1)
    parts = {
        place.partition(".")[0]: SimpleNamespace(**values)
        for place in consistency.SETTINGS.values()
    }
    config = SimpleNamespace(**parts)
    first = consistency.settings_of(config)
    config.cache_config = SimpleNamespace(**values | {"block_size": 32})
    with pytest.raises(consistency.RanksDiffer, match="differ: --block-size 32, rank 0 has 1"):
        consistency.check(first, lambda mine: [mine, consistency.settings_of(config)])
