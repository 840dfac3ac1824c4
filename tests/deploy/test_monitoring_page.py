# SPDX-License-Identifier: Apache-2.0
"""docs/monitoring.md names the alerts and metrics that there are."""

import re
from types import SimpleNamespace
from typing import get_args

import yaml
from deploy.queries import DEPLOY, rules
from prometheus_client import REGISTRY
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from vllm_metal.metrics.stat_logger import MetalStatLogger
from vllm_metal.serving.metrics import Outcome

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
    MetalStatLogger(lambda _: {}, config, [0])
    there = {family.name for family in REGISTRY.collect() if family.name.startswith("vllm:metal")}
    unregister_vllm_metrics()
    assert {name.removesuffix("_total") for name in rows("What is exported")} == there


def test_every_outcome_has_a_row():
    section = PAGE.split("**What durations leave out.**")[1].split("Requests without")[0]
    named = re.findall(r"^\| (\w+(?:, \w+)*) \| (?:yes|no) \|", section, re.MULTILINE)
    assert {name for cell in named for name in cell.split(", ")} == set(get_args(Outcome))


def test_the_example_of_costs_is_what_prometheus_computes():
    """costs_test.yml has its numbers, and promtool checks them."""
    text = (DEPLOY / "prometheus" / "costs_test.yml").read_text()
    (test,) = yaml.safe_load(text)["tests"]
    found = {
        sample["value"]
        for question in test["promql_expr_test"]
        if "0.0001" in question["expr"] and "scalar" not in question["expr"]
        for sample in question["exp_samples"]
    }
    section = PAGE.split("An example with")[1].split("A bill of a month")[0]
    assert found == {0.1263, 0.0702, 0.7016, 0, 0.0421, 0.0589, 0.0337}
    assert all(f"{value:.4f}" in section for value in found - {0})
    assert f"{0.0421 + 0.0589:.4f}" in section
    by_kind = {kind: 60 * per_minute for kind, per_minute in _rates(test).items()}
    for tokens in by_kind.values():
        assert f"{tokens:,}" in section


def _rates(test):
    """Tokens a minute of each tenant and kind."""
    found = {}
    for series in test["input_series"]:
        if series["series"].startswith("vllm:tenant_tokens_total"):
            tenant, kind = re.findall(r'(?:tenant|kind)="(\w+)"', series["series"])
            step = re.match(r"0\+(\d+)x", series["values"])
            found[tenant, kind] = int(step[1]) if step else 0
    return {
        (tenant, kind): rate - (found[tenant, "cached"] if kind == "prompt" else 0)
        for (tenant, kind), rate in found.items()
    }
