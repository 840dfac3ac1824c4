# SPDX-License-Identifier: Apache-2.0
"""Known models have the hub's sizes and are supported; fit chooses among them."""

import json
from contextlib import contextmanager

import pytest

from vllm_metal.cli.fit.known import KNOWN
from vllm_metal.cli.main import main
from vllm_metal.engine.config_json.reference_code import listed_by_vllm
from vllm_metal.engine.memory.planner import ROUNDING
from vllm_metal.engine.models import architectures
from vllm_metal.engine.weights import files
from vllm_metal.engine.weights.judge import plan_of
from vllm_metal.settings.architectures import TEXT_PARTS, WITH_IMAGES

SERVED = {*listed_by_vllm("_TEXT_GENERATION_MODELS"), *TEXT_PARTS, *WITH_IMAGES}


@contextmanager
def downloaded(known):
    """Writes the model's folder with the tokenizer that `fit` requires."""
    with known.folder() as path:
        (path / "tokenizer.json").write_text('{"model": {}}')
        yield path


@pytest.fixture(scope="module", params=KNOWN, ids=lambda known: known.name)
def folder(request):
    with downloaded(request.param) as path:
        yield request.param, path


def test_a_model_has_the_size_that_the_hub_says(folder):
    known, path = folder
    size = (path / "model.safetensors").stat().st_size / 1e9
    # The hub rounds to the digits that it prints.
    assert size == pytest.approx(known.size, rel=0.01, abs=0.04)


def test_its_architecture_and_format_are_served(folder):
    """Asks the functions that `vllm serve` and `fit` call before they build a model."""
    content = json.loads((folder[1] / "config.json").read_text())
    assert set(content["architectures"]) <= SERVED
    architectures.check(content)
    assert plan_of(content, files.headers(folder[1]), folder[1])


def test_they_are_of_different_sizes_the_largest_first():
    sizes = [known.size for known in KNOWN]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == len(sizes)


def ask(capsys, *arguments):
    status = main(["fit", *arguments, "--json"])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_its_network_is_built_and_fits_the_largest_mac(folder, capsys):
    status, found = ask(capsys, str(folder[1]), "--memory", "256GB", "--context", "8k")
    assert status == 0 and found["fits"]


@pytest.mark.more
@pytest.mark.parametrize(
    "memory", ["16GB", *(pytest.param(each, marks=pytest.mark.slow) for each in ("8GB", "64GB"))]
)
def test_without_a_model_the_largest_that_fits_is_named(memory, capsys):
    status, found = ask(capsys, "--memory", memory)
    assert status == 0 and found["fits"] and found["context"] >= 8192
    assert found["commands"][0].startswith(f"vllm serve {found['model']} --max-model-len ")
    chosen = [known.name for known in KNOWN].index(found["model"])
    # fit itself says so of it, and says no of the next larger one.
    for known, fits in ((KNOWN[chosen], True), *((k, False) for k in KNOWN[:chosen][-1:])):
        with downloaded(known) as path:
            length = str(found["context"] if fits else 8192)
            status, again = ask(capsys, str(path), "--memory", memory, "--context", length)
        assert again["fits"] is fits
        if fits:
            assert again["weights"] == found["weights"]
            # The estimate of a step differs a little with the order in which MLX gives its graph:
            # by a few of what peaks are rounded to, whatever the pool's size.
            pools = [one["kv_cache"]["auto"]["pool"] for one in (found, again)]
            assert pools[0] == pytest.approx(pools[1], abs=4 * ROUNDING)


def test_a_machine_that_is_too_small_is_told_what_would_help(capsys):
    status, found = ask(capsys, "--memory", "1GB")
    assert status == 1 and not found["fits"]
    assert found["model"] == KNOWN[-1].name and found["commands"] == []


@pytest.mark.slow
def test_options_of_the_server_count(capsys):
    _, alone = ask(capsys, "--memory", "8GB", "--context", "8k")
    _, many = ask(capsys, "--memory", "8GB", "--context", "8k", "--requests", "4")
    names = [known.name for known in KNOWN]
    assert names.index(many["model"]) > names.index(alone["model"])
    assert many["requests"] == 4
