# SPDX-License-Identifier: Apache-2.0
"""Settings of `vllm_metal.serving.Tenants`: one TOML file, named by an environment variable.

vLLM creates middleware without arguments, so these settings cannot be options of `vllm serve`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from vllm_metal.serving import tenants_file
from vllm_metal.settings import envs, secret_file, values
from vllm_metal.settings.extras import install_advice

SETTING = "VLLM_METAL_SERVING_CONFIG"
MIDDLEWARE = "vllm_metal.serving.Tenants"
#: Most that max_body_depth may be: Python's JSON parser recurses, and stops at 1,000 calls.
_DEEPEST = 500
_EXAMPLE = '''timeout_s = 600
[tenants]
keys = "tenants.json"      # vllm-metal tenants add NAME --keys tenants.json
secret = "secret"          # openssl rand -hex 32 > secret; chmod 600 secret
[response_cache]
path = "answers"'''

_seconds = partial(values.positive, of="seconds")


@dataclass(frozen=True)
class TenantsConfig:
    """Section [tenants] of the settings file."""

    keys: Path  # absolute; the file that `vllm-metal tenants` writes
    secret: Path  # absolute; salts and response ids are derived from its content
    open_metrics: bool = False  # whether /metrics needs no key

    def read_secret(self) -> bytes:
        """Reads the secret; raises ValueError as `secret_file.read` does."""
        return secret_file.read(self.secret, "[tenants] secret")


@dataclass(frozen=True)
class ResponseCacheConfig:
    """Section [response_cache] of the settings file."""

    path: Path | None = None  # folder of the SQLite file; None: `redis` is set
    redis: str | None = field(default=None, repr=False)  # address; may contain a password
    ttl_s: float = 24 * 3600.0
    max_bytes: int = 10**9
    max_answer_bytes: int = 10**6  # longer responses are not cached
    secret: Path | None = None  # signs responses if there are no tenants; None: one in `path`


@dataclass(frozen=True)
class BodyLimits:
    """Limits of a request body, named as their settings are.

    While one body is read, checked and copied, no other request is served, so that time must be
    bounded; docs/production.md has the measurements.
    """

    #: A prompt of 128k tokens is about 0.5 MB of text, and JSON escapes take up to 6 bytes per
    #: byte of text; a million token ids are 7 MB.
    max_body_bytes: int = 8 * 10**6
    #: Time for the whole body to arrive; nginx allows as much between two reads
    #: (client_body_timeout).
    max_body_s: float = 60.0
    #: Levels of objects and lists; tool schemas are the deepest that clients send.
    max_body_depth: int = 64
    #: Values of any kind. A million token ids are a million numbers.
    max_body_values: int = 1_500_000
    #: Objects, lists and names in objects. 400 tools with nested parameters have 108,000.
    max_body_names: int = 200_000
    #: Objects and lists that are items of lists: messages, content parts, tools, prompts.
    #: vLLM takes up to 80 us to check one (of `input`).
    max_body_items: int = 10_000
    #: Choices to compute: prompts times `n`, or texts to embed, score or classify.
    max_body_choices: int = 1024
    #: Pixels of all images, at least a megapixel each; None: see `vllm_metal/serving/limits.py`.
    max_body_pixels: int | None = None
    #: Size of a grammar or schema, as counted by `request_sizes` of the patches. A chain of
    #: 1,000 rules takes 1 s and 70 MB to compile, one of 4,000 rules 50 s and 1 GB.
    max_body_grammar: int = 20_000


@dataclass(frozen=True)
class ServingConfig:
    """Content of the settings file."""

    tenants: TenantsConfig | None
    response_cache: ResponseCacheConfig | None
    timeout_s: float | None  # limit of a request's duration; None: unlimited
    body: BodyLimits = BodyLimits()


def of_environment() -> ServingConfig | None:
    """Calls `read` with the file that `VLLM_METAL_SERVING_CONFIG` names; None if it is unset."""
    path = envs.serving_config()
    return None if path is None else read(path)


def required() -> ServingConfig:
    """Like `of_environment`, but raises ValueError if `VLLM_METAL_SERVING_CONFIG` is not set."""
    found = of_environment()
    if found is None:
        raise ValueError(
            f"--middleware {MIDDLEWARE} needs {SETTING}, the path of a TOML file such as\n"
            f"{_EXAMPLE}"
        )
    return found


def keys_file() -> Path | None:
    """Returns the path of the keys' file, which need not exist; None without settings or tenants.

    Raises ValueError if the settings are not TOML.
    """
    path = envs.serving_config()
    if path is None:
        return None
    keys = _load(path).get("tenants", {}).get("keys")
    return None if keys is None else _path_below(path.absolute().parent)(keys)


def read(path: Path) -> ServingConfig:
    """Reads and checks settings and all files that they name, relative to the settings' folder.

    Raises ValueError, naming the setting, if a file cannot be used.
    """
    where, given = f"{SETTING} {path}", _load(path)
    folder = path.expanduser().absolute().parent
    readers: dict[str, values.Reader] = {
        "timeout_s": _seconds,
        **dict.fromkeys((limit.name for limit in fields(BodyLimits)), values.count),
        "max_body_bytes": values.size,
        "max_body_s": _seconds,
        "max_body_depth": partial(values.count, most=_DEEPEST),
        "tenants": lambda section: _tenants(section, folder, f"{where} [tenants]"),
        "response_cache": lambda section: _response_cache(section, path, f"{where}"),
    }
    found = values.read(given, readers, where)
    if not found:
        raise ValueError(f"{where} has no settings; write for example\n{_EXAMPLE}")
    _check_seal(found.get("tenants"), found.get("response_cache"), where)
    return ServingConfig(
        tenants=found.get("tenants"),
        response_cache=found.get("response_cache"),
        timeout_s=found.get("timeout_s"),
        body=BodyLimits(**{name: found[name] for name in found if name.startswith("max_body_")}),
    )


def _load(path: Path) -> dict[str, Any]:
    where = f"{SETTING} {path}"
    try:
        with path.open("rb") as file:
            given = tomllib.load(file)
    except OSError as error:
        raise ValueError(f"{where} cannot be read ({error.strerror or error})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{where} is not TOML: {error}") from error
    for name in ("tenants", "response_cache"):
        if not isinstance(given.get(name, {}), dict):
            raise ValueError(f"{where} {name!r} must be a section: write [{name}]")
    return given


def _tenants(given: Mapping[str, Any], folder: Path, where: str) -> TenantsConfig:
    path = _path_below(folder)
    found = values.read(given, {"keys": path, "secret": path, "metrics": _metrics}, where)
    for name in ("keys", "secret"):
        if name not in found:
            raise ValueError(f"lacks {name!r}, a file; write for example\n{_EXAMPLE}")
    made = TenantsConfig(found["keys"], found["secret"], found.get("metrics", False))
    made.read_secret()
    tenants_file.read(made.keys)
    return made


def _response_cache(given: Mapping[str, Any], file: Path, where: str) -> ResponseCacheConfig:
    path = _path_below(file.expanduser().absolute().parent)
    readers: dict[str, values.Reader] = {
        "path": path,
        "redis": _redis,
        "secret": path,
        "ttl_s": _seconds,
        "bytes": values.size,
        "max_answer_bytes": values.size,
    }
    found = values.read(given, readers, f"{where} [response_cache]")
    if ("path" in found) == ("redis" in found):
        raise ValueError("needs either 'path', a folder, or 'redis', the address of a server")
    if urlsplit(found.get("redis", "")).password and file.stat().st_mode & 0o077:
        raise ValueError(
            f"'redis' holds a password, and the mode of {file} lets other users read it: run "
            f"`chmod 600 {file}`"
        )
    if "bytes" in found:
        found["max_bytes"] = found.pop("bytes")
    return ResponseCacheConfig(**found)


def _check_seal(
    tenants: TenantsConfig | None, cache: ResponseCacheConfig | None, where: str
) -> None:
    # The secret signs cached responses: write access to the store must not suffice to forge one.
    if cache is None:
        return
    section = f"{where} [response_cache]"
    if tenants is not None and cache.secret is not None:
        raise ValueError(f"{section} has a 'secret', but that of [tenants] is used: leave it out")
    if cache.secret is not None:
        secret_file.read(cache.secret, f"{section} secret")
    elif cache.redis is not None and tenants is None:
        raise ValueError(
            f"{section}: 'redis' without [tenants] needs a 'secret', a file that all its "
            "servers share, or else anyone who can write to Redis can forge responses: "
            'write secret = "secret" and run `openssl rand -hex 32 > secret; chmod 600 '
            "secret` in the folder of the settings"
        )


def _path_below(folder: Path) -> values.Reader:
    def path(value: Any) -> Path:
        if isinstance(value, str) and value.strip() and not value.startswith(("/", "~")):
            value = folder / value
        return values.path(value)

    return path


def _metrics(value: Any) -> bool:
    if value not in ("key", "open"):
        raise ValueError(
            f"must be 'key' (for keys of `vllm-metal tenants add --metrics`) or 'open', not "
            f"{value!r}"
        )
    return bool(value == "open")


def _redis(value: Any) -> str:
    if not isinstance(value, str) or not _is_redis(value):
        raise ValueError("must be an address such as redis://127.0.0.1:6379/0")  # without the value
    if find_spec("redis") is None:
        raise ValueError(f"needs the package redis: {install_advice('redis')}")
    return value


def _is_redis(value: str) -> bool:
    parts = urlsplit(value)
    try:
        port = parts.port
    except ValueError:  # not a number, or too large
        return False
    return parts.scheme in ("redis", "rediss", "unix") and port != 0
