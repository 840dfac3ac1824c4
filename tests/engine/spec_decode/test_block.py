# SPDX-License-Identifier: Apache-2.0
"""Block drafters compute the same as vLLM's torch classes, on mlx-lm's dense hidden states."""

import json
from importlib import import_module
from itertools import pairwise

import metal_interpreter
import mlx.core as mx
import numpy as np
import pytest
import torch
from e2e.harness import counters, engine, generate, greedy
from engine.attention.test_paged_cache import Turns
from engine.models.cases import cases
from engine.spec_decode.blocks import (
    CONFIG,
    LAYERS,
    MASK,
    RANK,
    TAPS,
    Judge,
    MarkovJudge,
    SelectorJudge,
    gemma4_shapes,
    laguna_shapes,
    shapes,
)
from engine.spec_decode.heads import (
    BLOCK,
    HIDDEN,
    VOCAB,
    Bench,
    Gemma4Target,
    K,
    check_chunks_and_rejections,
    engine_config,
    serve_and_check,
    write_head,
    write_target,
)
from engine.spec_decode.heads import CONFIG as TARGET
from vllm.model_executor.models.gemma4_dspark import Gemma4DSparkForCausalLM
from vllm.model_executor.models.laguna_dflash import DFlashLagunaForCausalLM
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM
from vllm.model_executor.models.qwen3_dflash2 import DFlash2Qwen3ForCausalLM
from vllm.model_executor.models.qwen3_dspark import Qwen3DSparkForCausalLM

from metal_kernels import kernel
from vllm_metal.engine.batch.requests import BlockTables
from vllm_metal.engine.kv_cache.kernels import KERNELS, KernelBackend
from vllm_metal.engine.kv_cache.scatter import SCATTER
from vllm_metal.engine.models import loader
from vllm_metal.engine.models.compiled import CompiledForward
from vllm_metal.engine.models.paged_layers import PagedLayers
from vllm_metal.engine.models.parts import ModelParts
from vllm_metal.engine.spec_decode.block_config import BlockConfig, architecture_of
from vllm_metal.engine.spec_decode.block_heads import largest
from vllm_metal.engine.spec_decode.registry import load_network
from vllm_metal.engine.spec_decode.spans import Spans

pytestmark = pytest.mark.usefixtures("unfused")

DRAFT_VOCAB = 48
REDUCED = {"d2t": torch.arange(DRAFT_VOCAB) + torch.arange(DRAFT_VOCAB) % 2}
WINDOWS = {"sliding_window": 20, "use_sliding_window": True}  # shorter than most contexts
SLIDING = WINDOWS | {"layer_types": ["sliding_attention"] * 2}
MIXED = WINDOWS | {"layer_types": ["sliding_attention", "full_attention"]}
DFLASH = CONFIG["dflash_config"]
CONV = {"conv_kernel_size": 2, "conv_group_size": 16}
SELECTOR = CONV | {"selector_rank": RANK, "selector_top_k": 5, "block_size": 8}
CODEBOOKS = {
    f"candidate_selector.{kind}_codebook": (VOCAB, RANK) for kind in ("predecessor", "successor")
} | {"candidate_selector.hidden_projection.weight": (RANK, HIDDEN)}
MARKOV = {"architectures": ["Qwen3DSparkModel"], "block_size": 7, "markov_rank": RANK}
TRANSITIONS = {
    "markov_head.markov_w1.weight": (VOCAB, RANK),
    "markov_head.markov_w2.weight": (VOCAB, RANK),
}
#: A head whose projection of hidden states is named an encoder.
ENCODER = {"fc": "encoder.fc", "hidden_norm": "encoder.output_norm_enc"}
MUSE = {
    f"{ENCODER.get(module, module)}.{part}": shape
    for (module, _, part), shape in ((name.rpartition("."), of) for name, of in shapes().items())
}
LAGUNA = {
    "architectures": ["LagunaForCausalLM"],
    "model_type": "laguna",
    "gating": "per-head",
    "num_experts": 0,
    "mlp_layer_types": ["dense"] * 2,
    "draft_vocab_size": VOCAB,
    "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in TAPS],
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 20000.0},
        "sliding_attention": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    },
}
GEMMA4 = MARKOV | {
    "architectures": ["Gemma4DSparkModel"],
    "model_type": "gemma4_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "attention_k_eq_v": True,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "final_logit_softcapping": 2.0,
    "layer_types": ["full_attention"] * 2,
    "sliding_window": 20,
    "mask_token_id": MASK,
    "target_layer_ids": TAPS,
    "dflash_config": None,
    "hidden_act": None,
    "rope_theta": None,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
    },
}
#: A small Gemma 4 31B: windows on all but every fourth layer, which has larger heads.
GEMMA4_TARGET = TARGET | {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "sliding_window": 24,
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 2,
    "rope_parameters": GEMMA4["rope_parameters"],
    "tie_word_embeddings": True,
}
#: Method, vLLM's class, judge, shapes, other arrays, changes of config.json.
CASES = {
    "dflash": ("dflash", DFlashQwen3ForCausalLM, Judge, shapes(), {}, {}),
    "causal": ("dflash", DFlashQwen3ForCausalLM, Judge, shapes(), {}, {"is_causal": True}),
    "windows": ("dflash", DFlashQwen3ForCausalLM, Judge, shapes(), {}, SLIDING),
    "bidirectional windows": ("dflash", DFlashQwen3ForCausalLM, Judge, shapes(), {},
        SLIDING | {"is_causal": False}),
    "mixed": ("dflash", DFlashQwen3ForCausalLM, Judge, shapes(), {}, MIXED),
    "sinks, own head": ("dflash", DFlashQwen3ForCausalLM, Judge, shapes(sinks=True, bias=True)
        | {"lm_head.weight": (DRAFT_VOCAB, HIDDEN), "embed_tokens.weight": (VOCAB, HIDDEN)},
        REDUCED, {"draft_vocab_size": DRAFT_VOCAB, "attention_bias": True, "sliding_window": 20,
         "dflash_config": DFLASH | {"use_swa": True, "swa_window_size": 24,
          "attention_sink_bias": True, "attention_value_scale": 0.7}}),
    "dflash2": ("dflash", DFlash2Qwen3ForCausalLM, SelectorJudge,
        shapes(conv=(2, 16)) | CODEBOOKS, {}, SLIDING | {"is_causal": False,
         "architectures": ["DFlash2DraftModel"], "dflash_config": DFLASH | SELECTOR
         | {"input_embedding_scale": 1.5, "output_multiplier": 0.5,
            "final_logit_softcapping": 5.0}}),
    "muse": ("dflash", DFlashQwen3ForCausalLM, Judge, MUSE, {}, SLIDING | {"dflash_config": None,
         "architectures": ["MuseGlimmerAssistantModel"], "model_type": "muse_glimmer_assistant",
         "mask_token_id": MASK, "target_layer_ids": TAPS}),
    "dspark": ("dspark", Qwen3DSparkForCausalLM, MarkovJudge, shapes() | TRANSITIONS, {}, MARKOV),
    "dspark, most likely alone": ("dspark", Qwen3DSparkForCausalLM, MarkovJudge,
        shapes() | TRANSITIONS, {}, MARKOV | {"dspark_draft_topk": 4}),
    "dspark with a bonus row": ("dspark", Qwen3DSparkForCausalLM, MarkovJudge, shapes()
        | TRANSITIONS | {"markov_head.markov_w2.weight": (DRAFT_VOCAB, RANK),
           "lm_head.weight": (DRAFT_VOCAB, HIDDEN)}, REDUCED,
        MARKOV | MIXED | {"draft_vocab_size": DRAFT_VOCAB, "sample_from_anchor": False}),
    "laguna": ("dflash", DFlashLagunaForCausalLM, Judge, laguna_shapes(), {}, SLIDING | LAGUNA),
    "laguna, full": ("dflash", DFlashLagunaForCausalLM, Judge, laguna_shapes(), {}, LAGUNA
        | {"layer_types": ["full_attention"] * 2, "is_causal": False}),
    # As z-lab publish it: a window on all layers but the last, and no `is_causal`.
    "gemma4, dflash": ("dflash", DFlashQwen3ForCausalLM, Judge, shapes(num_layers=4), {}, WINDOWS
        | {"num_hidden_layers": 4, "dflash_config": DFLASH | {"mask_token_id": 4},
           "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}),
    "gemma4, dspark": ("dspark", Gemma4DSparkForCausalLM, MarkovJudge,
        gemma4_shapes() | TRANSITIONS, {}, GEMMA4),
}  # fmt: skip


def write_pair(folder, name):
    """Writes the folders of a case's target and drafter."""
    _, _, _, of_shapes, extra, changes = CASES[name]
    target = write_target(folder / "target", GEMMA4_TARGET if "gemma4" in name else TARGET)
    drafter = of_shapes, extra, CONFIG | changes, "model.safetensors"
    return target, write_head(folder / "head", *drafter)


@pytest.fixture(
    scope="module",
    params=cases(
        CASES,
        ["dflash", "mixed", "dflash2", "dspark"],
        [name for name in CASES if name not in ("dflash", "mixed", "dflash2", "dspark")],
    ),
)
def bench(request, tmp_path_factory):
    method, family, judge, *_ = CASES[request.param]
    target, head = write_pair(tmp_path_factory.mktemp("models"), request.param)
    config = engine_config(target, head, method)
    dense = Gemma4Target(target) if "gemma4" in request.param else target
    return Bench(config, judge(config, dense, family))


def test_drafts_are_vllms_for_prompts_in_chunks_and_any_pattern_of_acceptance(bench):
    # A hit of whole blocks drafts at once, though no token of them is computed.
    check_chunks_and_rejections(bench, found=3, at_once=True)
    for req_idx in range(3):
        bench.proposer.forget_request(req_idx)


def test_context_states_logits_and_scores_are_vllms(bench):
    text = bench.prompt(2 * BLOCK + 3)
    bench.begin(3, text)
    bench.step([3], [0])
    text = bench.token_ids_np[3, : bench.known[3]].tolist()
    hidden, contexts = bench.judge.block(text)
    drafter, layers = bench.network.drafter, bench.network.layers
    own = {layer.name: bench.kv_caches[layer.name] for layer in layers}
    paged = PagedLayers(layers, own, bench.group_of, BLOCK)
    count, length = len(text) - 1, len(hidden)
    mask = drafter.config.mask_token_id
    ids = mx.array([[text[-1]] + [mask] * (length - 1)])
    spans = Spans(*(np.array([number], np.int32) for number in (3, count, count + length)))
    with paged.step(spans.rows(ids[0], None), bench.tables) as caches:
        found = drafter.hidden(ids, caches)
    mx.eval(found)
    close = {"atol": 1e-4, "rtol": 0}
    np.testing.assert_allclose(np.array(found[0]), hidden.numpy(), **close)
    table, places = bench.tables.tables_np[0][3], np.arange(count)
    for layer, (keys, values) in zip(layers, contexts, strict=True):
        cache = own[layer.name]
        for array, wanted in ((cache.keys, keys), (cache.values, values)):
            rows = np.array(array.elements)[:, table[places // BLOCK], places % BLOCK]
            np.testing.assert_allclose(rows.swapaxes(0, 1), wanted.numpy(), **close)
    drafting = found if drafter.config.from_anchor else found[:, 1:]
    logits = drafter.logits(found)
    places, scores = drafter.head.choose(drafting, logits, ids[:, 0])
    tokens = places if drafter.d2t is None else places + drafter.d2t[places]
    drafts = np.array(tokens)[0].tolist()
    wanted = bench.judge(text, drafts)
    np.testing.assert_array_equal(wanted.argmax(axis=-1), drafts)
    best = np.array(scores)[0].max(axis=-1)
    np.testing.assert_allclose(best, wanted.max(axis=-1), **close)
    bench.proposer.forget_request(3)


#: Random drafts of a smaller vocabulary or of a head of its own are hardly ever right; a known
#: chain's are, see below.
SERVED = [name for name in CASES if name not in ("dspark with a bonus row", "gemma4, dspark")]


@pytest.mark.parametrize("name", cases(SERVED, ["mixed"], ["dflash2"]))
def test_the_engine_serves_what_the_model_generates(name, tmp_path):
    target, head = write_pair(tmp_path, name)
    speculation = {"method": CASES[name][0], "model": str(head), "num_speculative_tokens": K}
    serve_and_check(target, speculation)


#: Configurations of other kinds that are not supported.
NOT_COMPUTED = {
    "gates of elements": (LAGUNA | {"gating": "per-element"}, "gating='per-element'"),
    "experts": (LAGUNA | {"num_experts": 4, "mlp_layer_types": ["dense", "sparse"]}, "mlp_layer"),
    "two ropes": (LAGUNA | MIXED, "rope_parameters="),
    "heads by layer": (LAGUNA | {"num_attention_heads_per_layer": [4, 2]}, "num_attention_heads_p"),
    "windows": (GEMMA4 | MIXED, "layer_types='sliding_attention'"),
    "values": (GEMMA4 | {"attention_k_eq_v": False}, "attention_k_eq_v=False"),
    "activation": (GEMMA4 | {"hidden_activation": "silu"}, "hidden_activation='silu'"),
}


@pytest.mark.parametrize("name", NOT_COMPUTED)
def test_a_key_that_is_not_computed_is_rejected(name):
    changes, why = NOT_COMPUTED[name]
    config = CONFIG | changes
    with pytest.raises(loader.ModelLoadError, match=why):
        BlockConfig.of(config, config, architecture_of(config))


def test_a_gemma4_drafter_has_ends_of_its_own(tmp_path):
    arrays = {name: s for name, s in gemma4_shapes().items() if "embed" not in name} | TRANSITIONS
    target = write_target(tmp_path / "target")
    head = write_head(tmp_path / "head", arrays, {}, CONFIG | GEMMA4, "model.safetensors")
    config = engine_config(target, head, "dspark")
    with pytest.raises(loader.ModelLoadError, match=r"embed_tokens.weight"):
        load_network(config, ModelParts(loader.load(config)))


#: Changes of config.json and of arrays' shapes, and the error's text.
OF_OTHERS = {
    "vocabulary": ({"vocab_size": VOCAB + 1}, {}, "vocab_size=129 .the target's is 128"),
    "mask": ({"dflash_config": DFLASH | {"mask_token_id": VOCAB}}, {}, "mask_token_id=128"),
    "tap": ({"dflash_config": DFLASH | {"target_layer_ids": [0, 3, 8]}}, {}, "target_layer_ids"),
    "taps": ({"dflash_config": DFLASH | {"target_layer_ids": [0, 3]}}, {}, "fc.weight"),
    "hidden size": ({"target_hidden_size": 32}, {"fc.weight": (HIDDEN, 96)}, "target_hidden_size"),
    "own head": ({"draft_vocab_size": 48}, {}, "draft_vocab_size=48 without an lm_head"),
    "no table": ({"draft_vocab_size": 48}, {"lm_head.weight": (48, HIDDEN)}, "48 without d2t"),
}


@pytest.mark.parametrize("name", list(OF_OTHERS))
def test_a_drafter_of_another_model_is_refused(tmp_path, name):
    changes, others, why = OF_OTHERS[name]
    target = write_target(tmp_path / "target")
    arguments = shapes() | others, {}, CONFIG | changes, "model.safetensors"
    config = engine_config(target, write_head(tmp_path / "head", *arguments), "dflash")
    with pytest.raises((loader.ModelLoadError, NotImplementedError), match=why):
        load_network(config, ModelParts(loader.load(config)))


def test_a_drafter_of_another_tokenizer_is_refused(tmp_path):
    target = write_target(tmp_path / "target")
    head = write_head(tmp_path / "head", shapes(), {}, CONFIG, "model.safetensors")
    for folder, tokens in ((target, ["a", "b"]), (head, ["b", "a"])):
        vocab = {token: place for place, token in enumerate(tokens)}
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))
    config = engine_config(target, head, "dflash")
    with pytest.raises(loader.ModelLoadError, match=r"token 0 is 'a' .*'b'"):
        load_network(config, ModelParts(loader.load(config)))


def states_of(config, computed=mx.float32, pool=mx.float32, backend=SCATTER):
    """Returns the drafter, and a block's hidden states behind three random context positions."""
    network = load_network(config, ModelParts(loader.load(config)))
    network.drafter.set_dtype(computed)
    network.drafter.dtype = computed
    network.drafter.pool_dtype = pool
    layers = network.layers
    tables = BlockTables(1, 1, 2)
    tables.replace(0, [[1, 2]])
    own = {layer.name: layer.allocate(4, BLOCK, pool, backend) for layer in layers}
    group_of = dict.fromkeys(own, 0)
    taps = mx.array(np.random.default_rng(1).normal(size=(3, 3 * HIDDEN)).astype(np.float32))
    context = PagedLayers(network.context_layers, own, group_of, BLOCK)
    one = np.zeros(1, np.int32)
    with context.step(Spans(one, one, one + 3).rows(mx.zeros(3, mx.int32), None), tables) as caches:
        network.drafter.write_context(taps, caches)
    ids = mx.array([[5] + [MASK] * K])
    rows = Spans(one, one + 3, one + 4 + K).rows(ids[0], None)
    with PagedLayers(layers, own, group_of, BLOCK).step(rows, tables) as caches:
        states = network.drafter.hidden(ids, caches)
        assert states.dtype == computed
        return network.drafter, np.array(states.astype(mx.float32))


def test_a_drafter_beside_a_float16_model_computes_in_bfloat16(tmp_path):
    target = write_target(tmp_path / "target")
    head = write_head(tmp_path / "head", shapes(), {}, CONFIG, "model.safetensors")
    config = engine_config(target, head, "dflash")
    _, wanted = states_of(config)
    _, found = states_of(config, mx.bfloat16, mx.float16)
    assert np.abs(found - wanted).max() < 0.05 * np.abs(wanted).max()  # of 8 bits


def test_writes_rotate_keys_of_contexts_and_blocks_and_queries(tmp_path):
    """The kernels' write rotates them all; with separate rotations, hidden states are equal."""
    target = write_target(tmp_path / "target")
    arguments = shapes(size=64), {}, CONFIG | {"head_dim": 64}, "model.safetensors"
    config = engine_config(target, write_head(tmp_path / "head", *arguments), "dflash")
    turns = Turns(metal_interpreter.metal_kernel)
    with kernel.using(turns.metal_kernel):
        _, found = states_of(config, backend=KERNELS)
        assert turns.writes == {64: 2 * LAYERS}
        _, wanted = states_of(config, backend=KernelBackend(rotates=False))
    np.testing.assert_allclose(found, wanted, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_drafters_are_those_that_mlx_packs(tmp_path, bits):
    """When packed at load, and from a folder that MLX's own tools wrote."""
    target = write_target(tmp_path / "target")
    dense = write_head(tmp_path / "dense", shapes(), {}, CONFIG, "model.safetensors")
    arrays = mx.load(str(dense / "model.safetensors"))
    quantization = {"group_size": 64, "bits": bits, "mode": "affine"}
    packed, unpacked = {}, {}
    for name, array in arrays.items():
        packed[name] = unpacked[name] = array
        if array.ndim == 2 and array.shape[1] % 64 == 0:
            parts = mx.quantize(array, group_size=64, bits=bits)
            base = name.removesuffix("weight")
            packed |= dict(zip([name, f"{base}scales", f"{base}biases"], parts, strict=True))
            unpacked[name] = mx.dequantize(*parts, group_size=64, bits=bits)
    found = {}
    for name, weights, said, option in (
        ("packed", packed, {"quantization": quantization}, {}),
        ("unpacked", unpacked, {}, {}),
        ("as loaded", arrays, {}, {"additional_config": {"draft_quantization": bits}}),
    ):
        folder = tmp_path / name
        folder.mkdir()
        mx.save_safetensors(str(folder / "model.safetensors"), dict(weights), {"format": "mlx"})
        (folder / "config.json").write_text(json.dumps(CONFIG | said))
        drafter, found[name] = states_of(engine_config(target, folder, "dflash", **option))
        linear = drafter.network.layers[0].mlp.gate_proj
        assert ("scales" in linear) == (name != "unpacked")
    for name in ("packed", "as loaded"):
        np.testing.assert_allclose(found[name], found["unpacked"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("size", [40, 128 * 16, 5000])
def test_the_largest_logits_are_found_in_two_stages(size):
    logits = mx.random.normal((3, 2, size), key=mx.random.key(4))
    values, places = (np.array(part) for part in largest(logits, 16))
    wanted = -np.sort(-np.array(logits), axis=-1)[..., :16]
    np.testing.assert_array_equal(-np.sort(-values, axis=-1), wanted)
    np.testing.assert_array_equal(np.take_along_axis(np.array(logits), places, -1), values)


def test_one_graph_drafts_for_all_requests_and_none_runs_where_nobody_wants_drafts(
    bench, monkeypatch
):
    for req_idx in range(3):
        bench.begin(req_idx, bench.prompt(5 + req_idx))
    bench.step([0, 1, 2], [0, 0, 0])
    passes, call = [], CompiledForward.__call__

    def counting(self, inputs, plans, num_rows):
        passes.append(num_rows)
        return call(self, inputs, plans, num_rows)

    monkeypatch.setattr(CompiledForward, "__call__", counting)
    width = bench.network.drafter.config.num_rows(K)
    for number in range(4):
        before, built = len(passes), bench.graphs.num_built
        request = bench.request([0, 1, 2], [K, 1, 2])
        assert bench.proposer.propose(request).counts_np.tolist() == [K, 1, 2]
        assert passes[before:] == [3 * width]  # as wide whatever is wanted
        assert bench.graphs.num_built - built == (number > 0)  # shapes come for the first time once
    before = len(passes)
    assert not bench.proposer.propose(bench.request([0, 1, 2], [0, 0, 0])).counts_np.any()
    assert len(passes) == before
    bench.step([0, 1, 2], [0, 0, 0])  # the context is written all the same
    assert bench.step([0, 1, 2], [K, K, K]) == [K, K, K]
    for req_idx in range(3):
        bench.proposer.forget_request(req_idx)


@pytest.mark.parametrize(
    ("family", "changes", "scale"),
    [
        ("llama", {}, 1.0),
        ("qwen2", {}, 1.0),  # whose list of layers is a copy
        ("gemma", {"head_dim": 16}, HIDDEN**0.5),
        ("gemma3_text", {"head_dim": 16, "query_pre_attn_scalar": 16}, HIDDEN**0.5),
        ("granite", {"embedding_multiplier": 12.0, "logits_scaling": 1.0,
          "attention_multiplier": 1.0, "residual_multiplier": 1.0, "attention_bias": False,
          "mlp_bias": False}, 12.0),
    ],
)  # fmt: skip
def test_a_shared_embedding_is_scaled_as_the_target_scales_it(family, changes, scale):
    module = import_module(f"mlx_lm.models.{family}")
    config = TARGET | {"model_type": family} | changes
    target = ModelParts(module.Model(module.ModelArgs.from_dict(config)))
    assert target.embedding_scale() == pytest.approx(scale, rel=1e-2)  # Gemma 3 rounds it
    assert target.dense_hidden([1, 2, 3]).shape == (3, HIDDEN)  # nothing is left of the call


#: Two layers with a window per layer without: their K/V form groups, some of which free blocks.
GEMMA = TARGET | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 24,
    "sliding_window_pattern": 3,
    "num_hidden_layers": 9,
    "rope_local_base_freq": 10000.0,
}


@pytest.mark.more
def test_a_drafter_of_other_heads_beside_windows_and_scaled_embeddings(tmp_path):
    target = write_target(tmp_path / "target", GEMMA)
    other = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    arguments = shapes(heads=(2, 1), size=32), {}, CONFIG | MIXED | other, "model.safetensors"
    head = write_head(tmp_path / "head", *arguments)
    serve_and_check(target, {"method": "dflash", "model": str(head), "num_speculative_tokens": K})


@pytest.mark.more
@pytest.mark.parametrize("from_anchor", [pytest.param(True, marks=pytest.mark.slow), False])
def test_drafts_of_a_known_chain_are_accepted_in_either_layout(tmp_path, from_anchor):
    """Without its layers, the target predicts each token from the previous one alone."""
    target = write_target(tmp_path / "target")
    (file,) = target.glob("*.safetensors")
    weights = mx.load(str(file))
    for name in weights:
        if "o_proj" in name or "down_proj" in name:
            weights[name] = mx.zeros_like(weights[name])
    mx.save_safetensors(str(file), weights, {"format": "mlx"})
    options = {"skip_tokenizer_init": True, "max_model_len": 256}
    prompt = np.random.default_rng(4).integers(0, VOCAB, 20).tolist()
    with engine(str(target), **options) as llm:
        (found,) = generate(llm, [prompt], greedy(160, detokenize=False))
    follows = dict(pairwise(found))
    assert all(follows[token] == then for token, then in pairwise(found))
    moves = torch.zeros((VOCAB, VOCAB))  # from the column's token to the row's
    moves[list(follows.values()), list(follows)] = 1e4
    chain = {
        "markov_head.markov_w1.weight": torch.eye(VOCAB),
        "markov_head.markov_w2.weight": moves,
    }
    layout = MARKOV | {"markov_rank": VOCAB, "sample_from_anchor": from_anchor}
    head = write_head(tmp_path / "head", shapes(), chain, CONFIG | layout, "model.safetensors")
    speculation = {"method": "dspark", "model": str(head), "num_speculative_tokens": K}
    with engine(
        str(target),
        speculative_config=speculation,
        additional_config={"fixed_draft_length": True},
        **options,
    ) as llm:
        (again,) = generate(llm, [prompt], greedy(160, detokenize=False))
        seen = counters(llm)
    assert again == found
    steps = seen["vllm:spec_decode_num_drafts"]
    assert seen["vllm:spec_decode_num_accepted_tokens"] >= (K - 0.5) * steps > 0
