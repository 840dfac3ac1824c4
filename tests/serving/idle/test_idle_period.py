# SPDX-License-Identifier: Apache-2.0
"""Settings of idle engines, and their errors."""

from types import SimpleNamespace

import pytest
from vllm import LLM

from vllm_metal.serving.idle import idle_period
from vllm_metal.serving.idle.idle_period import IdlePeriod
from vllm_metal.settings.additional_config import AdditionalConfig


def config(num_servers=1, **settings):
    return SimpleNamespace(
        additional_config=settings, parallel_config=SimpleNamespace(_api_process_count=num_servers)
    )


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({}, []),
        ({"idle_sleep": "10m"}, [IdlePeriod(600, 1), IdlePeriod(600, 2)]),
        ({"idle_sleep": 30, "idle_sleep_weights": "2h"}, [IdlePeriod(30, 1), IdlePeriod(7170, 2)]),
        ({"idle_sleep": "5s", "idle_sleep_weights": 5}, [IdlePeriod(5, 1), IdlePeriod(0, 2)]),
        ({"idle_sleep": "1.5h", "idle_sleep_weights": "never"}, [IdlePeriod(5400, 1)]),
    ],
)
def test_weights_go_after_the_pool(settings, found):
    assert idle_period.idle_periods(AdditionalConfig.of(config(**settings))) == found


def refused(num_servers=1, environment=None, **settings):
    found = idle_period.refusals(config(num_servers, **settings), environment or {})
    return [setting for setting, asked in found.items() if asked]


def test_one_front_end_of_pythons_is_not_refused():
    assert refused(idle_sleep="10m") == []
    assert refused(num_servers=4) == []


def test_front_ends_that_cannot_wake_an_engine_are_refused():
    (only,) = refused(num_servers=2, idle_sleep="10m")
    assert only.startswith("--api-server-count 2 with --additional-config idle_sleep")
    (only,) = refused(environment={"VLLM_USE_RUST_FRONTEND": "1"}, idle_sleep="10m")
    assert only.startswith("VLLM_USE_RUST_FRONTEND=1 with --additional-config idle_sleep")


def test_llm_is_refused_before_it_loads_a_model(monkeypatch):
    from vllm_metal.engine.models.embedded import embedded_model_path

    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    with pytest.raises(ValueError, match=r"idle_sleep with LLM .*sleep\(\) and wake_up\(\)"):
        LLM(
            str(embedded_model_path(dequantize=True)),
            max_model_len=256,
            additional_config={"idle_sleep": "10m"},
        )
