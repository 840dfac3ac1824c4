# SPDX-License-Identifier: Apache-2.0
"""Estimates of a drafter equal what an engine loads and uses."""

import json

import mlx.core as mx
import numpy as np
import pytest
import torch
from cli.fit.models import read, settings
from engine.spec_decode import assistants, blocks, inkling
from engine.spec_decode.heads import engine_config, write_head, write_target
from engine.spec_decode.hybrids import write_hybrid
from engine.spec_decode.splitter import split
from engine.spec_decode.test_mtp import CASES
from engine.spec_decode.test_mtp import write as write_mtp
from engine.spec_decode.test_mtp_hybrids import parameters
from engine.spec_decode.test_mtp_split import without_layers
from mlx.utils import tree_flatten
from peaks import least_peak

from vllm_metal.cli.fit.drafter import Drafter, MTPDrafter
from vllm_metal.cli.fit.estimate import estimate
from vllm_metal.cli.fit.machine import Machine
from vllm_metal.cli.fit.step import step_peak
from vllm_metal.cli.main import main
from vllm_metal.engine.attention.layers import attention_layers
from vllm_metal.engine.kv_cache.scatter import SCATTER
from vllm_metal.engine.kv_cache.specs import kv_cache_specs
from vllm_metal.engine.memory import profile
from vllm_metal.engine.models import loader
from vllm_metal.engine.models.parts import ModelParts
from vllm_metal.engine.spec_decode import mtp
from vllm_metal.engine.spec_decode.registry import load_network

FLOAT = torch.float32


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    target = write_target(root / "target")
    (target / "tokenizer.json").write_text('{"model": {"vocab": {}}}')
    drafter = blocks.shapes(), {}, blocks.CONFIG, "model.safetensors"
    return target, write_head(root / "drafter", *drafter)


@pytest.mark.parametrize("bits", [None, 4])
def test_weights_and_pool_are_an_engines(folders, bits):
    target, drafter = folders
    options = {"additional_config": {"draft_quantization": bits}}
    model = loader.load(engine_config(target, drafter, "dflash", **options))
    parts = ModelParts(model)
    network = load_network(engine_config(target, drafter, "dflash", **options), parts)
    held = {id(array): array.nbytes for _, array in tree_flatten(network.drafter.parameters())}
    shared = {id(array) for _, array in tree_flatten(model.parameters())}
    found = Drafter.read(drafter, FLOAT, bits, None)
    assert found.weights == sum(size for at, size in held.items() if at not in shared)
    assert (found.method, found.num_drafts) == ("dflash", 4)

    config = settings(target, FLOAT, num_drafts=found.num_drafts)
    beside = found.add_to(read(target, FLOAT))
    layers = attention_layers(model, "llama")
    of_engine = [*layers, *network.layers]
    assert kv_cache_specs(beside.all_layers, 16, mx.float32) == kv_cache_specs(
        of_engine, 16, mx.float32
    )
    estimated = estimate(beside, config, Machine.mac(16 << 30))
    own = 2 * blocks.LAYERS * blocks.KV_HEADS * blocks.SIZE * 4
    assert estimated.draft_token_bytes == own and estimated.token_bytes > own


@pytest.mark.more
def test_weights_of_an_assistant_are_an_engines(tmp_path):
    target, head = assistants.write_pair(tmp_path, 128)
    config = engine_config(target, head, "mtp")
    model = loader.load(config)
    network = load_network(config, ModelParts(model))
    shared = {id(array) for _, array in tree_flatten(model.parameters())}
    held = [array for _, array in tree_flatten(network.head.parameters())]
    found = Drafter.read(head, FLOAT, None, None)
    assert found.weights == sum(array.nbytes for array in held if id(array) not in shared) > 0
    assert (found.method, found.num_drafts) == ("mtp", 3)
    alone = read(target, FLOAT)
    beside = found.add_to(alone)
    assert beside.all_layers == alone.all_layers and beside.draft_weights == found.weights
    with pytest.raises(ValueError, match=r"--draft-quantization 4 is not supported with Gemma 4"):
        Drafter.read(head, FLOAT, 4, None)
    assert MTPDrafter.find(str(target)) is None
    place = head.rename(f"{target}-assistant")
    by_default = MTPDrafter.find(str(target))
    assert by_default == MTPDrafter(place, 3)
    assert by_default.add_to(alone).draft_weights == found.weights


def test_the_peak_of_a_step_that_writes_a_drafters_context(folders):
    target, drafter = folders
    options = engine_config(target, drafter, "dflash")
    model = loader.load(options)
    parts = ModelParts(model)
    network = load_network(options, parts)
    found = Drafter.read(drafter, FLOAT, None, None)
    config = settings(target, FLOAT, num_drafts=found.num_drafts)
    beside = found.add_to(read(target, FLOAT))
    forward = [*attention_layers(model, "llama"), *network.context_layers]

    def run():
        profile.profile_step(parts, forward, config, SCATTER)

    run()  # what only a first one takes
    recorded = beside.parts, beside.forward_layers, config, SCATTER, "cpu"
    assert step_peak(*recorded)[0].forward == pytest.approx(least_peak(run), rel=0.03)


@pytest.mark.more
def test_the_command_prints_both_terms_and_how_to_serve_them(folders, capsys):
    target, drafter = map(str, folders)
    asked = ["fit", target, "--draft-model", drafter, "--memory", "16GB"]
    assert main([*asked, "--draft-quantization", "8"]) == 0
    out = capsys.readouterr().out
    assert "weights of the drafter" in out and "of the drafter" in out
    command = next(line for line in out.splitlines() if "vllm serve" in line)
    assert '"method": "dflash"' in command and '"draft_quantization": 8' in command
    assert main([*asked, "--json"]) == 0
    with_drafter = json.loads(capsys.readouterr().out)
    assert with_drafter["draft_weights"] > 0
    assert main(["fit", target, "--memory", "16GB", "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    (cache, before) = (each["kv_cache"]["auto"] for each in (with_drafter, alone))
    assert cache["token_bytes"] - cache["draft_token_bytes"] == before["token_bytes"]
    assert alone["draft_weights"] == before["draft_token_bytes"] == 0


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--num-speculative-tokens", "8"], "the maximum is 7"),
        (["--tensor-parallel-size", "2"], "several ranks"),
    ],
)
def test_options_that_do_not_go_with_it(folders, capsys, options, why):
    target, drafter = map(str, folders)
    assert main(["fit", target, "--draft-model", drafter, "--memory", "16GB", *options]) != 0
    assert why in capsys.readouterr().err


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A model whose checkpoint contains its MTP layer."""
    folder = write_hybrid(tmp_path_factory.mktemp("models") / "whole", "qwen3_next")
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {}}}')
    return folder


@pytest.mark.parametrize("options", [None, {"q_bits": 4, "q_group_size": 32}])
def test_a_models_mtp_layer_is_an_engines(whole, tmp_path, monkeypatch, options):
    heads, make = [], mtp.MTPHead
    monkeypatch.setattr(mtp, "MTPHead", lambda *of: heads.append(make(*of)) or heads[-1])
    target = layers = whole
    if options is not None:
        target = without_layers(whole, tmp_path / "target")
        layers = split(whole, tmp_path / "target-mtp", **options)
    model = loader.load(engine_config(target, layers, "mtp"))
    parts = ModelParts(model)
    network = load_network(engine_config(target, layers, "mtp"), parts)
    (head,) = heads
    found = MTPDrafter.find(str(target))
    assert (found.folder, found.num_drafts) == (layers, 3)
    beside = found.add_to(read(target, FLOAT))
    assert beside.draft_weights == sum(a.nbytes for a in parameters(head).values())
    of_engine = [*attention_layers(model, "qwen3_next"), *network.layers]
    assert kv_cache_specs(beside.all_layers, 16, mx.float32) == kv_cache_specs(
        of_engine, 16, mx.float32
    )


def test_several_mtp_layers_are_an_engines(tmp_path):
    """Their common parts are counted once."""
    config, shapes, *_ = CASES["exaone_moe, several layers"]
    target = write_mtp(tmp_path / "target", config, shapes)
    model = loader.load(engine_config(target, target, "mtp"))
    network = load_network(engine_config(target, target, "mtp"), ModelParts(model))
    beside = MTPDrafter.find(str(target)).add_to(read(target, FLOAT))
    counted = {name: 4 * np.prod(shape) for name, shape in shapes.items()}
    assert beside.draft_weights == sum(counted.values())
    specs = [kv_cache_specs(each, 16, mx.float32) for each in (beside.draft_layers, network.layers)]
    assert len(network.layers) == 4 and specs[0] == specs[1]


@pytest.mark.parametrize("count", [pytest.param(4, marks=pytest.mark.more), 8])
def test_inklings_mtp_layers_are_an_engines(tmp_path, count):
    """Only those that draft by default are counted, with the inputs of their convolutions."""
    target = inkling.write_inkling(tmp_path / "target", count, local=(0,))
    (target / "tokenizer.json").write_text('{"model": {"vocab": {}}}')
    config = engine_config(target, target, "mtp", **inkling.TEXT_ALONE)
    config.speculative_config.num_speculative_tokens = drafts = 3
    network = load_network(config, ModelParts(loader.load(config)))
    found = MTPDrafter.find(str(target))
    beside = found.add_to(read(target, FLOAT))
    shapes = inkling.mtp_shapes(drafts, (0,), False)
    assert found.num_drafts == drafts
    assert beside.draft_weights == sum(4 * np.prod(shape) for shape in shapes.values())
    specs = [kv_cache_specs(each, 16, mx.float32) for each in (beside.draft_layers, network.layers)]
    assert len(network.layers) == 4 * drafts and specs[0] == specs[1]


def asked(target, capsys, *options):
    """Returns the JSON printed by `fit`."""
    main(["fit", str(target), "--memory", "16GB", "--json", *options])
    return json.loads(capsys.readouterr().out)


def test_the_command_counts_a_layer_that_drafts_by_default(whole, tmp_path, capsys):
    found = asked(whole, capsys)
    assert found["draft_weights"] > 0 and found["kv_cache"]["auto"]["draft_token_bytes"] > 0
    assert not any("speculative" in command for command in found["commands"])
    assert asked(without_layers(whole, tmp_path / "alone"), capsys)["draft_weights"] == 0
    others = ({"--num-speculative-tokens": "2"}, {"--max-loras": "1"}, {"--runner": "pooling"})
    for options in others:
        (pair,) = options.items()
        assert asked(whole, capsys, *pair)["draft_weights"] == 0
    # Where the requests only fit without the layer, an engine does without it.
    little = ("--gpu-memory-utilization", "0.03", "--max-num-batched-tokens", "2048")
    few, more = (asked(folder, capsys, *little) for folder in (whole, tmp_path / "alone"))
    counts = [each["kv_cache"]["auto"]["requests"] for each in (few, more)]
    assert 0 < counts[0] < counts[1] < 2048
    between = asked(whole, capsys, *little, "--context", "512", "--requests", str(sum(counts) // 2))
    assert between["fits"] and between["draft_weights"] == 0
