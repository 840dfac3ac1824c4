# SPDX-License-Identifier: Apache-2.0
"""`vllm-metal response-cache`, beside a server that uses the cache."""

import asyncio
import shutil

import pytest
from serving_double import SECRET, App, ask, counted, make, ready

from vllm_metal.cli.main import main

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "temperature": 0}


@pytest.fixture
def gate(tmp_path, monkeypatch):
    """A server's middleware and its tenants' keys, with the command's settings."""
    (tmp_path / "serving.toml").write_text(
        '[tenants]\nkeys = "tenants.json"\nsecret = "secret"\n[response_cache]\npath = "answers"\n'
    )
    monkeypatch.setenv("VLLM_METAL_SERVING_CONFIG", str(tmp_path / "serving.toml"))
    return make(App(), tmp_path)


def marks(gate, keys):
    """Returns X-Cache of a request by each tenant."""

    async def run():
        names = ("acme", "other")
        return [(await ask(gate, fields=CHAT, key=keys[name])).x_cache for name in names]

    return asyncio.run(run())


def kept_bytes(gate, keys):
    asyncio.run(ask(gate, "/metrics", key=keys["metrics"], method="GET"))
    return counted(gate, "vllm:response_cache_bytes")


def test_a_server_does_not_go_on_answering_from_what_was_purged(gate, capsys):
    gate, keys = gate
    asyncio.run(ready(gate))
    assert marks(gate, keys) == ["MISS", "MISS"] and marks(gate, keys) == ["HIT", "HIT"]
    assert main(["response-cache", "purge", "--tenant", "acme"]) == 0
    assert capsys.readouterr().out == "removed 1 response of acme\n"
    assert marks(gate, keys) == ["MISS", "HIT"]
    assert main(["answers", "purge"]) == 0  # the command's name of before
    out, err = capsys.readouterr()
    assert out == "removed 2 responses\n" and "renamed to `response-cache`" in err
    assert kept_bytes(gate, keys) <= 5 * 4096  # an empty table with its indices
    assert marks(gate, keys) == ["MISS", "MISS"] and marks(gate, keys) == ["HIT", "HIT"]


@pytest.mark.parametrize("what", ["files", "folder", "database"])
def test_removed_files_lead_to_no_old_hit(gate, tmp_path, what):
    """The server is running and keeps new answers from then on."""
    gate, keys = gate
    asyncio.run(ready(gate))
    assert marks(gate, keys) == ["MISS", "MISS"] and marks(gate, keys) == ["HIT", "HIT"]
    answers = tmp_path / "answers"
    if what == "folder":
        shutil.rmtree(answers)
    else:
        for path in answers.glob("*" if what == "files" else "*.sqlite3"):
            path.unlink()
    assert marks(gate, keys) == ["MISS", "MISS"] and marks(gate, keys) == ["HIT", "HIT"]
    assert (answers / "answers.sqlite3").stat().st_size > 0


def test_what_the_command_needs_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("VLLM_METAL_SERVING_CONFIG", raising=False)
    assert main(["response-cache", "purge"]) == 1
    assert (
        "set VLLM_METAL_SERVING_CONFIG to a settings file with a [response_cache] section"
        in capsys.readouterr().err
    )
    (tmp_path / "serving.toml").write_text("timeout_s = 5\n")
    monkeypatch.setenv("VLLM_METAL_SERVING_CONFIG", str(tmp_path / "serving.toml"))
    assert main(["response-cache", "purge"]) == 1
    assert "[response_cache]" in capsys.readouterr().err
    assert main(["response-cache", "purge", "--tenant", "*"]) == 1
    assert "is not a valid tenant name" in capsys.readouterr().err


def test_a_store_that_cannot_be_asked_is_an_error(gate, tmp_path, capsys):
    (tmp_path / "answers" / "answers.sqlite3").mkdir(parents=True)
    assert main(["response-cache", "purge"]) == 1
    printed = capsys.readouterr().err
    assert "cached responses cannot be deleted" in printed and SECRET.decode() not in printed
