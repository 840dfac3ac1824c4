# SPDX-License-Identifier: Apache-2.0
"""Alertmanager's own tool reads the shipped configuration, and says who hears of which alert."""

import shutil
import subprocess

import pytest
import yaml
from deploy.queries import DEPLOY, rules

CONFIGURATION = DEPLOY / "alertmanager" / "alertmanager.yml"
AMTOOL = shutil.which("amtool")
needs_amtool = pytest.mark.skipif(
    AMTOOL is None,
    reason="amtool is not installed (Debian: apt-get install prometheus-alertmanager)",
)
HEARS = {"critical": "on-call", "warning": "mail", "info": "nobody"}


def amtool(*arguments):
    done = subprocess.run([AMTOOL, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@needs_amtool
def test_it_is_valid():
    assert "SUCCESS" in amtool("check-config", CONFIGURATION)


@needs_amtool
@pytest.mark.parametrize("rule", rules("alert"), ids=lambda rule: rule["alert"])
def test_who_hears_of_an_alert(rule):
    severity = rule["labels"]["severity"]
    labels = (f"alertname={rule['alert']}", f"severity={severity}", "instance=a")
    told = amtool("config", "routes", "test", f"--config.file={CONFIGURATION}", *labels)
    assert told == HEARS[severity]


def test_prometheus_names_it():
    """Its port is Alertmanager's default."""
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    (manager,) = config["alerting"]["alertmanagers"]
    assert manager["static_configs"] == [{"targets": ["127.0.0.1:9093"]}]


def test_what_silences_others_is_an_alert():
    (rule,) = yaml.safe_load(CONFIGURATION.read_text())["inhibit_rules"]
    assert rule["source_matchers"] == ["alertname = ServerDown"]
    assert "ServerDown" in {rule["alert"] for rule in rules("alert")}
