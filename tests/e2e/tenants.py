# SPDX-License-Identifier: Apache-2.0
"""A `vllm serve` with tenants and kept answers, and clients of it that carry keys."""

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

#: Far more than the other requests of these tests take, and far less than the longest one.
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
    """A server, the keys of its tenants, and that of /metrics."""

    server: Server
    keys: dict[str, str]
    client: httpx.Client

    def ask(self, tenant: str, path: str = "/v1/completions", **fields: object) -> httpx.Response:
        """A greedy request."""
        body = {"model": "m", "temperature": 0} | fields
        return self.send("POST", path, self.keys[tenant], json=body)

    def fresh(self, tenant: str, path: str = "/v1/completions", **fields: object) -> httpx.Response:
        """The same, and the engine answers."""
        body = {"model": "m", "temperature": 0} | fields
        more = {"Cache-Control": "no-cache"}
        return self.send("POST", path, self.keys[tenant], json=body, headers=more)

    def send(self, method: str, path: str, key: str | None, **options: object) -> httpx.Response:
        """Any request."""
        headers = dict(options.pop("headers", {}))  # type: ignore[call-overload]
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        return self.client.request(method, f"{self.server.url}{path}", headers=headers, **options)

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples that carry the labels; 0 where there is none yet."""
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
    """Writes what the server reads, into an empty folder; returns the keys.

    Args:
        folder: for the settings, and all that they name.
        names: of tenants.
        limits: the settings' first lines.
    """
    (folder / "serving.toml").write_text(limits + _SETTINGS)
    secret = folder / "secret"
    secret.write_text("a secret of a server in a test")
    secret.chmod(0o600)
    file = folder / "tenants.json"
    keys = {name: tenants_file.add(file, name)[1] for name in names}
    return keys | {"metrics": tenants_file.add(file, "prometheus", "metrics")[1]}


def identities(folder: Path) -> dict[str, str]:
    """What salts are derived from, by tenant."""
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
    """Runs a server on what `write_settings` wrote, with a cache on disk and suffix decoding.

    Args:
        model: its folder.
        folder: that `write_settings` wrote to.
        keys: that it returned.
        log: the name of a file in the folder.
        more: of the command line.
        environment: variables to add.
    """
    ours = {
        "prefix_cache_dir": str(folder / "disk"),
        "prefix_cache_bytes": "200MB",
        "prefix_cache_salt_key": str(folder / "secret"),
        "fixed_draft_length": True,  # else counts of drafts depend on how long steps take
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
    """The server reads its weights first, in the background.

    Raises:
        AssertionError: it did not end in time.
    """
    deadline = time.monotonic() + 240
    while running.ask("acme", prompt="Once", max_tokens=1).headers["x-cache"] == "BYPASS":
        assert time.monotonic() < deadline
        time.sleep(0.1)
