# SPDX-License-Identifier: Apache-2.0
"""The table of docs/models.md is what is read off the models."""

from pathlib import Path

import pytest
from models import page

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


@pytest.mark.more
def test_the_page_lists_every_family_with_what_is_kept():
    expected = "\n".join(page.table())
    assert expected in PAGE.read_text(), f"docs/models.md needs:\n{expected}"


def test_every_module_of_mlx_lm_with_such_layers_is_listed():
    listed = {family.module for family in page.families().values()} | set(page.further.REFUSED)
    for module in page.modules_with_states_or_latents():
        assert module in listed
