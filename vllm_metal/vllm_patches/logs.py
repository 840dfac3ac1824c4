# SPDX-License-Identifier: Apache-2.0
"""Warnings of vLLM and torch that say nothing to a user of this platform."""

from __future__ import annotations

import logging
from functools import partial

#: The vLLM releases that all of this is true for.
RELEASES = ("0.32", "0.33")

#: How each begins, by the logger it comes from.
UNHELPFUL = {
    # The engine's process checks the configuration a second time, and takes what this platform set
    # the first time (MetalPlatform.apply_config_platform_defaults) for its user's choice.
    "vllm.config.vllm": "Inductor compilation was disabled by user settings",
    # vLLM declares operators for GPUs of other makers; torch looks for Triton in each.
    "torch._library.triton": "Triton not available",
}


def drop_unhelpful_warnings() -> None:
    """Drops the warnings of UNHELPFUL, and nothing else their loggers say."""
    for logger, beginning in UNHELPFUL.items():
        logging.getLogger(logger).addFilter(partial(_begins_otherwise, beginning))


def _begins_otherwise(beginning: str, record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(beginning)
