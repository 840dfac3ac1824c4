# SPDX-License-Identifier: Apache-2.0
"""Modules called once for all rows leave exactly the recurrences to their cache."""

import importlib
import inspect

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from engine.models import further
from engine.models.cases import cases
from engine.models.recurrent import make_model
from mlx_lm.models import gated_delta, ssm
from mlx_lm.models.cache import ArraysCache

from vllm_metal.engine.attention.layers import RunLayer, attention_layers
from vllm_metal.patches.mlx_patches import recurrences
from vllm_metal.patches.mlx_patches.mlx_vlm_families import family
from vllm_metal.patches.mlx_patches.recurrences import SequenceCall
from vllm_metal.patches.mlx_patches.replacing import MLX_LM, MLX_VLM

pytestmark = pytest.mark.usefixtures("unfused")

FAMILIES = further.ALL
#: Families whose modules are called by runs: attention by decays, other recurrences, K and V mixed
#: with those of the token before, n-grams of tokens.
BY_RUNS = {
    "baichuan_m1",
    "bailing_hybrid",
    "bailing_moe_linear",
    "longcat_flash_ngram",
    "recurrent_gemma",
    "rwkv7",
}
#: One family of each recurrence, and one without any.
QUICK = ("deepseek_v3", "falcon_h1", "jamba", "kimi_linear", "lfm2", "qwen3_next")
#: All other known modules.
MORE = (
    *("bailing_moe_v3", "gear", "granitemoehybrid", "kimi_k3", "lfm2_moe", "mamba", "mamba2"),
    *("nemotron_h", "olmo_hybrid", "plamo2", "qwen3_5"),
)
ROWS = 5


class Alone(SequenceCall):
    """Treats each row as a text of one token with a zero state."""

    def convolve(self, inputs, weight, bias):
        out = inputs * weight[:, -1]
        return out if bias is None else out + bias

    def recur(self, queries, inputs, delta, log_rates=None):
        heads = inputs.values.shape[1] // queries.shape[1]
        read = mx.repeat((queries * inputs.keys).sum(-1), heads, axis=1)
        return (read * inputs.rates)[..., None] * inputs.values


def modules_of(model):
    """Returns a model's known modules, one of each class."""
    found = [module for _, module in model.named_modules() if recurrences.known(module)]
    return list({type(module): module for module in found}.values())


def called(module, x, cache):
    options = {"cache": cache}
    if "mask" in inspect.signature(type(module).__call__).parameters:
        options["mask"] = None
    return module(x, **options)


@pytest.mark.parametrize("name", cases(sorted(set(FAMILIES) - BY_RUNS), QUICK, MORE))
def test_all_that_a_known_module_leaves_to_its_call_is_what_mixes_tokens(name):
    model = make_model(FAMILIES[name])
    layers = attention_layers(model, name)
    assert not any(isinstance(layer, RunLayer) for layer in layers)
    modules = modules_of(model)
    embedding = next(each for _, each in model.named_modules() if isinstance(each, nn.Embedding))
    assert bool(modules) == any(layer.state_bytes for layer in layers)
    for module in modules:
        mx.random.seed(3)
        x = mx.random.normal((ROWS, 1, embedding.weight.shape[1]))
        (num_parts,) = {len(layer.form.shapes) for layer in layers if layer.state_bytes}
        cache = ArraysCache(num_parts)
        expected = called(module, x, cache)  # texts of one token each, by mlx-lm's own
        parts = cache.cache
        call = Alone([part.shape[1:] for part in parts], [part.dtype for part in parts])
        with recurrences.handed_to(call):
            found = called(module, x.swapaxes(0, 1), call)
        np.testing.assert_allclose(
            np.array(found[0]), np.array(expected[:, 0]), atol=2e-5, rtol=2e-5
        )


@pytest.mark.parametrize(
    "name", cases(sorted(BY_RUNS), ["recurrent_gemma"], BY_RUNS - {"recurrent_gemma"})
)
def test_other_modules_are_called_by_runs(name):
    layers = attention_layers(make_model(FAMILIES[name]), name)
    assert any(isinstance(layer, RunLayer) for layer in layers)


def test_every_known_module_is_one_of_the_libraries():
    for module, cls in recurrences.KNOWN:
        if module.startswith(MLX_VLM):
            family(module.removeprefix(MLX_VLM).partition(".")[0], "a test")
        else:
            module = f"{MLX_LM}{module}"
        assert issubclass(getattr(importlib.import_module(module), cls), nn.Module)


def test_outside_such_a_call_convolutions_and_recurrences_are_mlx_lms():
    model = make_model(FAMILIES["qwen3_next"])
    attention_layers(model, "qwen3_next")
    from mlx_lm.models import mamba2, qwen3_next

    convolution, x = nn.Conv1d(8, 8, 3, groups=8), mx.random.normal((2, 7, 8))
    padded = mx.concatenate([mx.zeros((2, 2, 8)), x], axis=1)
    weight = convolution.weight[:, :, 0].T
    naive = sum(padded[:, tap : tap + 7] * weight[tap] for tap in range(3)) + convolution.bias
    np.testing.assert_allclose(np.array(convolution(padded)), np.array(naive), atol=1e-5)
    q, k, v = (mx.random.normal((2, 7, 2, 8)) for _ in range(3))
    a, b, log, bias = (mx.random.normal(shape) for shape in ((2, 7, 2), (2, 7, 2), (2,), (2,)))
    y, state = qwen3_next.gated_delta_update(q, k / 3, v, a, b, log, bias)
    decays = gated_delta.compute_g(log, a, bias)
    expected = gated_delta.gated_delta_ops(q, k / 3, v, decays, mx.sigmoid(b))
    np.testing.assert_array_equal(np.array(y), np.array(expected[0]))
    np.testing.assert_array_equal(np.array(state), np.array(expected[1]))
    attention_layers(make_model(FAMILIES["mamba2"]), "mamba2")
    found = mamba2.ssm_update(v, log, q, k, bias, a, bias)
    expected = ssm.ssm_attn(v, log, q, k, bias, a, bias)
    np.testing.assert_array_equal(np.array(found[0]), np.array(expected[0]))
