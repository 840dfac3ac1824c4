# SPDX-License-Identifier: Apache-2.0
"""Known models: their facts are those of their cards; fit without a model chooses among them."""

import json

import pytest

from vllm_metal.commands.cli import main
from vllm_metal.commands.fit.known import KNOWN

#: Billions of parameters, all and without embeddings, as the cards of Qwen/Qwen3-* say.
CARDS = {
    "0.6B": (0.6, 0.44),
    "1.7B": (1.7, 1.4),
    "4B": (4.0, 3.6),
    "8B": (8.2, 6.95),
    "14B": (14.8, 13.2),
    "30B-A3B": (30.5, 29.9),
}
NAMES = {f"mlx-community/Qwen3-{size}-4bit": size for size in CARDS}


def stored(known):
    """Of its matrices and vectors: how many numbers, and in how many bytes."""
    with known.folder() as path:
        content = (path / "model.safetensors").open("rb").read(1 << 24)
        size = (path / "model.safetensors").stat().st_size
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    numbers = {}
    for name, tensor in header.items():
        count = 1
        for side in tensor["shape"]:
            count *= side
        if not name.endswith((".scales", ".biases")):
            numbers[name] = count * (8 if tensor["dtype"] == "U32" else 1)  # 8 of 4 bits in each
    return numbers, size - 8 - length


@pytest.mark.parametrize("known", KNOWN, ids=lambda known: known.name)
def test_a_model_has_the_parameters_of_its_card(known):
    every, without_embeddings = CARDS[NAMES[known.name]]
    numbers, nbytes = stored(known)
    embeddings = sum(
        n for name, n in numbers.items() if "embed_tokens" in name or "lm_head" in name
    )
    total = sum(numbers.values())
    # Cards round to the digits they print; 0.6 and 0.44 among them.
    assert total / 1e9 == pytest.approx(every, abs=0.05)
    assert (total - embeddings) / 1e9 == pytest.approx(without_embeddings, abs=0.05)
    # 4 bits each, and for each 64 a scale and a bias of 16 bits; norms are in 16.
    assert nbytes / total == pytest.approx(4.5 / 8, rel=1e-3)


def test_they_are_of_different_sizes_the_largest_first():
    assert {known.name for known in KNOWN} == set(NAMES)
    sizes = [CARDS[NAMES[known.name]][0] for known in KNOWN]
    assert sizes == sorted(sizes, reverse=True)


def ask(capsys, *arguments):
    status = main(["fit", *arguments, "--json"])
    return status, json.loads(capsys.readouterr().out)


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
        with known.folder() as path:
            length = str(found["context"] if fits else 8192)
            status, again = ask(capsys, str(path), "--memory", memory, "--context", length)
        assert again["fits"] is fits
        if fits:
            assert again["weights"] == found["weights"]
            # The estimate of a step differs a little with the order in which MLX gives its graph.
            pools = [one["kv_cache"]["auto"]["pool"] for one in (found, again)]
            assert pools[0] == pytest.approx(pools[1], rel=0.01)


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
