# SPDX-License-Identifier: Apache-2.0
"""Seals of responses without tenants."""

import asyncio
import contextlib
import logging
import sqlite3

import pytest
from serving_double import SECRET, App, ask, make, ready

from vllm_metal.serving.config import ResponseCacheConfig
from vllm_metal.serving.response_cache.entry import Entry
from vllm_metal.serving.response_cache.sqlite_store import FILE
from vllm_metal.serving.response_cache.stores import SECRET_FILE, secret_of

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "temperature": 0}


def test_a_secret_is_made_at_the_first_start_for_its_owner_alone(tmp_path):
    config = ResponseCacheConfig(tmp_path / "answers")
    made = secret_of(config)
    assert len(made) == 64 and secret_of(config) == made
    modes = [(tmp_path / "answers" / name).stat().st_mode & 0o777 for name in ("", SECRET_FILE)]
    assert modes == [0o700, 0o600]
    assert [path.name for path in (tmp_path / "answers").iterdir()] == [SECRET_FILE]
    assert secret_of(ResponseCacheConfig(tmp_path / "other")) != made


def test_a_secret_that_others_may_have_read_is_refused(tmp_path):
    config = ResponseCacheConfig(tmp_path / "answers")
    secret_of(config)
    (tmp_path / "answers" / SECRET_FILE).chmod(0o644)
    with pytest.raises(ValueError, match="chmod 600"):
        secret_of(config)


def test_the_settings_secret_is_used(tmp_path):
    (tmp_path / "secret").write_bytes(SECRET)
    (tmp_path / "secret").chmod(0o600)
    for cache in (
        ResponseCacheConfig(tmp_path / "answers", secret=tmp_path / "secret"),
        ResponseCacheConfig(None, "redis://h", secret=tmp_path / "secret"),
    ):
        assert secret_of(cache) == SECRET
    assert not (tmp_path / "answers").exists()


def test_where_none_can_be_made_answers_last_as_long_as_the_server(tmp_path, caplog_vllm):
    (tmp_path / "file").write_text("")
    config = ResponseCacheConfig(tmp_path / "file" / "answers")
    assert len(secret_of(config)) == 32 and secret_of(config) != secret_of(config)
    warnings = [r.getMessage() for r in caplog_vllm.records if r.levelno == logging.WARNING]
    assert "lost when this server ends" in warnings[0]


def test_nobody_without_the_secret_makes_answers(tmp_path):
    """Without tenants, answers outlive the server, but others' replacements do not count."""

    async def run(number, forge=False):
        gate, _ = make(App(), tmp_path, tenants=())
        await ready(gate)
        found = [(await ask(gate, fields=CHAT)).x_cache for _ in range(number)]
        await gate.aclose()
        if forge:
            with contextlib.closing(sqlite3.connect(tmp_path / "answers" / FILE)) as database:
                ((key,),) = database.execute("SELECT hex(key) FROM answers").fetchall()
                lie = Entry("whole", b'{"choices": []}').seal(b"", key.lower())
                database.execute("UPDATE answers SET value = ?", (lie,))
                database.commit()
        return found

    assert asyncio.run(run(2)) == ["MISS", "HIT"]
    assert asyncio.run(run(1, forge=True)) == ["HIT"]
    assert asyncio.run(run(2)) == ["MISS", "HIT"]
