# SPDX-License-Identifier: Apache-2.0
"""Log files may be renamed under a running server without a signal or losses."""

import json
import re
import shutil
import subprocess
import sys

import pytest
from deploy.queries import DEPLOY, write_logging

FOLDER = DEPLOY / "logs"
LOGROTATE = shutil.which("logrotate") or shutil.which("logrotate", path="/usr/sbin")
#: Configures logging as vLLM does, logs each line of its input by vLLM's name, the plugin's and the
#: web server's, and says that it has. That a server does all this, test_prometheus.py shows.
WRITER = """
import json, logging.config, sys
from vllm_metal.patches.vllm_patches import logs, partial_imports
partial_imports.plan_only()  # the formatter is vLLM's, and needs nothing else of it
import vllm.logging_utils
logging.config.dictConfig(json.load(open(sys.argv[1])))
logs.show_our_messages()
loggers = [logging.getLogger(name) for name in ("vllm.a", "vllm_metal.b", "uvicorn.access")]
for line in sys.stdin:
    for logger in loggers:
        logger.info(line.strip())
    print("done", flush=True)
"""


class Writer:
    """A process that logs with the shipped configuration into a folder."""

    def __init__(self, folder):
        self.log = folder / "server.log"
        self._process = subprocess.Popen(
            [sys.executable, "-c", WRITER, write_logging(folder, self.log)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def write(self, line):
        print(line, file=self._process.stdin, flush=True)
        assert self._process.stdout.readline() == "done\n"

    def end(self):
        self._process.communicate()
        assert self._process.returncode == 0


@pytest.fixture
def writer(tmp_path):
    running = Writer(tmp_path)
    yield running
    running.end()


def written(file):
    """Returns the lines by writer."""
    return re.findall(r"\[([\w.]+):\d+\] (.*)", file.read_text())


def lines(text):
    return [(name, text) for name in ("vllm.a", "vllm_metal.b", "uvicorn.access")]


@pytest.mark.skipif(
    LOGROTATE is None, reason="logrotate is not installed (Debian: apt-get install logrotate)"
)
def test_logrotate(writer, tmp_path):
    text = (FOLDER / "logrotate.conf").read_text()
    assert text.count("/var/log/vllm-metal/server.log") == 1
    config = tmp_path / "logrotate.conf"
    config.write_text(text.replace("/var/log/vllm-metal/server.log", str(writer.log)))
    config.chmod(0o644)
    for number in range(3):
        writer.write(f"before {number}")
        done = subprocess.run(
            [LOGROTATE, "--force", "--state", tmp_path / "state", config],
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stderr) == (0, "")
    writer.write("after")
    assert written(writer.log) == lines("after")
    assert written(tmp_path / "server.log.1") == lines("before 2")
    assert (tmp_path / "server.log.2.gz").exists() and (tmp_path / "server.log.3.gz").exists()


def test_newsyslog(writer):
    """As newsyslog.conf(5) states, it renames the file and creates an empty one."""
    writer.write("before")
    old = writer.log.rename(writer.log.with_name("server.log.0"))
    writer.log.touch(0o640)
    writer.write("after")
    assert (written(old), written(writer.log)) == (lines("before"), lines("after"))


def test_the_line_for_newsyslog():
    """Its fields follow newsyslog.conf(5) of macOS."""
    (line,) = [
        line
        for line in (FOLDER / "newsyslog.conf").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    name, owner, mode, count, size, when, flags = line.split()
    filename = json.loads((FOLDER / "logging.json").read_text())["handlers"]["file"]["filename"]
    assert name == filename
    assert re.fullmatch(r"\w+:\w+", owner) and re.fullmatch(r"[0-6]{3}", mode)
    assert count.isdigit() and size.isdigit()
    assert re.fullmatch(r"\$D([01]?\d|2[0-3])", when)
    assert set(flags) <= set("BCGJNUWZ") and "N" in flags  # there is no pid file to read
