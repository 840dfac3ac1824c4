# SPDX-License-Identifier: Apache-2.0
"""Wired memory by default and by setting, with fake MLX limits and macOS counts."""

from types import SimpleNamespace

import mlx.core as mx
import pytest

from vllm_metal.engine.memory import wiring
from vllm_metal.engine.memory.wiring import Wiring, is_large

GIB = 2**30


class Mac:
    """MLX's limit as set, with its return value; and macOS's count of wired bytes."""

    def __init__(self, monkeypatch, memory=64 * GIB, weights=40 * GIB, wired=60 * GIB):
        self.limits = [0]
        counts = SimpleNamespace(total=memory, wired=wired)
        monkeypatch.setattr(mx, "set_wired_limit", self.set_wired_limit)
        monkeypatch.setattr(mx, "get_active_memory", lambda: weights)
        monkeypatch.setattr("psutil.virtual_memory", lambda: counts)
        monkeypatch.setattr("platform.mac_ver", lambda: ("15.5", ("", "", ""), "arm64"))

    def set_wired_limit(self, limit):
        self.limits.append(limit)
        return self.limits[-2]


@pytest.fixture
def log(monkeypatch):
    records = []
    for level in ("info", "warning"):
        monkeypatch.setattr(
            wiring.logger,
            level,
            lambda text, *words, level=level: records.append((level, text % words)),
        )
    return records


@pytest.mark.parametrize(
    ("memory", "weights", "large"),
    [
        (64, 40, True),
        (64, 32, False),  # half
        (64, 42, False),  # less than 35 % is left
        (128, 70, True),
        (512, 300, True),
        (16, 8.5, False),  # less than 8 GB are left
        (24, 13, True),
        (8, 4.5, False),
    ],
)
def test_weights_of_more_than_half_of_the_memory_are_wired_where_enough_stays(
    memory, weights, large
):
    assert is_large(int(memory * GIB), int(weights * GIB)) is large


def test_unasked_weights_alone_are_wired_in_whole_pages_and_it_is_said(monkeypatch, log):
    mac = Mac(monkeypatch)
    wired = Wiring("metal", asked=None, alone=True)
    wired.weights(100)
    limit = mac.limits[-1]
    assert 40 * GIB + 100 * 16384 <= limit < 40 * GIB + 4 * 2**20
    wired.everything(100)
    assert mac.limits == [0, limit]
    ((level, text),) = log
    assert level == "info" and text.startswith("40.00 GiB are wired: weights; ")
    assert '{"wire_memory": false}' in text
    wired.release()
    wired.release()
    assert mac.limits == [0, limit, 0]


def test_asked_for_weights_and_pool_are_wired_until_let_go(monkeypatch, log):
    mac = Mac(monkeypatch, weights=5 * GIB)
    wired = Wiring("metal", asked=True, alone=True)
    wired.weights(100)
    assert mac.limits == [0]
    wired.everything(100)
    wired.everything(100)  # once more, with the pool of a wake-up
    wired.release()
    assert [limit // GIB for limit in mac.limits] == [0, 5, 5, 0]
    assert log[0] == ("info", "5.00 GiB are wired: weights and KV pool")


@pytest.mark.parametrize(
    "how",
    [
        {"asked": False, "alone": True},
        {"asked": None, "alone": False},
        {"asked": None, "alone": True, "kind": "cpu"},
        {"asked": None, "alone": True, "release": "14.7"},
    ],
)
def test_nothing_is_wired_against_its_user_or_where_it_may_not_be(how, monkeypatch):
    mac = Mac(monkeypatch)
    release = how.pop("release", "15.5")
    monkeypatch.setattr("platform.mac_ver", lambda: (release, ("", "", ""), "arm64"))
    Wiring(how.pop("kind", "metal"), **how).weights(100)
    assert mac.limits == [0]


def test_what_macos_did_not_wire_is_said(monkeypatch, log):
    Mac(monkeypatch, wired=12 * GIB)
    Wiring("metal", asked=None, alone=True).weights(100)
    ((level, text),) = log
    assert level == "warning" and "wired only 12.00 GiB in total, less than the 40.00 GiB" in text


def test_a_limit_of_the_system_s_own_stops_a_start_only_where_it_was_asked_for(monkeypatch, log):
    Mac(monkeypatch)

    def refuse(limit):
        raise ValueError("larger than it may be")

    monkeypatch.setattr(mx, "set_wired_limit", refuse)
    wired = Wiring("metal", asked=None, alone=True)
    wired.weights(1)
    wired.release()
    assert log == [("warning", "The weights are not wired into memory: larger than it may be")]
    with pytest.raises(ValueError, match="larger"):
        Wiring("metal", asked=True, alone=True).everything(1)
