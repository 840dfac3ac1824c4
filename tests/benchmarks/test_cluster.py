# SPDX-License-Identifier: Apache-2.0
"""Estimates and requests of benchmarks/cluster.py."""

import json
from pathlib import Path

import pytest
from _cluster_ranks import Waiting
from _cluster_replicas import (
    OWN_TOKENS,
    PREFIX_TOKENS,
    PREFIXES,
    Measured,
    Shares,
    rows,
    trace_of,
)
from _cluster_trace import Trace
from _server import ServerError, in_short
from _toy_model import Toy


@pytest.mark.parametrize("replicas", [2, 4, 8])
def test_shares_by_hand(replicas: int) -> None:
    """A prefix is new once where servers share, and once per server where they do not."""
    asked = 3 * replicas // 2
    trace = trace_of(replicas, seed=0)
    whole = PREFIX_TOKENS / (PREFIX_TOKENS + OWN_TOKENS)
    assert len(trace.prompts) == PREFIXES * asked
    assert trace.cached_share(1, False) == pytest.approx(whole * (asked - 1) / asked)
    assert trace.cached_share(replicas, True) == pytest.approx(whole * (asked - 1) / asked)
    assert trace.cached_share(replicas, False) == pytest.approx(whole * (asked - replicas) / asked)


def test_prompts_share_prefixes_and_nothing_else() -> None:
    trace = Trace.of(3, 2, prefix_tokens=16, own_tokens=4, vocabulary=512, seed=1)
    assert trace.prefixes == [0, 0, 1, 1, 2, 2]
    assert len({tuple(prompt[:16]) for prompt in trace.prompts}) == 3
    assert len({tuple(prompt[16:]) for prompt in trace.prompts}) == 6
    assert {len(prompt) for prompt in trace.prompts} == {20}


def test_a_toy_has_the_bytes_that_it_says(tmp_path: Path) -> None:
    from mlx_lm.utils import load_model

    toy = Toy(hidden=64, layers=2, heads=4, kv_heads=2)
    model, config = load_model(Path(toy.write(tmp_path / "toy")))
    assert config["hidden_size"] == 64 and len(model.layers) == 2
    projection = model.layers[0].self_attn.k_proj.weight
    assert toy.token_bytes == 2 * 2 * 2 * projection.shape[0]  # K and V, layers, 16 bits
    assert (
        json.loads((tmp_path / "toy" / "tokenizer.json").read_text())["model"]["vocab"]["t7"] == 7
    )


def test_one_engine_has_no_rate_of_several_and_no_comparison_lacks_its_figure() -> None:
    """Missing rates are null, because JSON has no NaN."""
    shares = [Shares(n, n > 1, 0.5, 0.5, 0.0, 1.0, [[1]]) for n in (1, 2)]
    kept = {
        "one engine": Measured(shares[0], None, None),
        "sharing": Measured(shares[1], 4.0, 6.0),
    }
    one, two = json.loads(json.dumps(list(rows(kept)), allow_nan=False))
    assert (one["of all"], one["all over first"]) == (None, None)
    assert (two["of all"], two["all over first"], two["over one engine's"]) == (6.0, 1.5, 1.0)
    (alone,) = rows({"sharing": kept["sharing"]})  # the one engine did not start
    assert (alone["over one engine's"], alone["answers equal"]) == (None, None)


@pytest.mark.parametrize(("streams", "halves"), [(1, 1), (2, 2), (4, 2)])
def test_waiting_by_hand(streams: int, halves: int) -> None:
    """One engine takes 10 ms a step; ranks take 5 ms each, plus 2 ms in between."""
    step = 0.012 / halves  # a token, as many batches on their way as there are
    waiting = Waiting(streams, alone=0.010, seconds=step, beside=0.002)
    assert waiting.estimated == pytest.approx(1 - halves / 2)
    assert waiting.measured == pytest.approx(1 - 0.010 / (2 * step))
    assert waiting.estimated_with_more == pytest.approx(waiting.measured)


def test_the_reason_is_the_last_error() -> None:
    printed = "INFO fine\nValueError: first\nValueError: --nnodes: refused\nbye\n"
    assert in_short(ServerError(printed)) == "ValueError: --nnodes: refused"
    assert in_short(ServerError("no such network")) == "no such network"
