# SPDX-License-Identifier: Apache-2.0
"""`vllm-metal tenants`."""

import asyncio

import pytest
from kv_transfer.disk import naive
from serving_double import SECRET, App, ask, counted, identity, make, ready

from vllm_metal.cli.main import main
from vllm_metal.kv_transfer.disk.limits import Limits
from vllm_metal.kv_transfer.disk.store import DiskStore
from vllm_metal.serving import tenants_file
from vllm_metal.settings import salts

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "temperature": 0}


def test_keys_are_made_listed_and_removed(tmp_path, capsys):
    file = ["--keys", str(tmp_path / "new" / "tenants.json")]
    assert main(["tenants", "add", "acme", *file]) == 0
    secret = capsys.readouterr().out.strip()
    assert main(["tenants", "add", "prometheus", "--metrics", *file]) == 0
    capsys.readouterr()
    (key, metrics) = tenants_file.read(tmp_path / "new" / "tenants.json")
    assert key.sha256 == tenants_file.digest(secret) and metrics.purpose == "metrics"
    assert main(["tenants", "list", *file]) == 0
    listed = capsys.readouterr().out
    assert key.id in listed and "acme" in listed and "metrics" in listed
    assert secret not in listed and key.sha256 not in listed
    assert main(["tenants", "rm", key.id, *file]) == 0
    assert main(["tenants", "rm", "prometheus", *file]) == 0
    capsys.readouterr()
    assert main(["tenants", "rm", "acme", *file]) == 1
    assert "'acme'" in capsys.readouterr().err


def test_the_servers_settings_name_the_file(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("VLLM_METAL_SERVING_CONFIG", raising=False)
    assert main(["tenants", "list"]) == 1
    assert "--keys" in capsys.readouterr().err
    (tmp_path / "serving.toml").write_text('[tenants]\nkeys = "tenants.json"\n')
    monkeypatch.setenv("VLLM_METAL_SERVING_CONFIG", str(tmp_path / "serving.toml"))
    assert main(["tenants", "add", "acme"]) == 0  # before the secret is there
    assert [key.tenant for key in tenants_file.read(tmp_path / "tenants.json")] == ["acme"]


@pytest.mark.parametrize("name", ["A", "a b"])
def test_a_name_that_is_none_is_refused(tmp_path, capsys, name):
    assert main(["tenants", "add", name, "--keys", str(tmp_path / "t.json")]) == 1
    assert "is not a valid tenant name" in capsys.readouterr().err


@pytest.fixture
def served(tmp_path, monkeypatch):
    """A server's middleware and its tenants' keys, with the command's settings."""
    (tmp_path / "serving.toml").write_text(
        '[tenants]\nkeys = "tenants.json"\nsecret = "secret"\n[response_cache]\npath = "answers"\n'
    )
    monkeypatch.setenv("VLLM_METAL_SERVING_CONFIG", str(tmp_path / "serving.toml"))
    app = App()
    now = [0.0]
    gate, keys = make(app, tmp_path, clock=lambda: now[0])
    asyncio.run(ready(gate))
    return gate, keys, app, now


def test_a_tenant_that_is_added_again_gets_nothing_of_the_old_one(served, tmp_path, capsys):
    gate, keys, app, now = served

    def say(key, path="/v1/chat/completions", **more):
        reply = asyncio.run(ask(gate, path, CHAT | more, key))
        return reply, app.seen[-1][2].get("cache_salt")

    def kept(key):
        return [say(key)[0].x_cache for _ in range(2)]

    other, stored = kept(keys["other"]), say(keys["acme"], "/v1/responses")[0].json()["id"]
    _, old_salt = say(keys["acme"])
    assert other == ["MISS", "HIT"] and kept(keys["acme"]) == ["HIT", "HIT"]
    folder = salts.namespace(SECRET, old_salt)
    assert main(["tenants", "rm", "acme"]) == 0
    printed = capsys.readouterr().out
    assert "acme: removed 1 cached response" in printed and f"--namespace {folder} " in printed
    assert main(["tenants", "add", "acme"]) == 0
    again = capsys.readouterr().out.strip()
    now[0] += 1.0
    assert say(keys["acme"])[0].status == 401
    assert kept(again) == ["MISS", "HIT"] and kept(keys["other"]) == ["HIT", "HIT"]
    _, salt = say(again, temperature=1)
    assert salts.namespace(SECRET, salt) not in (None, folder)
    assert say(again, "/v1/responses", previous_response_id=stored)[0].status == 404
    assert counted(gate, "vllm:tenant_tokens_total", tenant="acme", kind="completion") > 0


def test_a_tenants_second_key_reaches_what_the_first_does(served, capsys):
    gate, keys, _, now = served
    assert main(["tenants", "add", "acme"]) == 0
    second = capsys.readouterr().out.strip()
    now[0] += 1.0
    replies = [asyncio.run(ask(gate, fields=CHAT, key=key)) for key in (keys["acme"], second)]
    assert [reply.x_cache for reply in replies] == ["MISS", "HIT"]
    first = gate.keys.find(keys["acme"])
    assert main(["tenants", "rm", first.id]) == 0
    assert "cached response" not in capsys.readouterr().out  # the tenant has a key
    now[0] += 1.0
    assert asyncio.run(ask(gate, fields=CHAT, key=second)).x_cache == "HIT"


def test_a_tenants_blocks_on_disk_go_with_it(served, tmp_path, capsys):
    gate, keys, _, _ = served
    who = {name: identity(gate, keys[name]) for name in ("acme", "other")}
    folders = {name: salts.namespace(SECRET, salts.derive(SECRET, who[name])) for name in who}
    cache = DiskStore(tmp_path / "disk", Limits(10**8, None))
    for number, namespace in enumerate((*folders.values(), "shared")):
        folder = cache.blocks("aa" * 16, {}, namespace)
        folder.write(naive.key(number), naive.block(number), 0.0, 0)
    assert main(["tenants", "rm", "acme", "--prefix-cache", str(tmp_path / "disk")]) == 0
    assert "acme: removed 1 block of K/V" in capsys.readouterr().out
    left = {path.parent.parent.name for path in naive.files(tmp_path / "disk")}
    assert left == {folders["other"], "shared"}
    cache.close()


@pytest.mark.parametrize("broken", ["settings", "secret", "answers", "disk"])
def test_keys_go_whatever_becomes_of_the_rest(served, tmp_path, capsys, broken):
    more = []
    if broken == "settings":
        (tmp_path / "serving.toml").write_text("=")
        more = ["--keys", str(tmp_path / "tenants.json")]
    elif broken == "secret":
        (tmp_path / "secret").unlink()
    elif broken == "answers":
        (tmp_path / "answers" / "answers.sqlite3").mkdir(parents=True)
    else:
        more = ["--prefix-cache", str(tmp_path)]
    assert main(["tenants", "rm", "acme", *more]) == 1
    assert "the keys are removed, but" in capsys.readouterr().err
    assert {key.tenant for key in tenants_file.read(tmp_path / "tenants.json")} == {
        "other",
        "prometheus",
    }
