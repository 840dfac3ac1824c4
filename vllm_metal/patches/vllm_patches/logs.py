# SPDX-License-Identifier: Apache-2.0
"""Adjusts what vLLM's logging shows to users of this platform."""

# Remove when vLLM does not warn about what no user set, and configures plugins' loggers. Read
# against vLLM 0.33.

from __future__ import annotations

import logging
import threading
import traceback

#: Text of warnings that users can do nothing about, by logger.
SUPPRESSED = {
    # The engine's process checks the configuration a second time, and mistakes the platform's own
    # settings (MetalPlatform.apply_config_platform_defaults) for the user's.
    "vllm.config.vllm": (
        "Inductor compilation was disabled by user settings",
        # Steps are short here for the sake of other streams, with drafts or without.
        "max_num_scheduled_tokens is set to",
    ),
    # Draft lengths adapt to what is accepted.
    "vllm.config.speculative": ("Enabling num_speculative_tokens > 1 will run",),
    # vLLM declares operators for other GPUs; torch looks for Triton in each.
    "torch._library.triton": ("Triton not available",),
    # Pillow's processors and ours read images as well (`image_processors`).
    "transformers.utils.import_utils": ("requires torchvision (not installed)",),
}
#: Text of warnings that are no news after a good start: logged as information, to the file.
DOWNGRADED = {
    # Defaults for requests, which `serving.parsers` logs once.
    "vllm.config.model": "Default vLLM sampling parameters have been overridden",
    # The connector is this project's, and made for the tested release of vLLM.
    "vllm.distributed.kv_transfer.kv_connector.v1.base": "Initializing KVConnectorBase_V1",
    "vllm.v1.attention.backends.utils": "KV connector cache layout",
    "vllm.utils.system_utils": "Found ulimit of",
}
#: Open files that suffice for the requests served at once; the warning stays if there are fewer.
_ENOUGH_FILES = 1024
_CLIENT, _ENDED = "vllm.v1.engine.core_client", "engine core exited unexpectedly"

#: How messages begin in which vLLM and uvicorn quote clients, by logger: names of models and
#: tools, ids, parts of content, and errors that quote their input.
REDACTED = {
    "uvicorn.error": ("Exception in ASGI application",),
    "vllm.connections": ("HTTP fetch failed",),  # addresses may be signed
    "vllm.entrypoints.anthropic.api_router": ("Error in ",),
    "vllm.entrypoints.openai.chat_completion.protocol": ("System messages should only contain",),
    "vllm.entrypoints.openai.chat_completion.serving": ("Error",),
    "vllm.entrypoints.openai.completion.serving": ("Error",),
    "vllm.entrypoints.openai.responses.serving": ("Error with model",),
    "vllm.entrypoints.openai.responses.utils": ("Previous assistant message", "Using summary text"),
    "vllm.entrypoints.scale_out.render.serving": ("Error with model",),
    "vllm.renderers.chat_utils.chat_message": ("Skipping multimodal part",),
    "vllm.renderers.chat_utils.item_tracker": ("Failed to split video chunks",),
    "vllm.renderers.hf": ("Chat template rejected",),
    "vllm.v1.core.sched.scheduler": ("Encoder cache entry",),
    "vllm.v1.engine.core": ("Request %s failed validation",),
    "vllm.v1.structured_output": ("Failed to compile grammar",),
    "vllm.v1.structured_output.backend_guidance": ("LLMatcher error",),
}
_LEFT_OUT = "(left out)"


def drop_unhelpful_warnings() -> None:
    """Drops the warnings of SUPPRESSED, and logs those of DOWNGRADED as information."""
    for name in (*SUPPRESSED, *DOWNGRADED, _CLIENT):
        logging.getLogger(name).addFilter(_is_helpful)  # adding the same filter twice is a no-op


def _is_helpful(record: logging.LogRecord) -> bool:
    text = str(record.msg)
    if any(warning in text for warning in SUPPRESSED.get(record.name, ())):
        return False
    if (warning := DOWNGRADED.get(record.name)) and warning in text and not _has_few_files(record):
        record.levelno, record.levelname = logging.INFO, "INFO"
    # Engines end with the program that uses them, while its other threads still run.
    return not (
        record.name == _CLIENT and _ENDED in text and not threading.main_thread().is_alive()
    )


def _has_few_files(record: logging.LogRecord) -> bool:
    limit = record.args[0] if isinstance(record.args, tuple) and record.args else None
    return isinstance(limit, int) and limit < _ENOUGH_FILES


def redact_client_text() -> None:
    """Removes clients' text from log messages in REDACTED, and reduces errors to their types.

    Clients get the full messages. Numbers and tracebacks are still logged.
    """
    for name in REDACTED:
        logging.getLogger(name).addFilter(_leave_out_quotes)


def _leave_out_quotes(record: logging.LogRecord) -> bool:
    if str(record.msg).startswith(REDACTED.get(record.name, ())):
        args = record.args if isinstance(record.args, tuple) else (record.args,)
        if record.args:
            record.args = tuple(a if isinstance(a, int | float) else _LEFT_OUT for a in args)
        if record.exc_info and _is_the_clients(record.exc_info[0]):
            record.exc_info = None
            record.levelno, record.levelname = logging.INFO, "INFO"
        elif record.exc_info:
            kind, _, trace = record.exc_info
            name = "" if kind is None else kind.__name__
            record.exc_text = f"{''.join(traceback.format_tb(trace))}{name}: {_LEFT_OUT}"
            record.exc_info = None
    return True


def _is_the_clients(kind: type[BaseException] | None) -> bool:
    # A request's own error, which only its client is told.
    from vllm.exceptions import VLLMClientError

    return kind is not None and issubclass(kind, VLLMClientError)


def show_our_messages() -> None:
    """Makes vLLM's logger handle this plugin's messages."""
    # vLLM sets up only the logger `vllm`: without this, Python shows just warnings and errors of
    # `vllm_metal`.
    logging.getLogger("vllm_metal").parent = logging.getLogger("vllm")
