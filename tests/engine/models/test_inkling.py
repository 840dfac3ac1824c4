# SPDX-License-Identifier: Apache-2.0
"""Inkling's additions change logits: bias by distance, windows, four convolutions."""

import json
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from engine.models import of_mlx_vlm
from engine.models.recurrent import config_of, make_model
from engine.models.test_executor import chunk_by_chunk, chunk_of, executor, of_states
from engine.models.test_plain import TOLERANCE, prompts_of
from metal_interpreter import metal_kernel
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from metal_kernels import kernel
from vllm_metal.engine.attention import paged_cache
from vllm_metal.engine.config_json.published_config import as_read
from vllm_metal.engine.kv_cache.kernels import KERNELS
from vllm_metal.engine.models.loader import lazy_model
from vllm_metal.engine.recurrent import sequence_calls
from vllm_metal.identity.model_files import ModelLoadError
from vllm_metal.patches.mlx_patches import registry
from vllm_metal.patches.mlx_patches.families import inkling

pytestmark = pytest.mark.usefixtures("unfused")


def shift_bias(monkeypatch):
    attend = paged_cache.PagedCache.attend

    def shifted(self, queries, keys, values, scoring):
        bias = mx.concatenate([scoring.bias[..., :1], scoring.bias[..., :-1]], axis=-1)
        return attend(self, queries, keys, values, scoring._replace(bias=bias))

    monkeypatch.setattr(paged_cache.PagedCache, "attend", shifted)


def widen_window(monkeypatch):
    start = inkling.MaskedWindowCache.__init__
    monkeypatch.setattr(
        inkling.MaskedWindowCache, "__init__", lambda self, window: start(self, window + 1)
    )


def forget(part):
    """Plants a fault that clears a convolution's memory at block boundaries."""

    def plant(monkeypatch):
        start = sequence_calls.ByOperations.__init__

        def without(self, states, *others):
            states = list(states)
            states[part] = mx.zeros_like(states[part])
            start(self, states, *others)

        monkeypatch.setattr(sequence_calls.ByOperations, "__init__", without)

    return plant


def ignore_positions(monkeypatch):
    monkeypatch.setattr(
        inkling, "log_factors", lambda positions, *_: mx.ones((positions.size, 1, 1))
    )


FAULTS = {
    "bias shifted by a distance": shift_bias,
    "window wider by one": widen_window,
    "keys' convolution forgets": forget(0),
    "values' convolution forgets": forget(1),
    "attention's convolution forgets": forget(2),
    "MLP's convolution forgets": forget(3),
    "scores as at the text's beginning": ignore_positions,
}


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_a_fault_in_any_part_changes_tokens(fault, monkeypatch):
    model, prompts = (
        make_model(of_mlx_vlm.FAMILIES["inkling_text"], seed=7, drawn=True),
        prompts_of(),
    )
    expected = [np.array(model(mx.array([p]), cache=make_prompt_cache(model))[0]) for p in prompts]
    if fault is not None:
        FAULTS[fault](monkeypatch)
    blocks = np.random.default_rng(5).permutation(np.arange(1, 40))
    parts = chunk_by_chunk(model, "inkling_text", prompts, blocks, of_states)
    found = [np.concatenate([np.array(part, np.float32) for part in one]) for one in parts]
    off = [np.abs(one - other).max() for one, other in zip(found, expected, strict=True)]
    same = all(
        (one.argmax(-1) == other.argmax(-1)).all()
        for one, other in zip(found, expected, strict=True)
    )
    assert same == (fault is None) and (max(off) <= TOLERANCE) == (fault is None)


@pytest.mark.more
def test_our_kernels_compute_it_too():
    """Runs bias, windows and convolutions by the interpreted kernels."""
    family = of_mlx_vlm.FAMILIES["inkling_text"]
    text = family.config["text_config"] | {"head_dim": 64, "swa_head_dim": 64}
    model = make_model(replace(family, config={"text_config": text}), seed=7, drawn=True)
    prompts = prompts_of((40, 17, 1, 29))
    expected = [np.array(model(mx.array([p]), cache=make_prompt_cache(model))[0]) for p in prompts]
    blocks = np.random.default_rng(5).permutation(np.arange(1, 40))
    with kernel.using(metal_kernel):
        run = executor(model, "inkling_text", num_blocks=40, backend=KERNELS)
        parts = chunk_of(run, prompts, blocks, of_states)
        found = [np.concatenate([np.array(part, np.float32) for part in one]) for one in parts]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=TOLERANCE)


#: Keys of Inkling's own files, with values that the module computes.
OWN_KEYS = {
    "model_type": "inkling_model",
    "vocab_size": 64,
    "padded_vocab_size": 64,
    "q_bias": False,
    "o_bias": False,
    "use_embed_norm": True,
    "use_sconv": True,
    "sconv_kernel_size": 4,
    "use_gate_bias": True,
    "use_global_scale": True,
    "norm_after_topk": True,
    "gate_activation": "sigmoid",
    "shared_expert_sink": True,
    "inference_moe_w13_interleaved": True,
    "v_head_dim": 16,
    "swa_v_head_dim": 16,
    "local_layer_ids": [0, 3],
    "num_nextn_predict_layers": 8,
    "model_max_length": 1024,
    "hidden_act": "silu",
}


def read(**changes):
    """Returns the text's keys as the module reads them from a published file."""
    text = of_mlx_vlm.FAMILIES["inkling_mm_model"].config["text_config"] | OWN_KEYS | changes
    text = {key: value for key, value in text.items() if value is not None}
    content = {
        "model_type": "inkling_mm_model",
        "text_config": text,
        "mtp_config": {"num_nextn_predict_layers": 8, "local_layer_ids": [0]},
        "image_bos_token_id": 1,
    }
    _, arguments = registry.classes(content)
    return text | as_read(content, "inkling", arguments).get("text_config", {})


@pytest.mark.parametrize(
    "words",
    [{}, {"intermediate_size": 56, "moe_intermediate_size": 24, "dense_intermediate_size": None}],
    ids=["own", "transformers"],
)
def test_widths_of_experts_and_other_mlps_have_names_of_two_kinds(words):
    found = read(**words)
    assert (found["intermediate_size"], found["dense_intermediate_size"]) == (24, 56)


@pytest.mark.parametrize(
    "changed",
    [
        *({"q_bias": True}, {"use_sconv": False}, {"gate_activation": "softmax"}),
        *({"v_head_dim": 8}, {"moe_intermediate_size": 30}, {"final_logit_softcapping": 30.0}),
        *({"padded_vocab_size": 128}, {"hidden_act": "gelu"}, {"a_mechanism_of_tomorrow": 2}),
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_keys_that_the_module_does_not_compute_are_rejected_by_name(changed):
    with pytest.raises(ModelLoadError, match=next(iter(changed))):
        read(**changed)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "apart"])
def test_quantized_folders_have_projections_fused_or_apart(fused, tmp_path):
    """mlx-vlm writes attention's four projections fused now; it did not before."""
    family = of_mlx_vlm.FAMILIES["inkling_mm_model"]
    text = family.config["text_config"] | {"hidden_size": 64}
    family = replace(family, config={"text_config": text})
    model = make_model(family, seed=7, drawn=True)
    nn.quantize(model, 32, 4, class_predicate=lambda path, _: path.endswith("qkvr_proj"))
    weights = dict(tree_flatten(model.parameters()))
    if not fused:
        for name in [name for name in weights if ".qkvr_proj." in name]:
            sizes = model.layers[int(name.split(".layers.")[1].split(".")[0])].self_attn.qkvr_dims
            ends = np.cumsum(sizes)[:-1].tolist()
            parts = mx.split(weights.pop(name), ends)
            weights |= {
                name.replace("qkvr", part): array for part, array in zip("qkvr", parts, strict=True)
            }
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights, {"format": "mlx"})
    content = config_of(family) | {"quantization": {"group_size": 32, "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(content))
    prompt = mx.array(prompts_of()[:1])
    expected, found = model(prompt), lazy_model(tmp_path, mx.float32)(prompt)
    np.testing.assert_allclose(np.array(found), np.array(expected), atol=TOLERANCE)
