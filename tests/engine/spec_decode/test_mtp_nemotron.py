# SPDX-License-Identifier: Apache-2.0
"""Nemotron-H's MTP layer: hidden states and drafts equal vLLM's torch class."""

import json

import mlx.core as mx
import numpy as np
import pytest
from e2e.harness import Dense, counters, engine, generate, greedy
from engine.models.cases import cases
from engine.spec_decode.heads import BLOCK, Bench, K, engine_config
from engine.spec_decode.nemotron import Judge, write_nemotron
from vllm.engine.arg_utils import EngineArgs

from vllm_metal.engine.models import loader, parts
from vllm_metal.engine.spec_decode.mtp import MTPHead
from vllm_metal.engine.spec_decode.registry import load_network

#: Changes of config.json.
KINDS = {
    "attention and MoE": {},
    "attention and MoE, twice": {"mtp_layers_block_type": ["attention", "moe"] * 2},
    "attention alone, windowed": {"mtp_layers_block_type": ["attention"], "sliding_window": 20},
}


@pytest.fixture(
    scope="module", params=cases(KINDS, ["attention and MoE, twice"], ["attention and MoE"])
)
def bench(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "target"
    write_nemotron(folder, **KINDS[request.param])
    config = engine_config(folder, folder, "mtp")
    return Bench(config, Judge(config, folder))


@pytest.mark.usefixtures("unfused")
def test_drafts_are_vllms(bench, monkeypatch):
    """Also beside a prompt in chunks, and with any drafts accepted."""
    seen, choose = [], MTPHead.tokens
    monkeypatch.setattr(MTPHead, "tokens", lambda *of: seen.append(of[1]) or choose(*of))
    bench.begin(0, bench.prompt(3 * BLOCK + 3))
    bench.begin(1, bench.prompt(2))
    assert bench.step([0, 1], [0, 0], chunk=20) == [0, 0]
    counts = [bench.step([1, 0], [K, 0], chunk=20) for _ in range(2)]
    assert counts == [[K, 0], [K, 0]]
    drafted = 0
    for _ in range(6):
        drafted += sum(bench.step(bench.rng.permutation(2), bench.rng.integers(0, K + 1, 2)))
    assert drafted > 10
    seen.clear()
    text = bench.token_ids_np[1, : bench.known[1]].tolist()
    drafts = np.array(bench.proposer.propose(bench.request([1], [K])).token_ids)[0].tolist()
    wanted = bench.judge.hidden(text, drafts).numpy()
    assert len(seen) == K
    assert np.abs(np.array(mx.concatenate(seen)) - wanted).max() < 1e-4


@pytest.mark.usefixtures("unfused")
def test_served_with_drafts_that_are_mostly_right(tmp_path, monkeypatch):
    """By default; text is mlx-lm's, also after a prefix hit."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    folder = str(write_nemotron(tmp_path / "target", guessable=True))
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 128, length).tolist() for length in (1, 17, 100)]
    dense = Dense(folder)
    with engine(folder, skip_tokenizer_init=True, max_model_len=256) as llm:
        for _ in range(2):
            outputs = generate(llm, prompts, greedy(60, detokenize=False))
            for prompt, tokens in zip(prompts, outputs, strict=True):
                dense.check(prompt, tokens)
        seen = counters(llm)
    drafted = seen["vllm:spec_decode_num_draft_tokens"]
    assert drafted / 2 < seen["vllm:spec_decode_num_accepted_tokens"] < drafted
    assert seen["vllm:prefix_cache_hits"] > 0


def configured(folder, **speculation):
    args = EngineArgs(
        str(folder), skip_tokenizer_init=True, max_model_len=256, speculative_config=speculation
    )
    return args.create_engine_config()


@pytest.mark.parametrize("depth", [0, 2])
def test_another_number_of_layers_is_rejected(tmp_path, depth):
    folder = write_nemotron(tmp_path / "target", num_nextn_predict_layers=depth)
    with pytest.raises(ValueError, match=f"num_nextn_predict_layers={depth} in config.json is not"):
        configured(folder, method="mtp")
    args = EngineArgs(str(folder), skip_tokenizer_init=True, max_model_len=256)
    assert args.create_engine_config().speculative_config is None


#: Changes of config.json, and the error's text.
REFUSED = {
    "recurrent": ({"mtp_layers_block_type": ["mamba", "moe"]}, "mtp_layers_block_type"),
    "without attention": ({"mtp_layers_block_type": ["moe"]}, "mtp_layers_block_type"),
    "a key": ({"mtp_n_routed_experts": 4}, "mtp_n_routed_experts=4, which is not supported"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_key_that_is_not_computed_is_named(tmp_path, name):
    changes, reason = REFUSED[name]
    folder = write_nemotron(tmp_path / "target")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    config = configured(folder, method="mtp")
    model = loader.load(config)
    with pytest.raises(NotImplementedError, match=reason):
        load_network(config, parts.ModelParts(model))
