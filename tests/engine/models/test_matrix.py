# SPDX-License-Identifier: Apache-2.0
"""docs/model-matrix.md matches the code for every module of mlx-lm."""

from pathlib import Path

import pytest
from engine.models import doubles, matrix
from engine.models.names import HELPERS, NAMES

PAGE = Path(__file__).parents[3] / "docs" / "model-matrix.md"
#: Minimum share of all modules.
LEAST = 0.95


def lines_of_modules():
    lines = PAGE.read_text().splitlines()
    cells = [line.split("|") for line in lines if line.startswith("| ")]
    return [line[1].strip() for line in cells if line[1].strip() not in (matrix.HEAD[0], "---")]


def test_every_module_of_mlx_lm_has_a_row_and_a_name():
    assert lines_of_modules() == matrix.modules()
    assert set(NAMES) == set(matrix.modules())
    assert not HELPERS & set(NAMES)


@pytest.mark.slow
def test_the_page_is_what_the_code_says(monkeypatch, capsys):
    doubles.install(monkeypatch)
    rows = [matrix.row(module) for module in matrix.modules()]
    without = [row for row in rows if matrix.reference(row.module) == "mlx-lm"]
    with capsys.disabled():
        for what, of_what in (("all", rows), ("judged by mlx-lm alone", without)):
            count = sum(not row.refused for row in of_what)
            print(f"\nserved ÷ modules, {what}: {count} ÷ {len(of_what)}", end="")
            print(f" = {matrix.served(of_what):.1%}")
    page = PAGE.read_text()
    assert all(str(row) in page for row in rows), "run `python -m engine.models.matrix` from tests/"
    assert matrix.served(rows) >= LEAST
