# SPDX-License-Identifier: Apache-2.0
"""Gemma 4's assistants compute the same as vLLM's torch class, on K/V in the target's blocks."""

import json

import mlx.core as mx
import numpy as np
import pytest
from engine.models.cases import cases
from engine.spec_decode import assistants
from engine.spec_decode.assistants import (
    CONFIG,
    KINDS,
    SCALARS,
    SHARING,
    TARGET,
    WINDOW,
    Judge,
    ordering,
    shapes,
)
from engine.spec_decode.heads import (
    BLOCK,
    HIDDEN,
    TIE,
    VOCAB,
    Bench,
    K,
    check_chunks_and_rejections,
    engine_config,
    serve_and_check,
    write_head,
    write_target,
)

from vllm_metal.engine.models import loader
from vllm_metal.engine.models.paged_layers import PagedLayers
from vllm_metal.engine.models.parts import ModelParts
from vllm_metal.engine.spec_decode.assistant import AssistantProposer
from vllm_metal.engine.spec_decode.assistant_config import AssistantConfig
from vllm_metal.engine.spec_decode.registry import load_network
from vllm_metal.engine.spec_decode.spans import Spans

pytestmark = pytest.mark.usefixtures("unfused")

ORDERED = {"use_ordered_embeddings": True}
#: Target, shapes, other arrays, changes of config.json.
CASES = {
    "dense head": (TARGET, shapes(), {}, {}),
    "clusters": (TARGET, shapes(clusters=16), ordering(), ORDERED),
    "own head, shared K/V": (SHARING, shapes(tied=False), {}, {"tie_word_embeddings": False,
        "text_config": CONFIG["text_config"] | {"attention_k_eq_v": False,
         "num_global_key_value_heads": None}}),
}  # fmt: skip


def write_pair(folder, name):
    """Writes the folders of a case's target and assistant."""
    target, of_shapes, extra, changes = CASES[name]
    drafter = of_shapes, extra | SCALARS, CONFIG | changes, "model.safetensors"
    return write_target(folder / "target", target), write_head(folder / "head", *drafter)


#: Where MLX's tools store the packing of weights; kind, bits and group size of some.
MARKS = ("quantization", "quantization_config")
MODES = [("affine", 4, 32), ("mxfp4", 4, 32)]


@pytest.fixture(
    scope="module", params=cases(CASES, ["clusters"], ["dense head", "own head, shared K/V"])
)
def bench(request, tmp_path_factory):
    target, head = write_pair(tmp_path_factory.mktemp("models"), request.param)
    config = engine_config(target, head, "mtp")
    return Bench(config, Judge(config, target))


def test_drafts_are_vllms_for_prompts_in_chunks_and_any_pattern_of_acceptance(bench):
    # A hit of whole blocks drafts at once, though no token of them is computed.
    check_chunks_and_rejections(bench, found=3, at_once=True)


def test_hidden_states_and_logits_are_vllms(bench):
    text = bench.prompt(2 * BLOCK + 3)
    bench.begin(3, text)
    bench.step([3], [0])
    text = bench.token_ids_np[3, : bench.known[3]].tolist()
    head, layers = bench.network.head, bench.network.reading_layers
    own = {layer.name: bench.kv_caches[layer.name] for layer in layers}
    paged = PagedLayers(layers, own, bench.group_of, BLOCK)
    place = len(text) - 2
    spans = Spans(*(np.array([number], np.int32) for number in (3, place, place + 1)))
    rows = spans.rows(mx.array(text[-1:]), None, stored_np=np.zeros(1, bool))
    drafts, before = [9, 4, 31], mx.array(bench.judge.kept(text[:-1])[0].numpy())
    # Attention of both reads the same K/V, so that the target's rounding does not count.
    bench.executor.begin_step()  # the newest rows enter the pool
    blocks_np = bench.tables.tables_np[0][3]
    kept = bench.judge.stored({layer: own[layer.name] for layer in layers}, blocks_np, place + 1)
    close, tokens = {"atol": 1e-4, "rtol": 0}, [text[-1], *drafts[:-1]]
    for token, (logits, wanted) in zip(tokens, bench.judge.passes(text, drafts, kept), strict=True):
        with paged.step(rows, bench.tables) as caches:
            head.drafts(mx.array([token]), before, caches, 1)
            out, hidden = head(head.embed_tokens(mx.array([token])), before, caches)
            mx.eval(out, hidden)
        before = mx.array(wanted.numpy())  # differences do not add up
        np.testing.assert_allclose(np.array(hidden), wanted.numpy(), **close)
        chosen = np.flatnonzero(logits[0] > -1e9)
        if len(chosen) == VOCAB:
            scores = head.lm_head if "lm_head" in head else head.model.embed_tokens
            ids, values = mx.arange(VOCAB), scores.as_linear(out)[0]
        else:
            ids, values = (part[0] for part in head.masked_embedding(out, head.model.embed_tokens))
        assert sorted(np.array(ids).tolist()) == chosen.tolist()
        np.testing.assert_allclose(np.array(values), logits[0][np.array(ids)].numpy(), **close)
    bench.proposer.forget_request(3)


@pytest.mark.more
def test_the_engine_drafts_what_vllms_class_does(tmp_path, monkeypatch):
    """With hits and a window shorter than most texts; few tokens, so that some drafts are right."""
    target, head = assistants.write_pair(tmp_path, 8)
    judge, drafted = Judge(engine_config(target, head, "mtp"), target), []
    propose = AssistantProposer.propose

    def noting(self, request):
        found = propose(self, request)
        assert request.unread is None
        lengths, counts = request.num_tokens_np.tolist(), found.counts_np.tolist()
        for place, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            text = request.token_ids_np[request.req_indices_np[place], :length].tolist()
            drafted.append((text, np.array(found.token_ids)[place, :count].tolist()))
        return found

    monkeypatch.setattr(AssistantProposer, "propose", noting)
    serve_and_check(target, {"method": "mtp", "model": str(head), "num_speculative_tokens": K})
    some = [(text, drafts) for text, drafts in drafted if drafts][::7]
    assert len(some) > 20 and max(len(text) for text, _ in some) > 4 * WINDOW
    for text, drafts in some:
        for row, token in zip(judge(text, drafts), drafts, strict=True):
            assert row.max() - row[token] <= TIE


@pytest.mark.parametrize("mode", cases(MODES, [MODES[0]], [MODES[1]]))
def test_a_folder_that_mlx_packed_drafts_what_its_dense_weights_do(mode, tmp_path):
    kind, bits, group_size = mode
    target, dense = write_pair(tmp_path, "clusters")
    packed, unpacked = {}, {}
    for name, array in mx.load(str(dense / "model.safetensors")).items():
        packed[name] = unpacked[name] = array
        if array.ndim == 2 and array.shape[1] % group_size == 0:
            parts = mx.quantize(array, group_size, bits, mode=kind)
            base = name.removesuffix("weight")
            packed |= zip([name, f"{base}scales", f"{base}biases"], parts, strict=False)
            unpacked[name] = mx.dequantize(*parts, group_size=group_size, bits=bits, mode=kind)
    said = {"group_size": group_size, "bits": bits, "mode": kind}
    hidden, found = mx.random.normal((2, HIDDEN), key=mx.random.key(1)), []
    for weights, quantization in ((packed, dict.fromkeys(MARKS, said)), (unpacked, {})):
        folder = tmp_path / f"head {len(found)}"
        folder.mkdir()
        mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
        (folder / "config.json").write_text(json.dumps(CONFIG | ORDERED | quantization))
        config = engine_config(target, folder, "mtp")
        head = load_network(config, ModelParts(loader.load(config))).head
        assert ("scales" in head.model.embed_tokens) == bool(quantization)
        states = head.pre_projection(mx.concatenate([hidden, hidden], axis=-1))
        ids, logits = head.masked_embedding(states, head.model.embed_tokens)
        scores = mx.zeros((2, VOCAB))
        found.append(np.array(mx.put_along_axis(scores, ids, logits, axis=-1)))
    assert np.abs(found[0]).max() > 1
    np.testing.assert_allclose(*found, atol=1e-4, rtol=0)


TEXT = CONFIG["text_config"]
#: Changes of config.json, and the error's text.
NOT_COMPUTED = {
    "per-layer inputs": (
        {"text_config": TEXT | {"hidden_size_per_layer_input": 16}},
        "text_config.hidden_size_per_layer_input=16 is not supported with Gemma 4's assistant",
    ),
    "experts": ({"text_config": TEXT | {"enable_moe_block": True}}, "enable_moe_block=True"),
    "wide MLPs": ({"text_config": TEXT | {"use_double_wide_mlp": True}}, "use_double_wide_mlp=T"),
    "caps": ({"text_config": TEXT | {"attn_logit_softcapping": 5.0}}, "attn_logit_softcapping=5"),
    "K/V of its own": ({"text_config": TEXT | {"num_kv_shared_layers": 2}}, "shared_layers=2"),
    "last layer": ({"text_config": TEXT | {"layer_types": KINDS[1:5]}}, "text_config.layer_types"),
    "no kinds": ({"text_config": TEXT | {"layer_types": None}}, "layer_types=None"),
    "activation": (
        {"text_config": TEXT | {"hidden_activation": "silu"}},
        "text_config in config.json of the draft: .*hidden_activation='silu'",
    ),
    "clusters": (ORDERED | {"num_centroids": 20}, "num_centroids=20 .*vocab_size=128"),
    "chosen clusters": (ORDERED | {"centroid_intermediate_top_k": 17}, "top_k=17 .*16 clusters"),
    "unknown": ({"sliding_window": 8}, "sliding_window=8 .*the key is not implemented"),
}


@pytest.mark.parametrize("name", NOT_COMPUTED)
def test_a_key_that_is_not_computed_is_rejected(name):
    changes, why = NOT_COMPUTED[name]
    with pytest.raises(loader.ModelLoadError, match=why):
        AssistantConfig.of(CONFIG | changes)


#: Changes of config.json and of arrays, and the error's text.
OF_OTHERS = {
    "hidden size": ({"backbone_hidden_size": 32}, {}, "hidden states of size 32, .*are of 64"),
    "vocabulary": ({"text_config": TEXT | {"vocab_size": 96}}, {}, "vocabulary of 96, .*has 128"),
    "a key": ({"sliding_window": 8}, {}, "sliding_window=8"),
    "heads": (
        {"text_config": TEXT | {"head_dim": 32}},
        {},
        "reads 2 heads of 32 elements, of 24 tokens in .*sliding_attention, which keeps 2 .* 16 e",
    ),
    "window": ({"text_config": TEXT | {"sliding_window": 25}}, {}, "of 25 tokens .*of 24 tokens"),
    "weights": ({}, {"post_projection.weight": (HIDDEN, 16)}, "do not match its config.json"),
    "tokens": (ORDERED, {"masked_embedding.centroids.weight": (16, 32)}, "128|do not match"),
}


@pytest.mark.parametrize("name", OF_OTHERS)
def test_an_assistant_of_another_model_is_refused(name, tmp_path):
    changes, arrays, why = OF_OTHERS[name]
    drafter = shapes() | arrays, SCALARS, CONFIG | changes, "model.safetensors"
    target = write_target(tmp_path / "target", TARGET)
    with pytest.raises((loader.ModelLoadError, ValueError), match=why):
        config = engine_config(target, write_head(tmp_path / "head", *drafter), "mtp")
        load_network(config, ModelParts(loader.load(config)))


def test_a_model_of_another_family_is_refused(tmp_path):
    head = write_head(tmp_path / "head", shapes(), SCALARS, CONFIG, "model.safetensors")
    with pytest.raises(ValueError, match=r"assistant with a model of type llama: choose another"):
        engine_config(write_target(tmp_path / "target"), head, "mtp")
