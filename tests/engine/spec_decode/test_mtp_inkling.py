# SPDX-License-Identifier: Apache-2.0
"""Inkling's MTP layers: hidden states and drafts equal vLLM's torch class."""

import mlx.core as mx
import numpy as np
import pytest
from e2e.harness import Dense, counters, engine, generate, greedy
from engine.models.cases import cases
from engine.spec_decode.heads import (
    TIE,
    VOCAB,
    Bench,
    K,
    check_chunks_and_rejections,
    engine_config,
)
from engine.spec_decode.inkling import TEXT, TEXT_ALONE, Judge, write_inkling
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs

from vllm_metal.engine.attention.conv_input_layer import ConvInputCache
from vllm_metal.engine.models import loader, parts
from vllm_metal.engine.spec_decode.mtp_chain import MTPChain
from vllm_metal.engine.spec_decode.registry import load_network

#: Arguments of `write_inkling`.
KINDS = {
    "windows and full attention": {"local": (0, 2)},
    "a norm after each layer": {"local": (1,), "chained": True},
    "windows alone": {"local": tuple(range(K))},
}


@pytest.fixture(
    scope="module",
    params=cases(KINDS, ["windows and full attention"], ["a norm after each layer"]),
)
def bench(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "target"
    write_inkling(folder, **KINDS[request.param])
    config = engine_config(folder, folder, "mtp", **TEXT_ALONE)
    return Bench(config, Judge(config, folder))


@pytest.mark.usefixtures("unfused")
def test_drafts_are_vllms(bench, monkeypatch):
    """Also beside a prompt in chunks, after a hit, and with any drafts accepted."""
    check_chunks_and_rejections(bench, found=2)
    seen, choose = [], MTPChain.tokens
    monkeypatch.setattr(MTPChain, "tokens", lambda *of: seen.append(of) or choose(*of))
    text = bench.token_ids_np[1, : bench.known[1]].tolist()
    drafts = np.array(bench.proposer.propose(bench.request([1], [K])).token_ids)[0].tolist()
    wanted = bench.judge.hidden(text, drafts).numpy()
    (head, *_), outputs = seen[0], mx.concatenate([each for _, each in seen])
    assert outputs.shape == wanted.shape and np.abs(np.array(outputs) - wanted).max() < 1e-4
    # The target divides by a width before its head, which changes no choice.
    own = head.lm_head(outputs / TEXT["logits_mup_width_multiplier"])[:, :VOCAB]
    logits = bench.judge(text, drafts)
    assert np.abs(np.array(own) - logits).max() < 1e-4 and logits.std() > 1
    assert (logits.max(-1) - logits[np.arange(K), drafts] <= TIE).all()


LENGTHS = (1, 17, 40, 100)  # of prompts


def served(folder, **options):
    """Serves prompts twice, checks their text, and returns the counters."""
    rng, dense = np.random.default_rng(1), Dense(str(folder))
    prompts = [rng.integers(0, VOCAB, length).tolist() for length in LENGTHS]
    with engine(
        str(folder), skip_tokenizer_init=True, max_model_len=256, **TEXT_ALONE, **options
    ) as llm:
        for _ in range(2):
            outputs = generate(llm, prompts, greedy(60, detokenize=False))
            for prompt, tokens in zip(prompts, outputs, strict=True):
                dense.check(prompt, tokens)
        return counters(llm)


@pytest.mark.usefixtures("unfused")
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param(
            {"async_scheduling": False, "max_num_batched_tokens": 48}, marks=pytest.mark.more
        ),
    ],
    ids=["by default", "in small steps"],
)
def test_served_with_drafts_that_are_mostly_right(tmp_path, monkeypatch, options):
    """Text is the target's, with rejected drafts, and after a hit."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    seen = served(write_inkling(tmp_path / "target", local=(0, 2), planted=True), **options)
    drafted = seen["vllm:spec_decode_num_draft_tokens"]
    assert drafted / 2 < seen["vllm:spec_decode_num_accepted_tokens"] < drafted
    assert seen["vllm:spec_decode_num_accepted_tokens_per_pos:2"] > 0
    assert seen["vllm:prefix_cache_hits"] > 0


@pytest.mark.usefixtures("unfused")
def test_prompts_that_end_just_behind_a_block(tmp_path, monkeypatch):
    """Their last tokens are computed, too, though a chunk ends between those that layers read."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    folder = write_inkling(tmp_path / "target", local=(0, 2), planted=True)
    prompt = np.random.default_rng(1).integers(0, VOCAB, 34).tolist()
    others = [*prompt[:-3], 1, 2, 3]
    prompts, dense = {"0": prompt, "1": prompt, "2": others}, Dense(str(folder))
    small = {"max_model_len": 256, "max_num_batched_tokens": 34, "max_num_seqs": 4}
    with engine(str(folder), skip_tokenizer_init=True, **small, **TEXT_ALONE) as llm:
        core, answers = llm.llm_engine, {}
        for req_id, token_ids in prompts.items():
            params = greedy(20, detokenize=False)
            core.add_request(req_id, {"prompt_token_ids": token_ids}, params)
        for _ in range(100):
            done = [output for output in core.step() if output.finished]
            answers |= {output.request_id: list(output.outputs[0].token_ids) for output in done}
        seen = counters(llm)
    assert answers.keys() == prompts.keys()
    for req_id, tokens in answers.items():
        dense.check(prompts[req_id], tokens)
    assert seen["vllm:spec_decode_num_accepted_tokens"] > 0


def forget(found):
    """The inputs before each request's tokens are zeros."""
    return [mx.concatenate([mx.zeros_like(rows[:, :3]), rows[:, 3:]], axis=1) for rows in found]


def shift(found):
    """Each token reads the inputs of the position before."""
    return [mx.concatenate([rows[:, :1], rows[:, :-1]], axis=1) for rows in found]


@pytest.mark.usefixtures("unfused")
@pytest.mark.parametrize("fault", [None, forget, pytest.param(shift, marks=pytest.mark.more)])
def test_drafts_depend_on_the_inputs_before_them(tmp_path, monkeypatch, fault):
    """With one draft per step, all older inputs of a convolution are those of earlier steps."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    if fault is not None:
        exchange = ConvInputCache.exchange
        monkeypatch.setattr(ConvInputCache, "exchange", lambda *of: fault(exchange(*of)))
    one = {"method": "mtp", "num_speculative_tokens": 1}
    fixed = {"fixed_draft_length": True}
    seen = served(
        write_inkling(tmp_path / "target", planted=True),
        speculative_config=one,
        additional_config=fixed,
    )
    drafted = seen["vllm:spec_decode_num_draft_tokens"]
    assert (seen["vllm:spec_decode_num_accepted_tokens"] > 0.7 * drafted) == (fault is None)


def configured(folder, **options):
    args = EngineArgs(
        str(folder), skip_tokenizer_init=True, max_model_len=256, **TEXT_ALONE, **options
    )
    return args.create_engine_config()


@pytest.mark.parametrize(
    ("count", "drafts"), [(8, 3), *(pytest.param(n, n, marks=pytest.mark.more) for n in (2, 1))]
)
def test_each_layer_drafts_one_token(tmp_path, count, drafts):
    folder = write_inkling(tmp_path / "target", count)
    for given in ({}, {"speculative_config": {"method": "mtp"}}):
        config = configured(folder, **given)
        assert config.num_speculative_tokens == drafts
    network = load_network(config, parts.ModelParts(loader.load(config)))
    assert len({layer.place for layer in network.layers}) == drafts


#: Arguments of `write_inkling`, options, and the error's text.
REFUSED = {
    "a key": ({"a_mechanism": 2}, {}, "mtp_config.a_mechanism=2 in config.json is not supported"),
    "more drafts": ({"count": 1}, {"num_speculative_tokens": 2}, "1 MTP layers.*choose 1 or fewer"),
    "a store": ({}, {"num_speculative_tokens": 1}, "MTP layers of Inkling and a KV connector"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_rejected_with(tmp_path, name):
    given, speculation, reason = REFUSED[name]
    folder = write_inkling(tmp_path / "target", **given)
    store = KVTransferConfig("MetalKVConnector", kv_role="kv_both") if name == "a store" else None
    with pytest.raises(ValueError, match=reason):
        configured(
            folder,
            speculative_config={"method": "mtp"} | speculation,
            kv_transfer_config=store,
        )
    if name == "a key":
        assert configured(folder).speculative_config is None


def test_a_norm_without_its_key_is_rejected(tmp_path):
    folder = write_inkling(tmp_path / "target", chained=True, chain_hidden_post_norm=False)
    config = configured(folder, speculative_config={"method": "mtp"})
    with pytest.raises(
        loader.ModelLoadError, match=r"(?s)norm.weight.*chain_hidden_post_norm=False"
    ):
        load_network(config, parts.ModelParts(loader.load(config)))
