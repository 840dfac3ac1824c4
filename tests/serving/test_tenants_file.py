# SPDX-License-Identifier: Apache-2.0
"""The file of tenants' keys."""

import hashlib
import json
import os
import threading

import pytest

from vllm_metal.serving import tenants_file
from vllm_metal.serving.tenants_file import KeyFile


def test_the_file_has_the_digest_of_a_key_and_is_its_owners(tmp_path):
    path = tmp_path / "tenants.json"
    key, secret = tenants_file.add(path, "acme")
    assert secret not in path.read_text()
    assert key.sha256 == hashlib.sha256(secret.encode()).hexdigest()
    assert path.stat().st_mode & 0o777 == 0o600
    assert tenants_file.read(path) == [key]
    assert len(secret) >= 43  # 256 bits in base64


def test_keys_are_found_until_they_are_removed(tmp_path):
    path = tmp_path / "tenants.json"
    first, secret = tenants_file.add(path, "acme")
    _, second = tenants_file.add(path, "acme", "metrics")
    _, third = tenants_file.add(path, "other")
    now = [0.0]
    keys = KeyFile(path, lambda: now[0])
    assert keys.find(secret) == first and keys.find(second).purpose == "metrics"
    assert keys.find("vm-unknown") is None and keys.find(first.sha256) is None
    assert [key.id for key in tenants_file.remove(path, first.id).keys] == [first.id]
    now[0] = 1.0
    assert keys.find(secret) is None and keys.find(second) is not None
    tenants_file.remove(path, "acme")
    now[0] = 2.0
    assert keys.find(second) is None and keys.find(third) is not None
    with pytest.raises(ValueError, match="'nobody'"):
        tenants_file.remove(path, "nobody")


def test_a_file_that_breaks_leaves_the_keys_as_they_were(tmp_path, caplog_vllm):
    path = tmp_path / "tenants.json"
    _, secret = tenants_file.add(path, "acme")
    now = [0.0]
    keys = KeyFile(path, lambda: now[0])
    path.write_text("{")
    for now[0] in range(1, 9):
        assert keys.find(secret) is not None
    assert len([r for r in caplog_vllm.records if r.levelname == "WARNING"]) == 1
    path.unlink()
    now[0] = 10.0
    assert keys.find(secret) is not None


@pytest.mark.parametrize("name", ["", "A", "a b", "-a", "a/b", "ä", "a" * 64, 'a"', "a\n"])
def test_names_are_fit_for_labels(tmp_path, name):
    with pytest.raises(ValueError, match="is not a valid tenant name"):
        tenants_file.add(tmp_path / "tenants.json", name)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"version": 2, "keys": []}',
        '{"version": 1}',
        '{"version": 1, "keys": [{}]}',
        json.dumps(
            {
                "version": 1,
                "keys": [dict(id="1", tenant="a b", purpose="tenant", sha256="0" * 64, made="")],
            }
        ),
        json.dumps(
            {
                "version": 1,
                "keys": [dict(id="1", tenant="a", purpose="all", sha256="0" * 64, made="")],
            }
        ),
    ],
)
def test_another_file_is_refused(tmp_path, content):
    path = tmp_path / "tenants.json"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(ValueError, match="was not written by `vllm-metal tenants add`"):
        tenants_file.read(path)


def test_a_file_that_others_can_read_is_refused(tmp_path):
    path = tmp_path / "tenants.json"
    tenants_file.add(path, "acme")
    path.chmod(0o640)
    with pytest.raises(ValueError, match="chmod 600"):
        tenants_file.read(path)
    with pytest.raises(ValueError, match="vllm-metal tenants add"):
        tenants_file.read(tmp_path / "none")


def test_two_commands_at_once_lose_nothing(tmp_path):
    path = tmp_path / "tenants.json"
    work = [
        threading.Thread(target=tenants_file.add, args=(path, f"tenant-{number}"))
        for number in range(20)
    ]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    assert len(tenants_file.read(path)) == 20
    assert os.listdir(tmp_path) == ["tenants.json"]


def test_a_tenant_is_another_one_when_it_is_added_again(tmp_path):
    path = tmp_path / "tenants.json"
    first, _ = tenants_file.add(path, "acme")
    tenants_file.add(path, "acme", "metrics")
    second, _ = tenants_file.add(path, "acme")
    other, _ = tenants_file.add(path, "other")
    assert second.identity == first.identity != other.identity
    assert first.identity.startswith("acme@") and first.generation != other.generation
    assert tenants_file.remove(path, first.id).ended == []
    removed = tenants_file.remove(path, second.id)
    assert removed.keys == removed.ended == [second]  # a key of /metrics alone is no tenant's
    again, _ = tenants_file.add(path, "acme")
    assert again.identity not in (first.identity, "acme")
    removed = tenants_file.remove(path, "acme")
    assert len(removed.keys) == 2 and removed.ended == [again]


def test_a_file_of_an_older_version_keeps_its_tenants(tmp_path):
    """Their data was derived from their names alone, and stays theirs."""
    path = tmp_path / "tenants.json"
    _, secret = tenants_file.add(path, "acme")
    content = json.loads(path.read_text())
    del content["keys"][0]["generation"]
    path.write_text(json.dumps(content))
    assert KeyFile(path).find(secret).identity == "acme"
    assert tenants_file.add(path, "acme")[0].identity == "acme"
    tenants_file.remove(path, "acme")
    assert tenants_file.add(path, "acme")[0].identity != "acme"


def test_of_a_file_that_others_can_write_removals_count_and_nothing_else(tmp_path, caplog_vllm):
    """An editor replaces the file that the command wrote."""
    path, now = tmp_path / "tenants.json", [0.0]
    secrets = {name: tenants_file.add(path, name)[1] for name in ("gone", "stays", "moved")}
    keys = KeyFile(path, lambda: now[0])
    added = tenants_file.add(path, "added")[1]
    content = json.loads(path.read_text())
    content["keys"] = [key for key in content["keys"] if key["tenant"] != "gone"]
    for key in content["keys"]:
        if key["tenant"] == "moved":
            key["tenant"] = "stays"  # which would open another tenant's data
    path.write_text(json.dumps(content))
    path.chmod(0o644)
    for now[0] in range(1, 6):
        assert keys.find(secrets["stays"]).tenant == "stays"
        assert [keys.find(x) for x in (secrets["gone"], secrets["moved"], added)] == [None] * 3
    warnings = [r.getMessage() for r in caplog_vllm.records if r.levelname == "WARNING"]
    assert len(warnings) == 1 and "chmod 600" in warnings[0] and "0644" in warnings[0]
    path.chmod(0o600)
    now[0] = 6.0
    assert keys.find(added).tenant == "added" and keys.find(secrets["gone"]) is None
