# SPDX-License-Identifier: Apache-2.0
"""Methods that vLLM has given up are refused by name, all others reach it."""

from typing import Literal

import pytest
from vllm.config import speculative
from vllm.engine.arg_utils import EngineArgs

from vllm_metal.spec_decode.registry import SPECULATIVE_METHODS
from vllm_metal.vllm_patches.speculation import refuse_missing_methods


@pytest.fixture
def create(monkeypatch, tmp_path):
    """create_speculative_config over one that returns what it was given, restored afterwards."""
    monkeypatch.setattr(
        EngineArgs, "create_speculative_config", lambda self, model, parallel: (model, parallel)
    )
    return lambda **options: EngineArgs(model=str(tmp_path), **options).create_speculative_config(
        "model", "parallel"
    )


def test_the_tested_vllm_knows_them_all(create):
    untouched = EngineArgs.create_speculative_config
    refuse_missing_methods(SPECULATIVE_METHODS)
    assert EngineArgs.create_speculative_config is untouched


@pytest.mark.parametrize(
    "options",
    [
        {"speculative_config": {"method": "medusa", "num_speculative_tokens": 2}},
        {"spec_method": "medusa"},
    ],
)
def test_a_method_that_is_gone_is_refused_by_name(monkeypatch, create, options):
    left = tuple(method for method in SPECULATIVE_METHODS if method != "medusa")
    monkeypatch.setattr(speculative, "SpeculativeMethod", Literal[left])
    for _ in range(2):  # once is enough
        refuse_missing_methods(SPECULATIVE_METHODS)
    with pytest.raises(ValueError, match=r"'medusa' is not known to vLLM .* choose one of ngram,"):
        create(**options)
    assert create(spec_method="eagle") == ("model", "parallel")
    assert create() == ("model", "parallel")
