# SPDX-License-Identifier: Apache-2.0
"""Schedulers are changed in an engine's own process, where an executor may have no worker."""

import json
import os
import pickle
import subprocess
import sys

import pytest
from vllm_patches import unpatched

#: What vLLM's EngineCoreProc does with the configuration that its parent sent, as far as it goes
#: before it makes an executor and a scheduler.
ENGINE = """
import pickle, sys
from vllm import SamplingParams
from vllm.v1.request import Request
from vllm_patches import unpatched

config = pickle.load(sys.stdin.buffer)

def salt_of_a_step():
    scheduler = unpatched.make_scheduler(config, num_blocks=8)
    scheduler.add_request(Request("a", [1, 2], SamplingParams(), None, cache_salt="pepper"))
    (sent,) = scheduler.schedule().scheduled_new_reqs
    return vars(sent).get("cache_salt")

print("SALTS", salt_of_a_step(), end=" ")
config.__post_init__()
print(salt_of_a_step(), "vllm_metal.worker.worker" in sys.modules)
"""


@pytest.mark.slow
def test_a_scheduler_is_changed_without_a_worker_in_its_process(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(unpatched.MODEL))
    config = unpatched.folder_config(str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", ENGINE],
        input=pickle.dumps(config),
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().splitlines()[-1] == "SALTS None pepper False"
