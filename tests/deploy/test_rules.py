# SPDX-License-Identifier: Apache-2.0
"""Prometheus' own tool runs the rules' tests: when each alert fires, and that none does idly."""

import shutil
import subprocess

import pytest
import yaml
from deploy.queries import DEPLOY, groups, metrics_of, rules

FOLDER = DEPLOY / "prometheus"
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not installed (Debian: apt-get install prometheus)"
)


def promtool(*arguments, folder=FOLDER):
    done = subprocess.run(
        [PROMTOOL, *arguments], cwd=folder, capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stdout + done.stderr


@needs_promtool
@pytest.mark.parametrize(
    "arguments",
    [("check", "config", "prometheus.yml"), ("test", "rules", "rules_test.yml")],
    ids=["config", "rules"],
)
def test_promtool_finds_nothing_wrong(arguments):
    status, told = promtool(*arguments)
    assert status == 0, told


@needs_promtool
@pytest.mark.parametrize("alert", [rule["alert"] for rule in rules("alert")])
def test_the_rules_tests_can_fail(alert, tmp_path):
    """Without its rule, an alert is missed."""
    kept = groups()
    for group in kept:
        group["rules"] = [rule for rule in group["rules"] if rule.get("alert") != alert]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": kept}))
    shutil.copy(FOLDER / "rules_test.yml", tmp_path)
    status, told = promtool("test", "rules", "rules_test.yml", folder=tmp_path)
    assert status and alert in told


def test_names_of_the_recording_rules():
    expected = {"vllm_spec_acceptance_rate", "llm_cache_hit_ratio", "llm_request_duration_seconds"}
    assert expected <= {rule["record"] for rule in rules("record")}


def test_every_alert_says_how_bad_it_is_and_what_to_do():
    for rule in rules("alert"):
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert rule["annotations"].keys() == {"summary", "description"}


def test_alerts_use_what_is_recorded():
    recorded = {rule["record"] for rule in rules("record")}
    used = set().union(*(metrics_of(rule["expr"]) for rule in rules("alert")))
    assert {name for name in used if not name.startswith("vllm:")} <= recorded
