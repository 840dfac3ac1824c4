# SPDX-License-Identifier: Apache-2.0
"""Reads the files of deploy/ and their queries."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = ("rules.yml", "costs.yml")
DASHBOARD = DEPLOY / "grafana" / "dashboard.json"


def groups(file: str) -> list[dict[str, Any]]:
    """Returns the groups of a file of RULES."""
    return list(yaml.safe_load((DEPLOY / "prometheus" / file).read_text())["groups"])


def rules(kind: str) -> list[dict[str, Any]]:
    """Returns all rules with a key: "record" or "alert"."""
    all_groups = [group for file in RULES for group in groups(file)]
    return [rule for group in all_groups for rule in group["rules"] if kind in rule]


def dashboard() -> dict[str, Any]:
    return dict(json.loads(DASHBOARD.read_text()))


def panel_queries() -> Iterator[tuple[str, str]]:
    """Yields (panel title, query) of all panels, with Grafana's variables filled in."""
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"].replace("$instance", ".*").replace("$__rate_interval", "1m")
            assert "$" not in query, query
            yield panel["title"], query


def metrics_of(query: str) -> list[str]:
    """Returns the metric names in a query, in order."""
    return re.findall(r"\b(?:vllm:|vllm_spec_|llm_)\w+|\bup\b", query)


def write_logging(folder: Path, log: Path) -> Path:
    """Writes the shipped logging configuration for another log file; returns its path."""
    config = json.loads((DEPLOY / "logs" / "logging.json").read_text())
    config["handlers"]["file"]["filename"] = str(log)
    (folder / "logging.json").write_text(json.dumps(config))
    return folder / "logging.json"
