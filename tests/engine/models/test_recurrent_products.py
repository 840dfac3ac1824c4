# SPDX-License-Identifier: Apache-2.0
"""A step multiplies once by each weight of a recurrent layer.

A module that is called by runs of rows multiplies once a run instead: k + 1 times where a request
verifies k drafts, nine times in the mixture of `engine.models.products`, eleven times for 127 rows
of a prompt beside a request that decodes. One that takes its rows one by one multiplies once a row,
as mlx-lm's Mamba does.
`python -m engine.models.test_recurrent_products` in `tests/` prints what each does.
"""

import re

import mlx.core as mx
import pytest
from engine.models.cases import cases
from engine.models.products import counted, products

from vllm_metal.cli.fit.graph import record

pytestmark = pytest.mark.usefixtures("unfused")

#: The convolution tells the module from others of its layer.
_CONVOLUTION = re.compile(r"(.*\blayers\.\d+\.\w+)\..*conv\w*\.weight")
_NO_PROJECTION = re.compile(r"(norm|conv|conv1d)\.weight$")
FAMILIES = (
    "bailing_moe_v3",
    "falcon_h1",
    "granitemoehybrid",
    "jamba",
    "kimi_k3",
    "kimi_linear",
    "lfm2",
    "mamba",
    "mamba2",
    "nemotron_h",
    "olmo_hybrid",
    "plamo2",
    "qwen3_5",
    "qwen3_next",
)


def of_recurrent_layers(counts):
    """Selects the projections of recurrent modules."""
    modules = {found[1] for name in counts if (found := _CONVOLUTION.fullmatch(name))}
    names = {name for name in counts if any(name.startswith(f"{each}.") for each in modules)}
    return {
        name: counts[name]
        for name in sorted(names)
        if name.endswith(".weight") and not _NO_PROJECTION.search(name)
    }


@pytest.mark.parametrize(
    "model_type", cases(FAMILIES, ["falcon_h1", "qwen3_next"], ["jamba", "kimi_linear", "lfm2"])
)
def test_each_projection_is_one_product_for_any_mixture_of_rows(model_type):
    found = of_recurrent_layers(counted(model_type))
    assert len(found) >= 2  # what goes in, and what comes out
    assert found == dict.fromkeys(found, 1)


def test_products_are_counted_by_what_they_multiply_with():
    def build(once, twice, never, x):
        return [x @ once.T + never, x @ twice.T, (x + 1) @ twice.astype(mx.float16).T]

    arrays = [mx.ones((4, 4))] * 4
    names = ("once", "twice", "never")
    assert products(record(build, arrays), names) == {"once": 1, "twice": 2, "never": 0}


if __name__ == "__main__":
    for family in FAMILIES:
        for projection, count in of_recurrent_layers(counted(family)).items():
            print(f"{count:4} {family}: {projection}")
