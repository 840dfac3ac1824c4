# SPDX-License-Identifier: Apache-2.0
"""Runs `vllm serve` with tenants and a response cache, and clients with keys."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import httpx
from e2e.server import Server, serve
from prometheus_client.parser import text_string_to_metric_families

from vllm_metal.serving import tenants_file

#: Far more than other requests of these tests take, and far less than the longest one.
TIMEOUT_S = 20
MAX_MODEL_LEN = 32768
SPECULATION = {"method": "suffix", "num_speculative_tokens": 4}
_SETTINGS = """
[tenants]
keys = "tenants.json"
secret = "secret"
[response_cache]
path = "answers"
"""


@dataclass(frozen=True)
class Tenants:
    """A server with its tenants' keys and the key of /metrics."""

    server: Server
    keys: dict[str, str]
    client: httpx.Client

    def ask(self, tenant: str, path: str = "/v1/completions", **fields: object) -> httpx.Response:
        """Sends a greedy request."""
        body = {"model": "m", "temperature": 0} | fields
        return self.send("POST", path, self.keys[tenant], json=body)

    def fresh(self, tenant: str, path: str = "/v1/completions", **fields: object) -> httpx.Response:
        """Sends a greedy request that bypasses the response cache."""
        body = {"model": "m", "temperature": 0} | fields
        more = {"Cache-Control": "no-cache"}
        return self.send("POST", path, self.keys[tenant], json=body, headers=more)

    def send(self, method: str, path: str, key: str | None, **options: object) -> httpx.Response:
        """Sends any request."""
        headers = dict(options.pop("headers", {}))  # type: ignore[call-overload]
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        return self.client.request(method, f"{self.server.url}{path}", headers=headers, **options)

    def metric(self, name: str, **labels: str) -> float:
        """Sums the samples that carry the labels; 0 if there are none yet."""
        text = self.send("GET", "/metrics", self.keys["metrics"]).text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )


def write_settings(
    folder: Path,
    names: Sequence[str] = ("acme", "other"),
    limits: str = f"timeout_s = {TIMEOUT_S}\n",
) -> dict[str, str]:
    """Writes the server's settings into an empty folder; returns the keys.

    Args:
        folder: folder for the settings and the files they name.
        names: tenants.
        limits: first lines of the settings.
    """
    (folder / "serving.toml").write_text(limits + _SETTINGS)
    secret = folder / "secret"
    secret.write_text("a secret of a server in a test")
    secret.chmod(0o600)
    file = folder / "tenants.json"
    keys = {name: tenants_file.add(file, name)[1] for name in names}
    return keys | {"metrics": tenants_file.add(file, "prometheus", "metrics")[1]}


def identities(folder: Path) -> dict[str, str]:
    """Returns the tenants' identities that salts are derived from."""
    return {key.tenant: key.identity for key in tenants_file.read(folder / "tenants.json")}


@contextmanager
def serve_tenants(
    model: str,
    folder: Path,
    keys: dict[str, str],
    log: str,
    more: Sequence[str] = (),
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Tenants]:
    """Runs a server with settings of `write_settings`, a disk cache and suffix decoding.

    Args:
        model: model folder.
        folder: folder that `write_settings` wrote to.
        keys: keys that it returned.
        log: name of the log file in the folder.
        more: more command-line options.
        environment: additional variables.
    """
    ours = {
        "prefix_cache_dir": str(folder / "disk"),
        "prefix_cache_bytes": "200MB",
        "prefix_cache_salt_key": str(folder / "secret"),
        "fixed_draft_length": True,  # otherwise draft counts depend on the duration of steps
    }
    options = [
        *("--served-model-name", "m", "--max-model-len", str(MAX_MODEL_LEN)),
        *("--max-num-batched-tokens", "1024", "--kv-cache-memory-bytes", str(256 << 20)),
        *("--middleware", "vllm_metal.serving.Tenants"),
        *("--additional-config", json.dumps(ours)),
        *("--speculative-config", json.dumps(SPECULATION)),
        "--enable-prompt-tokens-details",
        *more,
    ]
    settings = {
        "VLLM_METAL_SERVING_CONFIG": str(folder / "serving.toml"),
        "VLLM_ENABLE_RESPONSES_API_STORE": "1",
        **environment,
    }
    with (
        serve(model, options, folder / log, environment=settings) as server,
        httpx.Client(timeout=120) as client,
    ):
        yield Tenants(server, keys, client)


def wait_until_answers_are_kept(running: Tenants) -> None:
    """Waits until the server has hashed its weights, which it does in the background.

    Raises:
        AssertionError: it did not finish in time.
    """
    deadline = time.monotonic() + 240
    while running.ask("acme", prompt="Once", max_tokens=1).headers["x-cache"] == "BYPASS":
        assert time.monotonic() < deadline
        time.sleep(0.1)
