# SPDX-License-Identifier: Apache-2.0
"""Every family with recurrent state or latents has a small model."""

from engine.models import page


def test_every_module_of_mlx_lm_with_such_layers_is_listed():
    listed = {family.module for family in page.families().values()} | set(page.further.REFUSED)
    for module in page.modules_with_states_or_latents():
        assert module in listed
