# SPDX-License-Identifier: Apache-2.0
"""The ScaledObject is one that KEDA takes, and asks for what servers export."""

import json
import subprocess

import pytest
import yaml
from deploy.npm import install
from deploy.queries import DEPLOY, metrics_of

OBJECT = yaml.safe_load((DEPLOY / "keda" / "scaledobject.yaml").read_text())
PROGRAM = """\
import { readFileSync } from "node:fs";
import { ScaledObject } from "@kubernetes-models/keda/keda.sh/v1alpha1/ScaledObject";
new ScaledObject(JSON.parse(readFileSync(process.argv[2]))).validate();
"""


def validated(made, folder):
    """What the schema of KEDA's resource, as a package has it, finds wrong."""
    (folder / "validate.mjs").write_text(PROGRAM)
    (folder / "object.json").write_text(json.dumps(made))
    command = ["node", "validate.mjs", "object.json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    return done.stderr if done.returncode else ""


@pytest.mark.slow  # to be fetched
def test_it_is_of_kedas_schema(tmp_path):
    install(tmp_path, "@kubernetes-models/keda@2.0.0")
    assert validated(OBJECT, tmp_path) == ""
    (trigger,) = OBJECT["spec"]["triggers"]
    wrong = trigger | {"metadata": trigger["metadata"] | {"threshold": 10}}
    spec = OBJECT["spec"] | {"triggers": [wrong]}
    assert "threshold must be string" in validated(OBJECT | {"spec": spec}, tmp_path)


def test_it_scales_by_the_requests_that_wait():
    assert (OBJECT["apiVersion"], OBJECT["kind"]) == ("keda.sh/v1alpha1", "ScaledObject")
    (trigger,) = OBJECT["spec"]["triggers"]
    assert trigger["type"] == "prometheus"
    assert all(isinstance(value, str) for value in trigger["metadata"].values())
    assert metrics_of(trigger["metadata"]["query"]) == ["vllm:num_requests_waiting"]
    assert float(trigger["metadata"]["threshold"]) > 0


def test_replicas_do_not_come_and_go():
    """What waits to take one away is the HPA; `cooldownPeriod` is for the last one alone."""
    spec = OBJECT["spec"]
    assert spec["minReplicaCount"] >= 1 and "cooldownPeriod" not in spec
    behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert behavior["scaleDown"]["stabilizationWindowSeconds"] >= 60
