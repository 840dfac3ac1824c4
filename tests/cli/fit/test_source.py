# SPDX-License-Identifier: Apache-2.0
"""Locations of a model: a folder, the hub's cache, the hub, or none."""

import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import ClassVar

import pytest

from vllm_metal.cli.fit import source
from vllm_metal.identity.model_files import ModelLoadError

#: Fetches models as `vllm-metal fit` does, and prints by name what came of each: the files, and
#: how the weights begin, or the error. The last one is asked for without a network.
_FETCH = """
import json, sys
from vllm_metal.patches.vllm_patches import partial_imports
partial_imports.plan_only()
import huggingface_hub
from vllm_metal.cli.fit import source

def fetched(model):
    try:
        with source.folder(model) as path:
            files = [
                (file.name, file.stat().st_size, file.stat().st_blocks * 512)
                for file in sorted(path.iterdir())
            ]
            return {"files": files, "begin": (path / "model.safetensors").read_bytes()[:8].hex()}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}

*online, offline = sys.argv[1:]
found = {model: fetched(model) for model in online}
huggingface_hub.constants.HF_HUB_OFFLINE = True
found[offline] = fetched(offline)
print(json.dumps(found))
"""


class Hub(http.server.BaseHTTPRequestHandler):
    """A hub with the models in `root`; counts the bytes it sends."""

    root: Path
    asked: set[str]
    given = 0

    def do_HEAD(self):
        self.answer(send=False)

    def do_GET(self):
        self.answer(send=True)

    def answer(self, send):
        self.asked.add(self.path)
        found = re.fullmatch(r"/org/(?:tiny|offline)/resolve/main/([\w.-]+)", self.path)
        path = self.root / found[1] if found else None
        if path is None or not path.is_file():
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound" if found else "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        content, status = path.read_bytes(), 200
        if asked := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or ""):
            content, status = content[int(asked[1]) : int(asked[2]) + 1], 206
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{path.name}"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.end_headers()
        if send:
            self.wfile.write(content)
            type(self).given += len(content)

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def hub(folder):
    class OfTest(Hub):
        root = folder("llama")
        asked: ClassVar[set[str]] = set()

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), OfTest)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    OfTest.url = f"http://127.0.0.1:{server.server_port}"
    yield OfTest
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def fetched(hub, tmp_path_factory):
    """Results of three models, requested by one process."""
    environment = {
        "HF_ENDPOINT": hub.url,
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(tmp_path_factory.mktemp("home")),
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "127.0.0.1",
    }
    done = subprocess.run(
        [sys.executable, "-c", _FETCH, "org/tiny", "org/none", "org/offline"],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_of_a_model_on_the_hub_only_config_and_headers_are_fetched(hub, fetched):
    found = fetched["org/tiny"]
    config, weights = found["files"]
    assert config[0] == "config.json"
    there = hub.root / "model.safetensors"
    assert weights[0] == there.name
    # The header may be written with other blanks.
    assert weights[1] == pytest.approx(there.stat().st_size, abs=2000)
    assert weights[2] < 64 * 1024 < weights[1]  # a hole takes no room on disk
    assert int.from_bytes(bytes.fromhex(found["begin"]), "little") < 64 * 1024
    assert hub.given < there.stat().st_size / 4


def test_a_name_that_the_hub_does_not_know_is_an_error(fetched):
    error = fetched["org/none"]["error"]
    assert "there is no folder 'org/none', and Hugging Face does not provide this model" in error


def test_without_a_network_the_error_says_what_to_do(hub, fetched):
    error = fetched["org/offline"]["error"]
    assert "org/offline is not on this machine, and HF_HUB_OFFLINE is set" in error
    assert not any("offline" in path for path in hub.asked)


def test_what_the_hubs_cache_holds_whole_is_used(tmp_path, folder, monkeypatch):
    snapshot = tmp_path / "models--org--tiny" / "snapshots" / ("0" * 40)
    shutil.copytree(folder("llama"), snapshot)
    (tmp_path / "models--org--tiny" / "refs").mkdir()
    (tmp_path / "models--org--tiny" / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with source.folder("org/tiny") as path:
        assert path == snapshot
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="org/tiny"), source.folder("org/tiny"):
        pass


def test_a_gguf_file_that_is_not_there_is_named():
    with (
        pytest.raises(ModelLoadError, match=r"a/b\.gguf does not exist"),
        source.folder("a/b.gguf"),
    ):
        pass


def test_a_folder_without_a_model_is_named(tmp_path):
    (tmp_path / "notes.txt").write_text(json.dumps("nothing"))
    with (
        pytest.raises(ModelLoadError, match=r"has no config\.json"),
        source.folder(str(tmp_path)),
    ):
        pass
