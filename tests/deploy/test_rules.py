# SPDX-License-Identifier: Apache-2.0
"""promtool's tests of the rules: alerts fire when they should, and only then."""

import re
import shutil
import subprocess

import pytest
import yaml
from deploy.queries import DEPLOY, RULES, groups, metrics_of, rules

FOLDER = DEPLOY / "prometheus"
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not installed (Debian: apt-get install prometheus)"
)


def promtool(*arguments, folder=FOLDER):
    done = subprocess.run(
        [PROMTOOL, *arguments], cwd=folder, capture_output=True, text=True, timeout=300
    )
    return done.returncode, done.stdout + done.stderr


@needs_promtool
@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "config", "prometheus.yml"),
        ("test", "rules", "rules_test.yml"),
        ("test", "rules", "costs_test.yml"),
    ],
    ids=["config", "rules", "costs"],
)
def test_promtool_finds_nothing_wrong(arguments):
    status, told = promtool(*arguments)
    assert status == 0, told


@needs_promtool
def test_the_rules_tests_can_fail(tmp_path):
    """Without its rule, each alert is missing."""
    kept = groups("rules.yml")
    for group in kept:
        group["rules"] = [rule for rule in group["rules"] if "alert" not in rule]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": kept}))
    shutil.copy(FOLDER / "rules_test.yml", tmp_path)
    status, told = promtool("test", "rules", "rules_test.yml", folder=tmp_path)
    missed = set(re.findall(r"alertname: (\w+)", told))
    assert status and missed >= {rule["alert"] for rule in rules("alert")}


def test_names_of_the_recording_rules():
    expected = {"vllm_spec_acceptance_rate", "llm_cache_hit_ratio", "llm_request_duration_seconds"}
    assert expected <= {rule["record"] for rule in rules("record")}


def test_every_alert_says_how_bad_it_is_and_what_to_do():
    for rule in rules("alert"):
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert rule["annotations"].keys() == {"summary", "description"}


def test_alerts_use_what_is_recorded():
    recorded = {rule["record"] for rule in rules("record")}
    used = {name for rule in rules("alert") for name in metrics_of(rule["expr"])}
    assert {name for name in used if not name.startswith("vllm:")} <= recorded | {"up"}


def test_the_configuration_names_all_rules_and_no_key_is_shipped():
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    assert config["rule_files"] == list(RULES)
    (job,) = config["scrape_configs"]
    assert job["job_name"] == "vllm"  # as the rules have it
    assert (FOLDER / job["authorization"]["credentials_file"]).read_bytes() == b""


@needs_promtool
@pytest.mark.parametrize(
    "number",
    [
        0,
        *(
            pytest.param(number, marks=pytest.mark.slow)
            for number in range(1, len(groups("costs.yml")[1]["rules"]))
        ),
    ],
)
def test_the_tests_of_costs_can_fail(number, tmp_path):
    """Each rule in turn returns one too many."""
    wrong = groups("costs.yml")
    rule = wrong[1]["rules"][number]
    rule["expr"] = f"1 + ({rule['expr']})"
    (tmp_path / "costs.yml").write_text(yaml.safe_dump({"groups": wrong}))
    shutil.copy(FOLDER / "costs_test.yml", tmp_path)
    status, _ = promtool("test", "rules", "costs_test.yml", folder=tmp_path)
    assert status


@needs_promtool
def test_machines_may_differ(tmp_path):
    """Uses the example in the comment of costs.yml."""
    (line,) = re.findall(r"^# +(40 \+ .*)$", (FOLDER / "costs.yml").read_text(), re.MULTILINE)
    up = [
        {"series": f'up{{job="vllm", instance="{name}"}}', "values": "1x5"}
        for name in ("mini:8000", "studio:8000")
    ]
    expected = [
        {"labels": f'{{job="vllm", instance="{name}"}}', "value": watts}
        for name, watts in (("mini:8000", 40), ("studio:8000", 150))
    ]
    question = {"expr": line, "eval_time": "3m", "exp_samples": expected}
    test = {"interval": "1m", "input_series": up, "promql_expr_test": [question]}
    (tmp_path / "test.yml").write_text(yaml.safe_dump({"tests": [test]}))
    status, told = promtool("test", "rules", "test.yml", folder=tmp_path)
    assert status == 0, told
