# SPDX-License-Identifier: Apache-2.0
"""The tested vLLM release, in all places, and handling of others."""

import logging
import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from vllm_metal.engine.models.embedded import embedded_model_path
from vllm_metal.patches.vllm_patches import releases

ROOT = Path(__file__).parents[3]
VARIABLES = {"VLLM_METAL_ALLOW_UNTESTED": "0", "VLLM_LOGGING_LEVEL": "INFO"}
#: Builds what engines are made from, as `LLM` and `vllm serve` do, and does so twice.
CONFIGURE = """
import sys
from vllm import EngineArgs
for _ in range(2):
    EngineArgs(sys.argv[1], max_model_len=64).create_engine_config()
"""


def test_the_installed_vllm_is_the_tested_one():
    assert releases.installed_vllm() is not None
    releases.require_tested_vllm()


@pytest.mark.parametrize("found", ["0.32.0", "0.34.0", "0.330.1", None])
def test_another_release_is_refused_in_one_line(monkeypatch, found):
    def version(package):
        if found is None:
            raise PackageNotFoundError(package)
        return found

    monkeypatch.delenv("VLLM_METAL_ALLOW_UNTESTED", raising=False)
    monkeypatch.setattr(releases, "version", version)
    with pytest.raises(releases.UntestedVersionError) as refusal:
        releases.require_tested_vllm()
    message = str(refusal.value)
    assert "\n" not in message and f"vLLM {releases.TESTED_VLLM}" in message
    assert (found or "no vLLM") in message


def test_no_vllm_at_all_is_refused_whatever_is_allowed(monkeypatch):
    monkeypatch.setenv("VLLM_METAL_ALLOW_UNTESTED", "1")
    monkeypatch.setattr(releases, "installed_vllm", lambda: None)
    with pytest.raises(releases.UntestedVersionError, match="no vLLM is installed"):
        releases.require_tested_vllm()


def another_vllm(folder, *command, **environment):
    """Runs Python with an installed vLLM that reports 0.99.0."""
    metadata = folder / "vllm-0.99.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.99.0\n")
    path = os.pathsep.join([str(folder), str(ROOT)])
    return subprocess.run(
        [sys.executable, *command],
        env=os.environ | VARIABLES | {"PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(("-c", "from vllm import LLM; LLM('model')"), marks=pytest.mark.slow),
        pytest.param(("-m", "vllm.entrypoints.cli.main", "serve", "model"), marks=pytest.mark.more),
    ],
    ids=["LLM", "serve"],
)
def test_the_refusal_is_the_one_line_that_a_user_sees(tmp_path, command):
    done = another_vllm(tmp_path, *command)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.splitlines() == [
        f"vllm-metal is tested with vLLM {releases.TESTED_VLLM}.x, but vLLM 0.99.0 is installed: "
        f"install vLLM {releases.TESTED_VLLM}, or the vllm-metal release made for yours; or try it "
        "with VLLM_METAL_ALLOW_UNTESTED=1"
    ]


def test_an_allowed_one_is_told_once(monkeypatch):
    monkeypatch.setattr(releases, "installed_vllm", lambda: "0.99.0")
    logger, handler, told = logging.getLogger(releases.__name__), logging.Handler(), []
    monkeypatch.setattr(handler, "emit", lambda record: told.append(record.getMessage()))
    monkeypatch.setattr(logger, "level", logging.WARNING)  # commands have vLLM say less
    releases.warn_if_untested.cache_clear()
    logger.addHandler(handler)
    try:
        for _ in range(2):
            releases.warn_if_untested()
    finally:
        logger.removeHandler(handler)
        releases.warn_if_untested.cache_clear()
    (warning,) = told
    assert "vLLM 0.99.0 is used" in warning


@pytest.mark.slow
def test_an_allowed_one_gets_one_warning(tmp_path):
    model = str(embedded_model_path(dequantize=True))
    done = another_vllm(tmp_path, "-c", CONFIGURE, model, VLLM_METAL_ALLOW_UNTESTED="1")
    assert done.returncode == 0, done.stderr
    (warning,) = (
        line for line in (done.stdout + done.stderr).splitlines() if "tested with" in line
    )
    assert "WARNING" in warning and "vLLM 0.99.0 is used" in warning


def test_set_up_installs_the_tested_release():
    pinned = re.search(r"^vllm==(\S+)", (ROOT / "requirements" / "vllm.txt").read_text(), re.M)
    assert releases.is_tested(pinned[1])
