# SPDX-License-Identifier: Apache-2.0
"""Errors before a model is loaded, and requests that bypass the middleware."""

import pytest

from vllm_metal.serving import start, tenants_file
from vllm_metal.settings import salts

SECRET = b"0123456789abcdef"
SERVE = ("vllm", "serve", "m", "--middleware", "vllm_metal.serving.Tenants")


@pytest.fixture
def settings(tmp_path, monkeypatch):
    tenants_file.add(tmp_path / "tenants.json", "acme")
    (tmp_path / "secret").write_bytes(SECRET)
    (tmp_path / "secret").chmod(0o600)
    path = tmp_path / "serving.toml"
    path.write_text('[tenants]\nkeys = "tenants.json"\nsecret = "secret"\n')
    monkeypatch.setenv("VLLM_METAL_SERVING_CONFIG", str(path))
    start.secret_of_tenants.cache_clear()
    yield tmp_path
    start.secret_of_tenants.cache_clear()


def refused(*more, servers=1, key=None, environment=None):
    found = start.refusals(servers, key, [*SERVE, *more], environment or {})
    return [setting for setting, asked in found.items() if asked]


def test_a_plain_server_is_not_refused(settings):
    assert refused() == [] == refused("--port", "8000", environment={"VLLM_API_KEY": ""})


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (dict(servers=2), "--api-server-count 2"),
        (dict(environment={"VLLM_USE_RUST_FRONTEND": "1"}), "VLLM_USE_RUST_FRONTEND=1"),
        (dict(environment={"VLLM_API_KEY": "k"}), "--api-key"),
        (dict(environment={"VLLM_MEDIA_CACHE": "/tmp/media"}), "VLLM_MEDIA_CACHE"),
    ],
)
def test_front_ends_that_go_past_it_are_refused(settings, options, named):
    (only,) = refused(**options)
    assert only.startswith(named) and "VLLM_METAL_SERVING_CONFIG" in only


@pytest.mark.parametrize(
    "option", ["--grpc", "--grpc-port=5", "--grpc_port", "--api-key", "--api-key=k"]
)
def test_options_that_go_past_it_are_refused(settings, option):
    (only,) = refused(option)
    assert only.startswith(option.partition("=")[0].replace("_", "-").removesuffix("-port"))
    assert "=k" not in only


@pytest.mark.parametrize("form", ["--config {}", "--config={}"])
def test_options_in_a_file_are_refused(settings, form):
    path = settings / "options.yaml"
    path.write_text("port: 8000\napi-key: k\n")
    (only,) = refused(*form.format(path).split())
    assert only.startswith("--api-key")
    path.write_text("port: 8000\n")
    assert refused(*form.format(path).split()) == []


def test_the_middleware_in_a_file_needs_settings(tmp_path, monkeypatch):
    monkeypatch.delenv("VLLM_METAL_SERVING_CONFIG", raising=False)
    path = tmp_path / "options.yaml"
    path.write_text("middleware: [vllm_metal.serving.Tenants]\n")
    with pytest.raises(ValueError, match="needs VLLM_METAL_SERVING_CONFIG"):
        start.refusals(1, None, ["vllm", "serve", "--config", str(path)], {})


def test_the_disk_cache_needs_the_same_secret(settings):
    other = settings / "other"
    other.write_bytes(b"another secret of 16 bytes")
    other.chmod(0o600)
    assert refused(key=settings / "secret") == []
    (only,) = refused(key=other)
    assert only.startswith("prefix_cache_salt_key")


def test_the_middleware_without_settings_is_refused(monkeypatch):
    monkeypatch.delenv("VLLM_METAL_SERVING_CONFIG", raising=False)
    with pytest.raises(ValueError, match="needs VLLM_METAL_SERVING_CONFIG"):
        refused()
    assert start.refusals(4, None, ["vllm", "serve"], {}) == {}


def test_the_engine_takes_salts_of_tenants_and_no_others(settings):
    start.check_salt(salts.derive(SECRET, "acme"))
    for salt in (None, "", "mine", salts.derive(b"another secret 16", "acme"), 5):
        with pytest.raises(ValueError, match="did not come through --middleware"):
            start.check_salt(salt)


def test_without_tenants_the_engine_takes_any(monkeypatch):
    monkeypatch.delenv("VLLM_METAL_SERVING_CONFIG", raising=False)
    start.secret_of_tenants.cache_clear()
    for salt in (None, "", "mine"):
        start.check_salt(salt)
    start.secret_of_tenants.cache_clear()
