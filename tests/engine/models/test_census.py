# SPDX-License-Identifier: Apache-2.0
"""Every folder of mlx-vlm is classified once."""

import pytest
from engine.models import matrix
from engine.models.census import folders, of_mlx_vlm_alone
from engine.models.folders import NOT_TEXT, SAME_TEXT, SAME_TEXT_OF_MLX_LM, WITHOUT_ROW

from vllm_metal.patches.mlx_patches import registry
from vllm_metal.settings.mlx_vlm_models import MLX_VLM_MODELS


def test_every_folder_of_mlx_vlm_is_accounted_for_once():
    served = {row.folder for row in MLX_VLM_MODELS.values()}
    known = {*NOT_TEXT, *SAME_TEXT, *WITHOUT_ROW, *served, *matrix.modules()}
    assert set(folders()) <= known
    assert not set(NOT_TEXT) & {*SAME_TEXT, *WITHOUT_ROW, *served}
    assert not set(WITHOUT_ROW) & {*SAME_TEXT, *served}
    assert set(of_mlx_vlm_alone()) == {*WITHOUT_ROW, *(served - set(SAME_TEXT))}


def test_the_same_text_model_is_counted_once():
    modules = {*matrix.modules(), *of_mlx_vlm_alone()}
    assert set(SAME_TEXT.values()) <= modules
    assert set(SAME_TEXT_OF_MLX_LM.values()) <= set(matrix.modules()) - set(SAME_TEXT_OF_MLX_LM)


@pytest.mark.parametrize("folder", WITHOUT_ROW)
def test_a_text_model_without_a_row_is_rejected(folder):
    reason = registry.missing({"model_type": folder})
    assert (
        reason
        == "no family that is served has it. Choose a checkpoint of a family in docs/models.md"
    )
