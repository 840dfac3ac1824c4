# SPDX-License-Identifier: Apache-2.0
"""Makes a server log to a file, and print only warnings.

vLLM logs a start in 76 lines. Users who set VLLM_LOGGING_LEVEL, or another of vLLM's log settings,
get vLLM's own logging.
"""

# Remove when vLLM starts quietly. Read against vLLM 0.33.

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_metal.patches.vllm_patches.replacing import replace
from vllm_metal.settings import log_files

if TYPE_CHECKING:
    from vllm.config.logging import LoggingConfig

#: Variables and options of vLLM that choose what is logged, and where.
VARIABLES = ("VLLM_CONFIGURE_LOGGING", "VLLM_LOGGING_CONFIG_PATH", "VLLM_LOGGING_LEVEL")
OPTIONS = (
    "--disable-access-log-for-endpoints",
    "--log-config-file",
    "--log-level",
    "--logging-config",
    "--uvicorn-log-level",
)
_LOGGERS = ("uvicorn", "vllm")  # uvicorn's includes the log of requests


def chosen_by_the_user() -> bool:
    """Returns whether the user has configured the log."""
    return any(os.environ.get(name) for name in VARIABLES) or any(
        argument.startswith(OPTIONS) for argument in sys.argv[1:]
    )


def to_a_file() -> None:
    """Makes `vllm serve` log to a file by default; call it before vLLM reads its log settings."""
    from vllm import logger

    replace(logger, "configure_logging_if_needed", _to_a_file)


def _to_a_file(configure: Callable[[LoggingConfig], None], config: LoggingConfig) -> None:
    if sys.argv[1:2] == ["serve"] and not chosen_by_the_user():
        try:
            config.pylogging_config_file = str(_begin())
        except OSError as error:
            print(
                f"vllm-metal: the log goes to the terminal: {log_files.folder()} cannot be written "
                f"({error.strerror}); set VLLM_METAL_CACHE to another folder",
                file=sys.stderr,
            )
    configure(config)


def _begin() -> Path:
    # Returns the file of the logging configuration, which engines read, too.
    log = log_files.begin("serve")
    config = log.with_suffix(".json")
    log_files.write(config, json.dumps(_configuration(log)))
    print(f"vllm-metal: starting; the log is {log}", flush=True)
    return config


def _configuration(log: Path) -> dict[str, Any]:
    # Python's logging configuration: everything to the file, warnings to the terminal.
    from vllm import envs
    from vllm.logger import _DATE_FORMAT, _FORMAT

    made = {"()": "vllm.logging_utils.NewLineFormatter", "format": _FORMAT, "datefmt": _DATE_FORMAT}
    file = {"()": f"{log_files.__name__}.LogFile", "filename": str(log), "formatter": "vllm"}
    stream = {"class": "logging.StreamHandler", "stream": envs.VLLM_LOGGING_STREAM}
    terminal = {**stream, "formatter": "vllm", "level": "WARNING"}
    both = {"handlers": ["file", "terminal"], "level": "INFO", "propagate": False}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"vllm": made},
        "handlers": {"file": file, "terminal": terminal},
        "loggers": dict.fromkeys(_LOGGERS, both),
    }
