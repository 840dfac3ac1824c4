# SPDX-License-Identifier: Apache-2.0
"""`vllm-metal tenants`."""

import pytest

from vllm_metal.commands.cli import main
from vllm_metal.serving import tenants_file


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
    assert "is no tenant's name" in capsys.readouterr().err
