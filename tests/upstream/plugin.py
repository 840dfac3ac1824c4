# SPDX-License-Identifier: Apache-2.0
"""Plugin for vLLM's tests: the hub cache, and deselection of the tests in selection.py."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
from upstream import hub, selection
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from metal_kernels.layout import BLOCK_SIZES
from vllm_metal.platform.metal_platform import MetalPlatform

_left_out: Counter[str] = Counter()


def pytest_configure() -> None:
    if type(current_platform).__name__ != "MetalPlatform":
        raise pytest.UsageError(f"vLLM runs {current_platform!r}, not this project's platform")
    hub.write(Path(os.environ["HF_HOME"]))
    _admit_connectors()


def _admit_connectors() -> None:
    """Exempts configurations with a connector from the platform's connector and block size checks.

    vLLM's tests run its scheduler with small blocks and with fake connectors. The platform's
    requirements concern the worker, and none of these tests uses this platform's.
    """
    check = MetalPlatform.check_and_update_config

    def check_the_rest(config: VllmConfig) -> None:
        connectors, cache = (
            (config.kv_transfer_config, config.ec_transfer_config),
            config.cache_config,
        )
        if connectors == (None, None):
            check(config)
            return
        block_size = cache.block_size
        config.kv_transfer_config = config.ec_transfer_config = None
        cache.block_size = BLOCK_SIZES[0]
        try:
            check(config)
        finally:
            config.kv_transfer_config, config.ec_transfer_config = connectors
            cache.block_size = block_size

    MetalPlatform.check_and_update_config = staticmethod(check_the_rest)


@pytest.hookimpl(tryfirst=True)  # before -k, which may leave no test of a file
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    names = {item: item.nodeid.removeprefix("tests/v1/") for item in items}
    if unmatched := selection.unmatched(list(names.values())):
        raise pytest.UsageError(f"selection.py leaves out what does not exist: {unmatched}")
    dropped = []
    for item, name in names.items():
        if reason := selection.reason(name):
            _left_out[reason] += 1
            dropped.append(item)
        else:
            # vLLM's cleanup after a test is for GPUs, and would take most of the time here.
            item.add_marker("skip_global_cleanup")
    config.hook.pytest_deselected(items=dropped)
    items[:] = [item for item in items if item not in dropped]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for reason, count in _left_out.most_common():
        terminalreporter.write_line(f"left out: {count:4} {reason}")
