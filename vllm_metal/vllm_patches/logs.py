# SPDX-License-Identifier: Apache-2.0
"""Warnings of vLLM and torch that say nothing to a user of this platform."""

from __future__ import annotations

import logging

#: How each begins, by the logger it comes from. Nobody set what they speak of, nor misses it.
UNHELPFUL = {
    # The engine's process checks the configuration again, where this platform has turned vLLM's
    # compiler off (MetalPlatform.apply_config_platform_defaults).
    "vllm.config.vllm": "Inductor compilation was disabled by user settings",
    # torch looks for Triton kernels in each operator declared with it; no Mac has Triton.
    "torch._library.triton": "Triton not available",
}


class _Unhelpful(logging.Filter):
    """Drops the records whose message begins so."""

    def __init__(self, beginning: str) -> None:
        super().__init__()
        self.beginning = beginning

    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(self.beginning)


def drop_unhelpful_warnings() -> None:
    """Drops the warnings of UNHELPFUL, and nothing else their loggers say."""
    for logger, beginning in UNHELPFUL.items():
        logging.getLogger(logger).addFilter(_Unhelpful(beginning))
