# SPDX-License-Identifier: Apache-2.0
"""Modules that have no class of transformers': paged equals mlx-lm's dense forward, chunk by chunk.

Every module of mlx-lm's is accounted for: served, refused with the reason, or no language model.
"""

import mlx.core as mx
import numpy as np
import pytest
from engine.models import doubles, plain
from engine.models.cases import cases
from engine.models.recurrent import VOCAB, config_of, make_model
from engine.models.test_executor import chunk_by_chunk, of_states
from mlx_lm.models.cache import make_prompt_cache
from patches.mlx_patches.test_registry import own_classes

from vllm_metal.patches.mlx_patches import registry

pytestmark = pytest.mark.usefixtures("unfused")

FAMILIES = plain.all_families()
#: Bounds for modules that compute partly in 16 bits, in any dtype of the model.
ROUNDED = {"muse_spark": 0.3, "prism_hadamard_qwen35": 2e-3}
TOLERANCE = 3e-4  # of logits up to 20 in float32
#: Modules that are patched.
QUICK = ("plamo", "iquestloopcoder", "afm7")
MORE = ("llama4", "plamo3")


def prompts_of(lengths=(70, 33, 1, 48)):
    rng = np.random.default_rng(3)
    return [rng.integers(3, VOCAB, n).tolist() for n in lengths]


def dense(model, prompts):
    """Returns logits of whole texts, without a cache."""
    return [np.array(model(mx.array([p]))[0].astype(mx.float32)) for p in prompts]


@pytest.mark.parametrize("name", cases(FAMILIES, QUICK, MORE))
def test_chunks_of_a_mixed_batch_equal_the_dense_forward(name, monkeypatch):
    doubles.install(monkeypatch)
    model, prompts = make_model(FAMILIES[name], seed=7, drawn=True), prompts_of()
    expected = [
        np.array(model(mx.array([p]), cache=make_prompt_cache(model))[0].astype(mx.float32))
        for p in prompts
    ]
    assert len(set(np.concatenate(expected).argmax(-1).tolist())) > 8, "texts do not vary"
    blocks = np.random.default_rng(5).permutation(np.arange(1, 40))
    parts = chunk_by_chunk(model, name, prompts, blocks, of_states)
    found = [np.concatenate([np.array(part, np.float32) for part in one]) for one in parts]
    worst = max(np.abs(one - other).max() for one, other in zip(found, expected, strict=True))
    assert worst <= ROUNDED.get(name, TOLERANCE)


PATCHED = [*registry.PAGED]


@pytest.mark.parametrize("name", cases(PATCHED, more=["plamo", "baichuan_m1"]))
def test_a_patched_module_computes_what_mlx_lms_own_does(name):
    """Delete the patch once mlx-lm's own module is served rightly."""
    family = plain.with_those_of_states()[name]
    model, prompts = make_model(family, seed=7, drawn=True), prompts_of()
    own_model, args = own_classes(name)
    own = own_model(args.from_dict(config_of(family)))
    own.update(model.parameters(), strict=False)
    own.eval()
    expected = dense(own, prompts)
    for one, other in zip(dense(model, prompts), expected, strict=True):
        np.testing.assert_allclose(one, other, atol=TOLERANCE)
    blocks = np.random.default_rng(5).permutation(np.arange(1, 40))
    try:
        parts = chunk_by_chunk(own, name, prompts, blocks, of_states)
    except NotImplementedError:
        return
    found = [np.concatenate([np.array(part, np.float32) for part in one]) for one in parts]
    assert max(np.abs(a - b).max() for a, b in zip(found, expected, strict=True)) > 0.1
