# SPDX-License-Identifier: Apache-2.0
"""The `vllm-metal` command as a user types it."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import gguf
import numpy as np
import pytest

from vllm_metal.cli import options
from vllm_metal.cli.main import main
from vllm_metal.device import openmp


def write_model(path: Path, rows: int = 64) -> Path:
    """Writes a llama without layers: the smallest convertible file, with sparse weights."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(0)
    writer.add_context_length(16)
    writer.add_embedding_length(256)
    writer.add_feed_forward_length(256)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["a", "b", "ab"])
    writer.add_token_merges(["a b"])
    weights = {"token_embd.weight": ((rows, 256), 2), "output_norm.weight": ((256,), 4)}
    for name, (shape, width) in weights.items():
        dtype = np.dtype(f"float{8 * width}")
        writer.add_tensor_info(name, shape, dtype, width * math.prod(shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    begin = writer.ggml_pad(path.stat().st_size, writer.data_alignment)
    os.truncate(path, begin + sum(width * math.prod(shape) for shape, width in weights.values()))
    return path


def test_convert_prints_the_directory_it_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_model(tmp_path / "m.gguf")
    out = tmp_path / "out"
    assert main(["convert", str(path), str(out), "--dtype", "bfloat16"]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{out}\n"
    weights = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    closing = f"{weights / 1e9:.2f} GB, without a chat template. To serve it: vllm serve {out}"
    assert printed.err.splitlines()[-1] == closing
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


def test_convert_copies_a_tokenizer_that_is_named(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf")
    other = tmp_path / "other"
    other.mkdir()
    command = ["convert", str(path), str(tmp_path / "out"), "--tokenizer", str(other)]
    assert main(command) == 1  # nothing in it yet
    (other / "tokenizer.json").write_text('{"mine": 1}')
    assert main(command) == 0
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"mine": 1}'


def test_an_error_is_one_line_and_a_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(tmp_path / "absent.gguf"), str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert error == f"vllm-metal: error: {tmp_path}/absent.gguf: no such file\n"
    path = write_model(tmp_path / "m.gguf")
    assert main(["convert", str(path), str(tmp_path)]) == 1
    assert "--force" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("fit m --jsn", "unknown: --jsn; did you mean --json?"),
        ("chat m --quick", "unknown: --quick"),  # which is an option of `doctor`
        ("fit m model", "unknown: model"),
        ("launch", "client is missing: choose one of claude, codex, opencode, pi"),
    ],
)
def test_what_a_command_does_not_take_is_named(
    line: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(line.split())
    assert caught.value.code == 1
    assert capsys.readouterr().err == f"vllm-metal: error: {told}\n"


def test_a_pool_beyond_this_machine_is_refused_as_it_was_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["chat", "--kv-cache-gib", "900000"]) == 1
    assert "--kv-cache-gib=900000 is more than the memory of this" in capsys.readouterr().err


def test_an_interrupt_before_a_command_begins_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(options, "parser", interrupted)
    assert main(["fit", "m"]) == 130
    assert capsys.readouterr().err == "vllm-metal: interrupted; nothing was left behind\n"


def test_an_unknown_setting_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["convert", "a", "b", "--dtype", "int8"])
    assert caught.value.code == 1
    assert capsys.readouterr().err == (
        "vllm-metal: error: --dtype=int8 is not supported: choose one of float16, bfloat16, "
        "float32\n"
    )


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_an_interrupted_conversion_leaves_nothing(tmp_path: Path, sent: signal.Signals) -> None:
    path = write_model(tmp_path / "m.gguf", rows=4_000_000)  # 4 GB as float32: not in a moment
    results = tmp_path / "results"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "vllm_metal.cli.main"),
            *("convert", path, results / "out", "--dtype", "float32"),
        ],
        cwd=Path(__file__).parents[2],
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 300
    while not list(results.glob(".out.*/model.safetensors")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(sent)
    process.communicate(timeout=300)
    assert process.returncode == 128 + sent
    assert not list(results.iterdir())


def test_children_find_settings_of_openmp(monkeypatch, tmp_path):
    for name in openmp.SETTINGS:
        monkeypatch.delenv(name, raising=False)
    main(["tenants", "list", "--keys", str(tmp_path / "none.json")])  # which loads no MLX
    assert {name: os.environ[name] for name in openmp.SETTINGS} == openmp.SETTINGS
