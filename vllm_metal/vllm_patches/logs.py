# SPDX-License-Identifier: Apache-2.0
"""What vLLM's logging shows to users of this platform."""

from __future__ import annotations

import logging

#: The vLLM releases that all of this is true for.
RELEASES = ("0.32", "0.33")

#: How warnings begin that their reader can do nothing about, by the logger they come from.
UNHELPFUL = {
    # The engine's process checks the configuration a second time, and takes what this platform set
    # the first time (MetalPlatform.apply_config_platform_defaults) for its user's choice.
    "vllm.config.vllm": "Inductor compilation was disabled by user settings",
    # vLLM declares operators for GPUs of other makers; torch looks for Triton in each.
    "torch._library.triton": "Triton not available",
}


class _DropByBeginning(logging.Filter):
    """Drops the records whose message begins with a text."""

    def __init__(self, beginning: str) -> None:
        super().__init__()
        self.beginning = beginning

    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(self.beginning)


def drop_unhelpful_warnings() -> None:
    """Drops the warnings of UNHELPFUL, and nothing else that their loggers say."""
    for name, beginning in UNHELPFUL.items():
        logger = logging.getLogger(name)
        if not any(isinstance(known, _DropByBeginning) for known in logger.filters):
            logger.addFilter(_DropByBeginning(beginning))


def show_our_messages() -> None:
    """Has vLLM's logger handle what this plugin logs.

    vLLM sets up the logger `vllm` and no plugin's: without this, Python shows warnings and errors
    of `vllm_metal` alone.
    """
    logging.getLogger("vllm_metal").parent = logging.getLogger("vllm")
