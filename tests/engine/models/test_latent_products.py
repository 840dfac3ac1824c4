# SPDX-License-Identifier: Apache-2.0
"""A step multiplies by each latent projection once, with all of its rows.

mlx-lm multiplies each row of length 1 by itself, a product of a matrix and a vector for every head.
"""

from dataclasses import replace

import mlx.nn as nn
import pytest
from engine.models.latent import FAMILIES
from engine.models.products import MIXTURE, recorded, rows_of_products
from engine.models.recurrent import make_model

PROJECTIONS = ("embed_q", "unembed_out")
WIDE = {"qk_nope_head_dim": 32}  # so that rows of the matrices can be quantized


def model_of(name, quantized):
    family = FAMILIES[name]
    model = make_model(replace(family, config=family.config | WIDE), seed=7)
    if quantized:
        nn.quantize(model, 32, 4, class_predicate=lambda path, _: path.endswith(PROJECTIONS))
    return model


@pytest.mark.parametrize(
    ("name", "quantized"),
    [
        ("deepseek_v3", True),
        pytest.param("kimi_linear", False, marks=pytest.mark.more),
        *(
            pytest.param(name, quantized, marks=pytest.mark.slow)
            for name, quantized in (
                *(("deepseek_v3", False), ("kimi_linear", True)),
                *(("glm4_moe_lite", False), ("glm4_moe_lite", True)),
            )
        ),
    ],
)
def test_no_projection_of_latents_multiplies_with_a_vector(name, quantized):
    found = rows_of_products(*recorded(model_of(name, quantized), name))
    num_rows = sum(certain + drafts for _, certain, drafts in MIXTURE)
    projections = [key for key in found if key.removesuffix(".weight").endswith(PROJECTIONS)]
    assert len(projections) == 2 * (1 if name == "kimi_linear" else 3)
    assert [found[key] for key in projections] == [[num_rows]] * len(projections)


@pytest.mark.parametrize(
    "quantized",
    [pytest.param(False, id="plain"), pytest.param(True, id="quantized", marks=pytest.mark.more)],
)
def test_keys_and_values_of_a_prompt_are_built_by_one_product_each(quantized):
    """Of its whole context, beside the rows of all requests that attend to latents.

    They are built by matrices as values, which a graph does not show as read from quantized ones.
    """
    mixture = (*MIXTURE[1:], (7, 110, 0))
    found = rows_of_products(*recorded(model_of("deepseek_v3", quantized), "deepseek_v3", mixture))
    num_others = sum(certain + drafts for _, certain, drafts in MIXTURE[1:])
    projections = [key for key in found if key.removesuffix(".weight").endswith(PROJECTIONS)]
    assert len(projections) == 2 * 3
    for key in projections:
        assert sorted(found[key]) == ([num_others] if quantized else [num_others, 117]), key
