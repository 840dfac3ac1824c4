# SPDX-License-Identifier: Apache-2.0
"""The file that VLLM_METAL_SERVING_CONFIG names."""

import pytest

from vllm_metal.serving import config, tenants_file


@pytest.fixture
def folder(tmp_path):
    """A folder with the files that a tenants configuration names."""
    tenants_file.add(tmp_path / "tenants.json", "acme")
    (tmp_path / "secret").write_text("0123456789abcdef")
    (tmp_path / "secret").chmod(0o600)
    return tmp_path


def write(folder, text, mode=0o600):
    path = folder / "serving.toml"
    path.write_text(text)
    path.chmod(mode)
    return path


TENANTS = '[tenants]\nkeys = "tenants.json"\nsecret = "secret"\n'


def test_all_of_it(folder):
    path = write(
        folder,
        'timeout_s = 600\nmax_body_bytes = "2MB"\nmax_body_s = 5\nmax_body_depth = 7\n'
        "max_body_values = 8\nmax_body_names = 9\nmax_body_items = 10\nmax_body_choices = 11\n"
        + TENANTS
        + 'metrics = "open"\n[response_cache]\npath = "answers"\nttl_s = 60\nbytes = "5GB"\n'
        'max_answer_bytes = "100kB"\n',
    )
    found = config.read(path)
    assert found.timeout_s == 600.0
    assert found.body == config.BodyLimits(2_000_000, 5.0, 7, 8, 9, 10, 11)
    assert found.tenants.keys == folder / "tenants.json" and found.tenants.open_metrics
    assert found.tenants.read_secret() == b"0123456789abcdef"
    cache = found.response_cache
    assert (cache.path, cache.ttl_s) == (folder / "answers", 60.0)
    assert (cache.max_bytes, cache.max_answer_bytes) == (5 * 10**9, 100_000)


def test_each_part_stands_alone(folder):
    assert config.read(write(folder, "timeout_s = 5")).timeout_s == 5.0
    assert config.read(write(folder, "timeout_s = 5")).body == config.BodyLimits()
    assert not config.read(write(folder, TENANTS)).tenants.open_metrics
    assert config.read(write(folder, '[response_cache]\npath = "a"')).tenants is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no settings"),
        ("timeout_s = 0", "'timeout_s' must be a number of seconds"),
        ("timeout_s = true", "'timeout_s' must be"),
        ("timeout_s = inf", "'timeout_s' must be"),
        ("max_body_s = 0", "'max_body_s' must be a number of seconds"),
        ("max_body_depth = 501", "'max_body_depth' must be at most 500"),
        ("max_body_values = 0", "'max_body_values' must be a whole number above 0"),
        ("max_body_items = 1.5", "'max_body_items' must be a whole number"),
        ("timeouts = 5", "did you mean 'timeout_s'"),
        ("timeout_s =", "is not TOML"),
        ("tenants = 5", "write \\[tenants\\]"),
        ('[tenants]\nkeys = "tenants.json"', "lacks 'secret'"),
        ('[tenants]\nsecret = "secret"', "lacks 'keys'"),
        (TENANTS + 'metrics = "all"', "'metrics' must be 'key'"),
        ('[tenants]\nkeys = "none"\nsecret = "secret"', "vllm-metal tenants add"),
        ('[tenants]\nkeys = "tenants.json"\nsecret = "none"', "none cannot be read"),
        ("[response_cache]\nttl_s = 5", "either 'path', a folder, or 'redis'"),
        ('[response_cache]\npath = "a"\nredis = "redis://h"', "either 'path'"),
        ('[response_cache]\nredis = "http://h"', "redis://127.0.0.1"),
        ('[response_cache]\npath = "a"\nsecret = "no"', "secret: .*no cannot be read"),
        (TENANTS + '[response_cache]\npath = "a"\nsecret = "secret"', "leave it out"),
        ('[response_cache]\nredis = "redis://h:abc"', "redis://127.0.0.1"),
        ('[response_cache]\nredis = "redis://h:99999"', "redis://127.0.0.1"),
        ('[response_cache]\npath = ""', "'path' must be a path"),
        ('[response_cache]\npath = "a"\nbytes = "many"', "'bytes' is not a size"),
    ],
)
def test_mistakes_are_named(folder, text, message):
    with pytest.raises(ValueError, match=message) as error:
        config.read(write(folder, text))
    assert "VLLM_METAL_SERVING_CONFIG" in str(error.value)


def test_a_secret_that_others_may_read_is_named_by_its_own_setting(folder):
    (folder / "secret").chmod(0o644)
    text = '[tenants]\nkeys = "tenants.json"\nsecret = "secret"'
    with pytest.raises(ValueError, match=r"\[tenants\] secret: .*chmod 600") as error:
        config.read(write(folder, text))
    assert "prefix_cache_salt_key" not in str(error.value)


def test_a_password_is_not_for_other_users_and_not_for_logs(folder):
    pytest.importorskip("redis", reason="the extra `redis` is not installed")
    text = '[response_cache]\nsecret = "secret"\nredis = "redis://:s3cr3t@127.0.0.1/0"'
    with pytest.raises(ValueError, match="chmod 600") as error:
        config.read(write(folder, text, 0o644))
    assert "s3cr3t" not in str(error.value)
    found = config.read(write(folder, text))
    assert "s3cr3t" in found.response_cache.redis and "s3cr3t" not in repr(found)


def test_answers_in_redis_are_sealed(folder):
    pytest.importorskip("redis", reason="the extra `redis` is not installed")
    text = '[response_cache]\nredis = "redis://h"\n'
    with pytest.raises(ValueError, match=r"'redis' without \[tenants\] needs a") as error:
        config.read(write(folder, text))
    assert "VLLM_METAL_SERVING_CONFIG" in str(error.value)
    found = config.read(write(folder, text + 'secret = "secret"')).response_cache
    assert found.secret == folder / "secret"
    assert config.read(write(folder, TENANTS + text)).response_cache.secret is None
    (folder / "secret").chmod(0o644)
    with pytest.raises(ValueError, match=r"\[response_cache\] secret: .*chmod 600"):
        config.read(write(folder, text + 'secret = "secret"'))


def test_the_variable_names_the_file(folder, monkeypatch):
    monkeypatch.delenv("VLLM_METAL_SERVING_CONFIG", raising=False)
    assert config.of_environment() is None and config.keys_file() is None
    with pytest.raises(ValueError, match="needs VLLM_METAL_SERVING_CONFIG") as error:
        config.required()
    assert "[tenants]" in str(error.value)
    monkeypatch.setenv("VLLM_METAL_SERVING_CONFIG", str(write(folder, TENANTS)))
    assert config.required().tenants is not None
    assert config.keys_file() == folder / "tenants.json"
    monkeypatch.setenv("VLLM_METAL_SERVING_CONFIG", str(folder / "none.toml"))
    with pytest.raises(ValueError, match=r"none\.toml cannot be read"):
        config.of_environment()


def test_vllm_gets_the_class_only_where_the_settings_are_good(folder, monkeypatch):
    """vLLM looks the class up at the start and builds the object much later."""
    import vllm_metal.serving

    monkeypatch.delenv("VLLM_METAL_SERVING_CONFIG", raising=False)
    with pytest.raises(ValueError, match="needs VLLM_METAL_SERVING_CONFIG"):
        _ = vllm_metal.serving.Tenants
    monkeypatch.setenv("VLLM_METAL_SERVING_CONFIG", str(write(folder, TENANTS)))
    assert isinstance(vllm_metal.serving.Tenants, type)
    with pytest.raises(AttributeError):
        _ = vllm_metal.serving.Tenant
