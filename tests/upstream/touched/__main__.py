# SPDX-License-Identifier: Apache-2.0
"""Writes vllm_metal/vllm_patches/touched.json: every name of vLLM's that our sources use.

    PYTHONPATH=tests .venv/bin/python -m upstream.touched

The names come from the syntax of our sources; parameters, and the types that lead from one name to
the next, from the installed vLLM, which must be the tested one. `vllm_patches.probe` compares any
vLLM with the file; tests/vllm_patches/test_touched.py fails while it is not up to date.
"""

import os

# As the tests have it: on Linux, too, vLLM's platform is this plugin's.
os.environ.setdefault("VLLM_METAL_DEVICE", "cpu")

from upstream.touched.make import make

from vllm_metal.vllm_patches import probe, releases

if __name__ == "__main__":
    assert releases.is_tested(releases.installed_vllm()), f"install vLLM {releases.TESTED_VLLM}"
    probe.FILE.write_text(make())
