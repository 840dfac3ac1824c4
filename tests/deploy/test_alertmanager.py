# SPDX-License-Identifier: Apache-2.0
"""Alertmanager accepts the shipped configuration and routes alerts as intended."""

import json
import queue
import shutil
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
import yaml
from deploy.queries import DEPLOY, rules
from e2e.server import free_port

CONFIGURATION = DEPLOY / "alertmanager" / "alertmanager.yml"
AMTOOL = shutil.which("amtool")
PROGRAM = shutil.which("prometheus-alertmanager") or shutil.which("alertmanager")
needs_amtool = pytest.mark.skipif(
    AMTOOL is None,
    reason="amtool is not installed (Debian: apt-get install prometheus-alertmanager)",
)
HEARS = {"critical": "on-call", "warning": "mail", "info": "nobody"}
#: An alert of each severity.
FIRST = list({rule["labels"]["severity"]: rule for rule in rules("alert")}.values())


def amtool(*arguments):
    done = subprocess.run([AMTOOL, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@needs_amtool
def test_it_is_valid():
    assert "SUCCESS" in amtool("check-config", CONFIGURATION)


@needs_amtool
@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(rule, id=rule["alert"], marks=() if rule in FIRST else pytest.mark.more)
        for rule in rules("alert")
    ],
)
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


class OnCall(ThreadingHTTPServer):
    """Receives critical alerts."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.told = queue.Queue()


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        self.server.told.put(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *args):
        return


@pytest.fixture
def on_call():
    with OnCall() as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.05,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture
def manager(on_call, tmp_path):
    """Runs Alertmanager with the shipped configuration, except the pager's address."""
    text, there = CONFIGURATION.read_text(), "http://127.0.0.1:9095/on-call"
    assert text.count(there) == 1
    where = f"http://127.0.0.1:{on_call.server_address[1]}/"
    (tmp_path / "alertmanager.yml").write_text(text.replace(there, where))
    address = f"127.0.0.1:{free_port()}"
    command = [
        PROGRAM,
        "--config.file=alertmanager.yml",
        "--storage.path=data",
        f"--web.listen-address={address}",
        "--cluster.listen-address=",
    ]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=subprocess.STDOUT)
        try:
            with httpx.Client(base_url=f"http://{address}/api/v2") as client:
                wait_for(lambda: is_ready(client))
                yield client
        finally:
            process.terminate()
            process.wait(30)


def is_ready(client):
    try:
        return client.get("/status").status_code == 200
    except httpx.TransportError:
        return False


def wait_for(condition):
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def state(manager, name):
    """Returns an alert's state: "active", "suppressed", "unprocessed"."""
    found = [
        alert for alert in manager.get("/alerts").json() if alert["labels"]["alertname"] == name
    ]
    return [alert["status"]["state"] for alert in found]


@pytest.mark.skipif(
    PROGRAM is None,
    reason="Alertmanager is not installed (Debian: apt-get install prometheus-alertmanager)",
)
def test_a_server_that_is_down_is_told_once(manager, on_call):
    def fire(name, severity, instance="a"):
        labels = {"alertname": name, "severity": severity, "instance": instance}
        assert manager.post("/alerts", json=[{"labels": labels}]).status_code == 200

    fire("ServerDown", "critical")
    told = on_call.told.get(timeout=300)
    assert [alert["labels"]["alertname"] for alert in told["alerts"]] == ["ServerDown"]
    fire("RequestsTimeOut", "warning")
    fire("KVCacheNearlyFull", "warning", "b")
    wait_for(lambda: state(manager, "RequestsTimeOut") == ["suppressed"])
    wait_for(lambda: state(manager, "KVCacheNearlyFull") == ["active"])
