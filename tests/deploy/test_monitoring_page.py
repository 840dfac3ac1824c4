# SPDX-License-Identifier: Apache-2.0
"""docs/monitoring.md names the alerts and metrics that there are."""

import re
from types import SimpleNamespace

from deploy.queries import DEPLOY, rules
from prometheus_client import REGISTRY
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from vllm_metal.metrics.stat_logger import MetalStatLogger

PAGE = (DEPLOY.parent / "docs" / "monitoring.md").read_text()


def rows(heading):
    """Names in the first cells of the first table under a heading."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `([\w:]+)` \|", section, re.MULTILINE)


def test_every_alert_and_record_has_a_row():
    named = {rule[kind] for kind in ("alert", "record") for rule in rules(kind)}
    assert set(rows("Rules and alerts")) == named


def test_minutes_of_alerts():
    for rule in rules("alert"):
        (row,) = (line for line in PAGE.splitlines() if line.startswith(f"| `{rule['alert']}`"))
        waits = rule.get("for", "at once").replace("m", " min")
        assert f"| {waits} |" in row


def test_every_metric_of_ours_has_a_row():
    config = SimpleNamespace(model_config=SimpleNamespace(served_model_name="m"))
    unregister_vllm_metrics()
    MetalStatLogger(config, [0])
    there = {family.name for family in REGISTRY.collect() if family.name.startswith("vllm:metal")}
    unregister_vllm_metrics()
    assert {name.removesuffix("_total") for name in rows("What is exported")} == there
