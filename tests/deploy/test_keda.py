# SPDX-License-Identifier: Apache-2.0
"""KEDA accepts the ScaledObject, which queries metrics that servers export."""

import json
import math
import subprocess
import threading
import time
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml
from deploy.npm import install
from deploy.queries import DEPLOY, metrics_of
from deploy.running import PROGRAM, prometheus
from e2e.server import free_port

OBJECT = yaml.safe_load((DEPLOY / "keda" / "scaledobject.yaml").read_text())
(TRIGGER,) = OBJECT["spec"]["triggers"]
QUERY = TRIGGER["metadata"]["query"]
OPEN = ("vllm:num_requests_running", "vllm:num_requests_waiting")
VALIDATE = """\
import { readFileSync } from "node:fs";
import { ScaledObject } from "@kubernetes-models/keda/keda.sh/v1alpha1/ScaledObject";
new ScaledObject(JSON.parse(readFileSync(process.argv[2]))).validate();
"""


def validated(made, folder):
    """Returns the violations of the published schema of KEDA's resource."""
    (folder / "validate.mjs").write_text(VALIDATE)
    (folder / "object.json").write_text(json.dumps(made))
    command = ["node", "validate.mjs", "object.json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    return done.stderr if done.returncode else ""


@pytest.mark.slow  # to be fetched
def test_it_is_of_kedas_schema(tmp_path):
    install(tmp_path, "@kubernetes-models/keda@2.0.0")
    assert validated(OBJECT, tmp_path) == ""
    wrong = TRIGGER | {"metadata": TRIGGER["metadata"] | {"threshold": 10}}
    spec = OBJECT["spec"] | {"triggers": [wrong]}
    assert "threshold must be string" in validated(OBJECT | {"spec": spec}, tmp_path)


def test_it_scales_by_the_requests_that_are_open():
    assert (OBJECT["apiVersion"], OBJECT["kind"]) == ("keda.sh/v1alpha1", "ScaledObject")
    assert TRIGGER["type"] == "prometheus"
    assert all(isinstance(value, str) for value in TRIGGER["metadata"].values())
    assert metrics_of(QUERY) == list(OPEN)
    assert float(TRIGGER["metadata"]["threshold"]) > 0


class Exporter(ThreadingHTTPServer):
    """A server's /metrics with its number of requests."""

    daemon_threads = True

    def __init__(self, running, waiting):
        super().__init__(("127.0.0.1", 0), _Metrics)
        self.values = dict(zip(OPEN, (running, waiting), strict=True))

    @property
    def address(self):
        return f"127.0.0.1:{self.server_address[1]}"


class _Metrics(BaseHTTPRequestHandler):
    def do_GET(self):
        labels = 'engine="0",model_name="m"'
        lines = [f"{name}{{{labels}}} {value}\n" for name, value in self.server.values.items()]
        self.send_response(200)
        self.send_header("content-type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write("".join(lines).encode())

    def log_message(self, *args):
        return


@contextmanager
def exporting(*servers):
    with ExitStack() as stack:
        for server in servers:
            stack.enter_context(server)
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
            stack.callback(server.shutdown)
        yield [server.address for server in servers]


def wanted(found):
    """Replicas by a HorizontalPodAutoscaler's average: ceil(sum / threshold)."""
    (value,) = found.values(QUERY)
    return math.ceil(value / float(TRIGGER["metadata"]["threshold"]))


@pytest.mark.more
@pytest.mark.skipif(PROGRAM is None, reason="prometheus is not installed (Debian: prometheus)")
def test_prometheus_answers_the_query_with_replicas_for_what_is_open(tmp_path):
    """A real Prometheus sums over servers and waits for no server's scrape."""
    first, second = Exporter(running=16, waiting=4), Exporter(running=0, waiting=0)
    with exporting(first, second) as addresses, prometheus(addresses, tmp_path) as found:
        wait_for(lambda: found.values(QUERY) == [20.0])
        assert wanted(found) == 2
        # The second replica has taken its share and nobody waits: both are needed as before.
        first.values, second.values = ({OPEN[0]: 10, OPEN[1]: 0} for _ in range(2))
        wait_for(lambda: found.values(QUERY) == [20.0] and found.values(f"{OPEN[1]} > 0") == [])
        assert wanted(found) == 2
        first.values = second.values = {OPEN[0]: 1, OPEN[1]: 0}
        wait_for(lambda: found.values(QUERY) == [2.0])
        assert wanted(found) == 1


@pytest.mark.more
@pytest.mark.skipif(PROGRAM is None, reason="prometheus is not installed (Debian: prometheus)")
def test_where_no_server_can_be_asked_the_query_has_an_answer(tmp_path):
    """The answer is zero: KEDA would treat an empty one by `ignoreNullValues`."""
    with prometheus([f"127.0.0.1:{free_port()}"], tmp_path, health="down") as found:
        assert found.values(QUERY) == [0.0]


def wait_for(condition, seconds=240):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"still not so after {seconds} s"
        time.sleep(0.1)


def test_replicas_do_not_come_and_go():
    """The HPA delays each removal; `cooldownPeriod` is for the last replica alone."""
    spec = OBJECT["spec"]
    assert spec["minReplicaCount"] >= 1 and "cooldownPeriod" not in spec
    behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert behavior["scaleDown"]["stabilizationWindowSeconds"] >= 60
