# SPDX-License-Identifier: Apache-2.0
"""Only the listed messages are changed."""

import importlib.util
import logging
import threading
from pathlib import Path

import pytest
from vllm.exceptions import VLLMValidationError

from vllm_metal.patches.vllm_patches.logs import (
    DOWNGRADED,
    REDACTED,
    SUPPRESSED,
    drop_unhelpful_warnings,
    redact_client_text,
)


@pytest.mark.parametrize(
    ("name", "beginning"), [(name, text) for name, texts in SUPPRESSED.items() for text in texts]
)
def test_nothing_else_is_dropped(
    name: str, beginning: str, caplog: pytest.LogCaptureFixture
) -> None:
    drop_unhelpful_warnings()
    caplog.set_level(logging.WARNING, name)  # commands have vLLM say less
    logger = logging.getLogger(name)
    logger.addHandler(caplog.handler)
    try:
        logger.warning("%s matters", "another")
        logger.warning(beginning + ", and so on")
        logger.error("it did not begin so: %s", beginning)
    finally:
        logger.removeHandler(caplog.handler)
    said = [record.getMessage() for record in caplog.records]
    assert set(said) == {"another matters", f"it did not begin so: {beginning}"}


@pytest.fixture
def shown(caplog, monkeypatch):
    """Returns a function that logs a warning, and returns its logged levels."""

    def of(name, *message):
        drop_unhelpful_warnings()
        caplog.clear()
        caplog.set_level(logging.INFO, name)  # commands have vLLM say less
        logger = logging.getLogger(name)
        monkeypatch.setattr(logger, "propagate", False)
        monkeypatch.setattr(logger, "handlers", [caplog.handler])
        logger.warning(*message)
        return [record.levelname for record in caplog.records]

    return of


@pytest.mark.parametrize(("name", "beginning"), DOWNGRADED.items())
def test_what_means_nothing_to_users_is_information(shown, name, beginning):
    assert shown(name, f"{beginning} is so, by %s", "settings") == ["INFO"]
    assert shown(name, "%s matters", "another") == ["WARNING"]


def test_few_open_files_are_told(shown):
    for limit, level in ((256, "WARNING"), (2048, "INFO")):
        assert shown("vllm.utils.system_utils", "Found ulimit of %s and %s", limit, "x") == [level]


def test_an_engine_that_ends_with_its_program_is_not_unexpected(shown, monkeypatch):
    message = ("vllm.v1.engine.core_client", "MPClient: engine core exited unexpectedly; cleanup")
    assert shown(*message) == ["WARNING"]
    monkeypatch.setattr(threading, "main_thread", lambda: threading.Thread())
    assert shown(*message) == []


@pytest.fixture
def quoting(request, caplog, monkeypatch):
    """A logger whose messages quote clients, and its output."""
    name = getattr(request, "param", "vllm.renderers.chat_utils.chat_message")
    redact_client_text()
    caplog.set_level(logging.WARNING, name)
    logger = logging.getLogger(name)
    monkeypatch.setattr(logger, "propagate", False)
    logger.addHandler(caplog.handler)
    yield logger, caplog
    logger.removeHandler(caplog.handler)


def test_a_requests_own_error_has_no_traceback(quoting):
    (logger, caplog), words = quoting, "the client's words"
    try:
        raise VLLMValidationError(words)
    except VLLMValidationError:
        logger.exception("Skipping multimodal part %r", words)
    assert words not in caplog.text and "Traceback" not in caplog.text


def test_messages_are_logged_without_what_clients_wrote(quoting):
    (logger, caplog), words = quoting, "the client's words"
    try:
        raise KeyError(words)
    except KeyError:
        logger.exception("Skipping multimodal part %r (%d chars)", words, 7)
    logger.warning("Skipping multimodal part %r", {"name": words})
    logger.warning("Another message of %s", "vLLM's own")
    assert words not in caplog.text
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == "Skipping multimodal part '(left out)' (7 chars)"
    assert said[2] == "Another message of vLLM's own"
    assert "test_logs.py" in caplog.text and "KeyError: (left out)" in caplog.text


@pytest.mark.parametrize("quoting", ["vllm.connections"], indirect=True)
def test_addresses_of_images_are_not_logged(quoting):
    logger, caplog = quoting
    logger.warning("HTTP fetch failed for %s (attempt %d/%d): %s", "http://a/?sig=s", 1, 3, "no")
    assert "sig=s" not in caplog.text and "attempt 1/3" in caplog.text


@pytest.mark.parametrize(("name", "prefixes"), REDACTED.items())
def test_vllm_has_the_messages_that_are_changed(name, prefixes):
    """vLLM's loggers have their modules' names; uvicorn's messages are in its protocols."""
    module = "uvicorn.protocols.http.httptools_impl" if name.startswith("uvicorn") else name
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    text = Path(spec.origin).read_text()
    assert all(f'"{beginning}' in text for beginning in prefixes)


def test_a_logger_changes_its_messages_once(quoting):
    logger, _ = quoting
    before = len(logger.filters)
    redact_client_text()
    assert len(logger.filters) == before
    assert all(prefixes and all(prefixes) for prefixes in REDACTED.values())
