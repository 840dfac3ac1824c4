# SPDX-License-Identifier: Apache-2.0
"""A warning of vLLM's that says nothing to a user of this platform."""

from __future__ import annotations

import logging

_LOGGER, _BEGINNING = "vllm.config.vllm", "Inductor compilation was disabled by user settings"


def drop_compiler_warning() -> None:
    """Drops vLLM's warning that its compiler is off, and nothing else.

    The engine's process checks the configuration a second time, and takes what this platform set
    the first time (MetalPlatform.apply_config_platform_defaults) for its user's choice.
    """
    logging.getLogger(_LOGGER).addFilter(_is_another)


def _is_another(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_BEGINNING)
