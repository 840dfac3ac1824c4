# SPDX-License-Identifier: Apache-2.0
"""A patched module computes what transformers' class does, and mlx-lm's own does not."""

import functools
import importlib
import importlib.util
import json
import sys
from pathlib import Path

import mlx.core as mx
import mlx_lm.models
import numpy as np
import pytest
from engine.models.cases import cases
from engine.models.published import FAMILIES, VOCAB, log_probabilities, make, write
from engine.models.test_executor import chunk_by_chunk, of_states
from mlx_lm.utils import load_config, load_model

from vllm_metal.engine.config_json import published_config
from vllm_metal.engine.models.loader import lazy_model
from vllm_metal.identity.model_files import ModelLoadError
from vllm_metal.patches.mlx_patches import registry, replacing

pytestmark = pytest.mark.usefixtures("unfused")

#: Maps mlx-lm's module to the small model that shows the difference; LFM2-VL: tests/engine/vision,
#: Mistral 3 and Pixtral: tests/engine/models/nested.py.
NOT_HERE = ("lfm2-vl", "rope_utils", "mistral3", "pixtral")
SHOWN = {module: module for module in registry.PATCHES if module not in NOT_HERE}
SHOWN |= {module: text for text, module in registry.TEXT_MODELS.items()}
SHOWN["llama"] = "mistral"
TOLERANCE = 1e-3  # of log-probabilities in float32


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Folder, prompts, and transformers' log-probabilities by module."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, VOCAB, n).tolist() for n in (50, 33, 1, 40)]

    @functools.cache
    def of(module):
        folder = tmp_path_factory.mktemp("published") / module
        model = make(FAMILIES[SHOWN[module]])
        write(model, folder)
        return folder, prompts, log_probabilities(model, prompts)

    return of


def normalized(logits):
    logits = np.array(logits, np.float32)
    largest = logits.max(-1, keepdims=True)
    return logits - largest - np.log(np.exp(logits - largest).sum(-1, keepdims=True))


def farthest(found, expected):
    return max(
        np.abs(normalized(one) - other).max() for one, other in zip(found, expected, strict=True)
    )


#: Families whose patch is more than another name, activation or choice of experts.
QUICK = (
    *("cohere2", "falcon_h1", "gemma2", "gpt_oss", "jamba", "kimi_linear", "llama", "llama4_text"),
    *("nanochat", "recurrent_gemma"),
)


@pytest.mark.parametrize("module", cases(SHOWN, QUICK, {*SHOWN} - {*QUICK}))
def test_dense_and_paged_forward_equal_transformers(published, module):
    folder, prompts, expected = published(module)
    assert len(set(np.concatenate(expected).argmax(-1).tolist())) > 8
    model = lazy_model(folder, mx.float32)
    dense = [model(mx.array([prompt]))[0] for prompt in prompts]
    assert farthest(dense, expected) <= TOLERANCE
    blocks = np.random.default_rng(5).permutation(np.arange(1, 40))
    paged = chunk_by_chunk(model, module, prompts, blocks, of_states)
    assert farthest([np.concatenate(parts) for parts in paged], expected) <= TOLERANCE


def own_model(folder, module):
    """Loads mlx-lm's unpatched model of a folder, with config.json keys as it reads them."""
    config = load_config(folder)
    _, args = registry.classes(config)  # mlx-lm's own would leave keys unread
    spelled = published_config.as_read(config, module, args)
    model, _ = load_model(
        folder, model_config=spelled, get_model_classes=lambda config: own_classes(module)
    )
    return model


def own_classes(module):
    """Returns mlx-lm's unpatched classes, from another copy of the module."""
    path = Path(mlx_lm.models.__path__[0]) / f"{module}.py"
    spec = importlib.util.spec_from_file_location(f"mlx_lm.models._own_{module}", path)
    copy = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = copy
    try:
        spec.loader.exec_module(copy)
    finally:
        del sys.modules[spec.name]
    return copy.Model, copy.ModelArgs


#: Compared otherwise, and one whose small model chooses no expert of a group that was left out.
OTHERWISE = ("recurrent_gemma", "nemotron_h")


@pytest.mark.slow
@pytest.mark.parametrize("module", [name for name in SHOWN if name not in OTHERWISE])
def test_mlx_lm_needs_the_patch(published, module):
    """Delete the patch once this fails."""
    folder, prompts, expected = published(module)
    try:
        model = own_model(folder, module)
        found = [model(mx.array([prompt]))[0] for prompt in prompts]
    except (ValueError, IndexError, TypeError, SystemExit):
        return  # it cannot read, or not run, what transformers wrote
    assert farthest(found, expected) > TOLERANCE


@pytest.mark.slow
def test_mlx_lm_knows_the_first_token_of_recurrent_gemma_by_an_empty_cache(published):
    """Delete the patch once this fails: states of zeros say the same."""
    folder, prompts, _ = published("recurrent_gemma")
    model = own_model(folder, "recurrent_gemma")
    prompt = mx.array([prompts[0]])
    empty, zeros = model.make_cache(), model.make_cache()
    found = model(prompt, cache=empty)[0]
    for cache, filled in zip(zeros, empty, strict=True):
        if hasattr(cache, "cache"):
            cache.cache = [mx.zeros_like(part) for part in filled.cache]
    assert farthest([model(prompt, cache=zeros)[0]], [normalized(found)]) > 100 * TOLERANCE


def test_a_release_that_nobody_read_is_refused(monkeypatch, published):
    monkeypatch.setattr(replacing, "version", lambda package: "0.99.1")
    module = importlib.import_module("mlx_lm.models.jamba")
    monkeypatch.delattr(module, "_vllm_metal_patched", raising=False)
    with pytest.raises(ModelLoadError, match=r"mlx-lm 0\.99 is not supported: 'jamba' may differ"):
        lazy_model(published("jamba")[0], mx.float32)


@pytest.mark.parametrize(
    ("module", "key", "value"),
    [
        ("falcon_h1", "time_step_limit", [0.0, 2.0]),
        ("gpt_oss", "swiglu_limit", 3.0),
        pytest.param("gpt_neox", "hidden_act", "relu", marks=pytest.mark.more),
        ("recurrent_gemma", "rope_theta", 700.0),
    ],
)
def test_what_a_module_ignores_is_refused_by_name(published, module, key, value, tmp_path):
    folder, *_ = published(module)
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    changed = json.loads((folder / "config.json").read_text()) | {key: value}
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(changed))
    with pytest.raises(ModelLoadError, match=f"{key}"):
        lazy_model(tmp_path, mx.float32)
