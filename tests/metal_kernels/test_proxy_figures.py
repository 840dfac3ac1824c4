# SPDX-License-Identifier: Apache-2.0
"""The command that prints one kernel's costs: arguments, other sources, errors."""

import re
from pathlib import Path

import mlx.core as mx
import pytest

import metal_kernels
from tests.metal_kernels import proxy_figures

WRITE = Path(metal_kernels.__file__).parent / "kv_write" / "kv_write.metal"
OF_CODES = ["kv_write", "C=uint8", "KEY_SIZE=128", "DIMS=0"]


def printed(capsys, *arguments):
    proxy_figures.main([*OF_CODES, *arguments])
    return capsys.readouterr().out


def test_arguments_are_flags_numbers_and_dtypes():
    found = proxy_figures.arguments(["PARTIAL=false", "D=128", "C=uint8"])
    assert found == {"PARTIAL": False, "D": 128, "C": mx.uint8}
    assert found["PARTIAL"] is False


def test_it_prints_the_calls_that_are_selected(capsys):
    out = printed(capsys)
    (line,) = re.findall("^kv_write of .*", out, re.MULTILINE)
    assert line.startswith("kv_write of 256 threads: T=bfloat16, C=uint8, KEY_SIZE=128, ")
    assert re.search(r"registers: \d+ in the loop, \d+ in all; scratch: 0 bytes", out)
    assert re.search(r"slots a round, a simd_sum at 4 / 10.5: \d", out)


@pytest.mark.more
def test_it_takes_another_text_and_other_arguments(capsys, tmp_path):
    before = printed(capsys)
    file = tmp_path / "new.metal"
    file.write_text(WRITE.read_text().replace("thread_position_in_grid.y;", "MORE * (lane + 1);"))
    out = printed(
        capsys, "--file", str(file), "--set", "MORE=3", "--threads", "64", "--keys", "0.5"
    )
    assert "kv_write of 64 threads: " in out and "MORE=3" in out and "slots a key" in out
    slots = [float(re.search(r"10.5: ([\d.]+)", text)[1]) for text in (before, out)]
    assert slots[1] != slots[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["kv_write", "C=complex"], "complex: expected true, false, a number or a dtype of MLX's"),
        (["kv_write", "C"], "C: expected NAME=VALUE"),
        (["kv_write", "KEY_SIZE=1000"], "no server launches kv_write with KEY_SIZE=1000"),
    ],
)
def test_what_cannot_be_is_one_line(capsys, arguments, message):
    with pytest.raises(SystemExit):
        proxy_figures.main(arguments)
    assert message in capsys.readouterr().err
