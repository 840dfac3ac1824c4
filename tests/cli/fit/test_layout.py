# SPDX-License-Identifier: Apache-2.0
"""Memory of each of several ranks, estimated and in a loaded rank."""

import json
from argparse import Namespace
from functools import partial
from pathlib import Path

import pytest
import torch
from cli.fit.models import settings, write
from engine.models.plain import FAMILIES
from engine.models.recurrent import FAMILIES as OF_STATES
from engine.models.recurrent import write_model
from peaks import least_peak

from vllm_metal.cli.fit.estimate import Model
from vllm_metal.cli.fit.layout import Layout
from vllm_metal.cli.fit.step import step_peak
from vllm_metal.cli.main import main
from vllm_metal.engine.kv_cache.scatter import SCATTER
from vllm_metal.engine.memory import profile
from vllm_metal.engine.models.loader import weight_bytes
from vllm_metal.engine.models.stage import Stage
from vllm_metal.engine.worker.networks import Networks

#: Bytes in bfloat16 of a small Llama: three layers, 128 wide, heads of 32 and 600 token ids.
LAYER = 2 * (4 * 128 * 128 + 3 * 128 * 320 + 2 * 128)
EMBEDDING = 2 * 600 * 128
NORM = 2 * 128


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return str(write(tmp_path_factory.mktemp("llama"), "llama"))


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return str(write(tmp_path_factory.mktemp("tied"), "llama, grouped, tied"))


def ask(capsys, *arguments):
    status = main(["fit", *arguments, "--json"])
    return status, json.loads(capsys.readouterr().out)


def ranks(capsys, *arguments):
    _, found = ask(capsys, *arguments, "--memory", "16GB")
    return found["ranks"]


def test_a_rank_has_its_layers_and_the_ends_the_embedding_and_the_head(llama, capsys):
    first, last = ranks(capsys, llama, "--pipeline-parallel-size", "2")
    assert (first["layers"], last["layers"]) == ([0, 2], [2, 3])
    # The norm behind all layers is on both.
    assert first["weights"] == 2 * LAYER + EMBEDDING + NORM
    assert last["weights"] == LAYER + EMBEDDING + NORM
    kv = [rank["kv_cache"]["auto"]["token_bytes"] for rank in (first, last)]
    assert kv == [2 * 512, 512]  # bytes a layer: K and V of four heads


def test_where_embedding_and_head_are_one_both_ends_have_it_and_no_other(tied, capsys):
    weights = [rank["weights"] for rank in ranks(capsys, tied, "--pipeline-parallel-size", "3")]
    (whole,) = ranks(capsys, tied)
    assert weights[0] == weights[2] == weights[1] + EMBEDDING
    assert sum(weights) == whole["weights"] + EMBEDDING + 2 * NORM


def test_layers_lie_as_the_variable_says(llama, capsys, monkeypatch):
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "1,2")
    found = ranks(capsys, llama, "--pipeline-parallel-size", "2")
    assert [rank["layers"] for rank in found] == [[0, 1], [1, 3]]


def test_the_rank_with_the_least_room_decides(llama, capsys):
    line = [llama, "--memory", "16GB", "--pipeline-parallel-size", "2"]
    _, found = ask(capsys, *line)
    tokens = [rank["kv_cache"]["auto"]["tokens"] for rank in found["ranks"]]
    assert tokens[0] < tokens[1]
    assert found["kv_cache"]["auto"]["tokens"] == tokens[0]
    main(["fit", *line])
    text = capsys.readouterr().out
    assert "2 ranks on 2 such machines" in text
    assert "has room for the fewest tokens" in text


@pytest.mark.parametrize("tensor", [1, pytest.param(2, marks=pytest.mark.more)])
def test_a_rank_has_a_machine_unless_nnodes_says_otherwise(llama, capsys, tensor):
    line = [llama, "--memory", "16GB", "--pipeline-parallel-size", "2"]
    line += ["--tensor-parallel-size", str(tensor)] if tensor > 1 else []
    size, totals, commands = 2 * tensor, {}, {}
    parts = {None: 1, 2: tensor, 1: size} if tensor > 1 else {None: 1, 1: size}
    for machines in parts:
        nnodes = ["--nnodes", str(machines)] if machines else []
        _, found = ask(capsys, *line, *nnodes)
        totals[machines] = found["kv_cache"]["auto"]["memory"]["total"]
        commands[machines] = found["commands"][0]
        assert [rank["rank"] for rank in found["ranks"]] == list(range(size))
    assert totals == {machines: totals[None] // part for machines, part in parts.items()}
    assert f"--nnodes {size} --node-rank 0 --master-addr ADDRESS" in commands[None]
    assert "--nnodes" not in commands[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--pipeline-parallel-size", "2", "--nnodes", "3"],
            "--nnodes=3 with --pipeline-parallel-size: choose a number that divides 2 ranks",
        ),
        (["--nnodes", "2"], "--nnodes=2 with neither --pipeline-parallel-size nor"),
        (
            ["--pipeline-parallel-size", "4"],
            "--pipeline-parallel-size=4 exceeds the 3 layers of the model",
        ),
        (
            ["--pipeline-parallel-size", "2", "--runner", "pooling"],
            "--runner pooling is not supported with --pipeline-parallel-size",
        ),
        (
            ["--tensor-parallel-size", "2", "--data-parallel-size-local", "2"],
            "--data-parallel-size-local is not supported with --tensor-parallel-size",
        ),
    ],
)
def test_what_cannot_be_is_one_line(llama, capsys, options, message):
    assert main(["fit", llama, "--memory", "16GB", *options]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def with_tokenizer(model):
    Path(model, "tokenizer.json").write_text('{"model": {}}')
    return model


def test_a_family_that_the_engine_does_not_divide_is_refused_in_its_words(tmp_path, capsys):
    model = with_tokenizer(write_model(FAMILIES["afm7"], tmp_path / "afm7"))
    assert main(["fit", model, "--memory", "16GB", "--pipeline-parallel-size", "2"]) == 1
    assert (
        "--pipeline-parallel-size is not supported with model_type 'afm7' ("
        in capsys.readouterr().err
    )


def test_drafts_beside_states_are_refused_by_layers(tmp_path, capsys):
    model = with_tokenizer(write_model(OF_STATES["qwen3_next"], tmp_path / "qwen3_next"))
    ranks = ("--memory", "16GB", "--pipeline-parallel-size", "2")
    assert main(["fit", model, *ranks, "--num-speculative-tokens", "2"]) == 1
    assert (
        "--num-speculative-tokens is not supported with --pipeline-parallel-size"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        pytest.param("llama", 0, marks=pytest.mark.more),
        pytest.param("qwen3_moe, 4 bits", 1, marks=pytest.mark.more),
        pytest.param("llama", 1, marks=pytest.mark.slow),
        pytest.param("gemma3, windows", 0, marks=pytest.mark.slow),
        pytest.param("gemma3, windows", 1, marks=pytest.mark.slow),
        pytest.param("qwen3_moe, 4 bits", 0, marks=pytest.mark.slow),
    ],
)
def test_a_ranks_weights_and_its_step_are_those_of_one_that_is_loaded(folder, name, rank):
    path = folder(name)
    config = settings(path, torch.float32)
    loaded = Networks.load_stage(config, partial(Stage.of, rank=rank, size=2))

    def run():
        profile.profile_step(loaded.target, loaded.layers, config, SCATTER)

    run()  # what only a first one takes
    measured = least_peak(run)
    options = {"pipeline_parallel_size": 2, "tensor_parallel_size": None, "nnodes": None}
    layout = Layout.of(
        Namespace(**options, data_parallel_size_local=None, runner=None, max_loras=None)
    )
    family = config.model_config.hf_config.model_type
    model = Model.read(path, family, torch.float32, stage_of=layout.stage_of(rank))
    assert model.weights == weight_bytes(loaded.target.model)
    assert [layer.name for layer in model.layers] == [layer.name for layer in loaded.layers]
    found, _ = step_peak(model.parts, model.layers, config, SCATTER, "cpu")
    assert found.forward == pytest.approx(measured, rel=0.15)
