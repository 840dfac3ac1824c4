# SPDX-License-Identifier: Apache-2.0
"""Results of the benchmark's runs, and its handling of the server."""

import dataclasses
import json
import statistics
import sys
from pathlib import Path

import _server
import prefix_repetition
import pytest
from _server import ServerError, counter, serve
from prefix_repetition import Figure, Run, gain, report, summarize

METRICS = """\
# HELP vllm:prefix_cache_queries_total Prompt tokens looked up.
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="a b {c}"} 1250.0
vllm:prefix_cache_queries_total{engine="1",model_name="a"} 7.68e+3
vllm:prefix_cache_queries_created{engine="0",model_name="a"} 1.7e+09
plain_total 3
"""


def a_run(throughput: float, ttft: float, hit_rate: float | None) -> Run:
    return Run(throughput, ttft, ttft, ttft, 10.0, 12.0, 900.0, hit_rate)


def test_counter_sums_over_labels_only() -> None:
    assert counter(METRICS, "vllm:prefix_cache_queries_total") == 1250 + 7680
    assert counter(METRICS, "plain_total") == 3
    assert counter(METRICS, "vllm:prefix_cache_hits_total") == 0


def test_run_reads_the_names_vllm_writes() -> None:
    result = {
        "output_throughput": 1.0,
        "mean_ttft_ms": 2.0,
        "p50_ttft_ms": 3.0,
        "p99_ttft_ms": 4.0,
        "p50_tpot_ms": 5.0,
        "p99_tpot_ms": 6.0,
        "p50_e2el_ms": 7.0,
    }
    assert dataclasses.astuple(Run.read(result, 200.0, 150.0)) == (1, 2, 3, 4, 5, 6, 7, 0.75)
    assert Run.read(result, 0.0, 0.0).hit_rate is None


def test_figure_is_median_and_sample_deviation() -> None:
    values = [3.0, 1.0, 8.0]
    figure = Figure.of(values)
    assert figure == Figure(3.0, statistics.stdev(values))
    assert Figure.of([5.0]) == Figure(5.0, None)
    assert Figure.of([None, None]) is None
    assert Figure(0.5, 0.012).text(scale=100, digits=1) == "50.0 ± 1.2"


@pytest.mark.more  # it draws
def test_gain_is_above_one_for_more_throughput_and_less_waiting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = summarize(
        {
            "off": [a_run(100.0, 600.0, None)],
            "cold": [a_run(120.0, 450.0, 0.7)],
            "warm": [a_run(150.0, 200.0, 0.975)],
        }
    )
    assert gain(summary, "throughput") == pytest.approx(1.5)
    assert gain(summary, "ttft_mean") == pytest.approx(3.0)
    report(summary, tmp_path, {"model": "m"})
    assert "97.5" in capsys.readouterr().out
    written = json.loads((tmp_path / "prefix_repetition.json").read_text())
    assert written["gain"] == {"throughput": 1.5, "ttft_mean": 3.0}
    assert written["summary"]["off"]["hit_rate"] is None
    assert (tmp_path / "prefix_repetition.png").stat().st_size > 0


def server_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str) -> None:
    """Makes `body` the server: sys.argv as of `vllm serve`, PORT and PIDS set."""
    head = (
        "import os, sys, subprocess, time, http.server\n"
        "PORT = int(sys.argv[sys.argv.index('--port') + 1])\n"
        f"PIDS = {str(tmp_path / 'pids')!r}\n"
    )
    script = tmp_path / "server.py"
    script.write_text(head + body)
    monkeypatch.setattr(_server, "VLLM", (sys.executable, str(script)))


HEALTHY = """
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open(PIDS, "w").write(f"{os.getpid()} {child.pid}")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
"""


def test_server_and_its_children_are_stopped_even_by_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server_script(monkeypatch, tmp_path, HEALTHY)
    with (
        pytest.raises(RuntimeError, match="from within"),
        serve("m", [], tmp_path / "log", timeout=300) as server,
    ):
        assert server.url.startswith("http://127.0.0.1:")
        raise RuntimeError("from within")
    for pid in (tmp_path / "pids").read_text().split():
        assert not running(int(pid))


def running(pid: int) -> bool:
    """Returns whether a process exists and is not a zombie."""
    import psutil

    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_server_that_exits_is_reported_with_the_end_of_its_log(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server_script(monkeypatch, tmp_path, "sys.exit('no such model')\n")
    with (
        pytest.raises(ServerError, match=r"exited with 1(.|\n)*no such model"),
        serve("m", [], tmp_path / "log", timeout=300),
    ):
        pass


def test_a_server_that_never_answers_is_given_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server_script(monkeypatch, tmp_path, "time.sleep(60)\n")
    with (
        pytest.raises(ServerError, match="did not answer within 1 s"),
        serve("m", [], tmp_path / "log", timeout=1),
    ):
        pass


def test_workload_is_the_published_one() -> None:
    words = prefix_repetition.Workload().arguments()
    options = dict(zip(words[::2], words[1::2], strict=True))
    assert options == {
        "--num-prompts": "50",
        "--prefix-repetition-prefix-len": "512",
        "--prefix-repetition-suffix-len": "128",
        "--prefix-repetition-num-prefixes": "1",
        "--prefix-repetition-output-len": "100",
    }
    assert prefix_repetition.Workload().max_model_len() >= 512 + 128 + 100
