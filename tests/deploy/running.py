# SPDX-License-Identifier: Apache-2.0
"""Runs Prometheus with this repository's rules at short intervals, on a free loopback port."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from deploy.queries import DEPLOY, RULES, groups
from e2e.server import free_port

PROGRAM = shutil.which("prometheus")
KEY = "metrics-key"  # file for the key of /metrics


@dataclass(frozen=True)
class Prometheus:
    """A running Prometheus."""

    url: str

    def ask(self, path: str, **arguments: str) -> Any:
        """Returns the data of an API answer."""
        query = urllib.parse.urlencode(arguments)
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=30) as reply:
            return json.load(reply)["data"]

    def values(self, query: str) -> list[float]:
        """Returns a query's current values, without NaN."""
        result = self.ask("query", query=query)["result"]
        found = [float(series["value"][1]) for series in result]
        return [value for value in found if not math.isnan(value)]

    def alerts(self) -> set[tuple[str, str]]:
        """Returns (name, state) of all alerts that are not inactive."""
        alerts = self.ask("alerts")["alerts"]
        return {(alert["labels"]["alertname"], alert["state"]) for alert in alerts}

    def up(self) -> list[str]:
        """Returns the states of all targets: "up", "down", "unknown"."""
        return [target["health"] for target in self.ask("targets")["activeTargets"]]


@contextmanager
def prometheus(
    targets: Sequence[str], folder: Path, key: str = "", health: str = "up"
) -> Iterator[Prometheus]:
    """Runs a Prometheus until the block ends.

    Args:
        targets: host and port of servers to scrape every second.
        folder: folder for its files. Alerts wait one second, whatever their `for` is.
        key: key for /metrics, in the configured file; "": as shipped.
        health: state of all targets to wait for.
    """
    for file in RULES:
        hurried = groups(file)
        for group in hurried:
            group["interval"] = "1s"
            for rule in group["rules"]:
                if "for" in rule:
                    rule["for"] = "1s"
        (folder / file).write_text(yaml.safe_dump({"groups": hurried}))
    shutil.copy(DEPLOY / "prometheus" / KEY, folder)
    if key:
        (folder / KEY).write_text(f"{key}\n")
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s"}
    del config["alerting"]  # there is no Alertmanager
    config["scrape_configs"][0]["static_configs"] = [{"targets": list(targets)}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    assert PROGRAM is not None
    address = f"127.0.0.1:{free_port()}"
    command = [
        PROGRAM,
        "--config.file=prometheus.yml",
        "--storage.tsdb.path=data",
        f"--web.listen-address={address}",
    ]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
        try:
            found = Prometheus(f"http://{address}")
            _wait_until(health, process, found, folder / "log")
            yield found
        finally:
            process.terminate()
            process.wait(30)


def _wait_until(
    health: str, process: subprocess.Popen[bytes], found: Prometheus, log: Path
) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if (states := found.up()) and set(states) == {health}:
                return
        except OSError:  # not listening yet
            pass
        time.sleep(0.25)
    raise AssertionError(log.read_text()[-3000:])
