# SPDX-License-Identifier: Apache-2.0
"""Disaggregated prefill on real servers with speculation equals a single server."""

import json
from contextlib import ExitStack

import numpy as np
import pytest
from e2e.fuzz.models import MAX_LEN, VOCAB, write_models
from e2e.harness import text_tokens
from e2e.peers import FOR_A_DECODER, transfer
from e2e.server import free_port, serve
from engine.spec_decode.fitted import FittedHeads

pytestmark = [pytest.mark.slow, pytest.mark.heavy, pytest.mark.timeout(900)]

BLOCK = 16
#: Tokens of prompts. For one past a block's end, a draft model drafts a step earlier behind
#: loaded K/V, see test_disaggregated_prefill.
LENGTHS = (BLOCK, 2 * BLOCK, 2 * BLOCK + 2, 5 * BLOCK, 200)
OPTIONS = (
    *("--served-model-name", "smollm2"),
    *("--kv-cache-memory-bytes", str(128 << 20), "--enable-prefix-caching"),
    *("--additional-config", '{"fixed_draft_length": true}'),
)


@pytest.fixture(scope="module")
def fitted(smollm2, tmp_path_factory):
    return FittedHeads(smollm2, text_tokens(smollm2)[:2048], tmp_path_factory.mktemp("heads"))


def counts(server):
    return [
        server.metric(f"vllm:spec_decode_num_{name}_tokens_total") for name in ("draft", "accepted")
    ]


def complete(server, prompt, max_tokens, **extra):
    client = server.client()
    return client.completions.create(
        model="smollm2",
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=0,
        extra_body={"ignore_eos": True} | extra,
    )


@pytest.mark.parametrize("method", ["ngram", "draft_model", "eagle"])
def test_text_and_drafts_are_those_of_one_server(smollm2, short, fitted, tmp_path, method):
    spec = {
        "ngram": lambda: {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1},
        "draft_model": lambda: {"method": "draft_model", "model": short},
        "eagle": lambda: fitted.speculation("eagle"),
    }[method]()
    address = f"127.0.0.1:{free_port()}"
    text = text_tokens(smollm2)
    with ExitStack() as stack:

        def start(name, config=None):
            more = [] if config is None else ["--kv-transfer-config", json.dumps(config)]
            speculation = ["--speculative-config", json.dumps(spec | {"num_speculative_tokens": 3})]
            options = [*OPTIONS, "--max-model-len", "1024", *speculation, *more]
            return stack.enter_context(serve(smollm2, options, tmp_path / name))

        p = start("p", transfer("kv_producer", listen=address))
        d = start("d", transfer("kv_consumer", peers=[address]))
        one = start("one")
        accepted = pulled = 0
        for number, length in enumerate(LENGTHS):
            prompt = text[500 * number : 500 * number + length]
            before = counts(one), counts(d)
            expected = complete(one, prompt, 24).choices[0].text
            said = complete(p, prompt, 1, kv_transfer_params=FOR_A_DECODER)
            params = said.model_extra["kv_transfer_params"]
            assert complete(d, prompt, 24, kv_transfer_params=params).choices[0].text == expected
            alone, apart = (
                [now - then for now, then in zip(counts(each), was, strict=True)]
                for each, was in zip((one, d), before, strict=True)
            )
            assert apart == alone, length
            accepted += alone[1]
            pulled += (length - 1) // BLOCK * BLOCK
        assert accepted > 0
        assert d.metric("vllm:external_prefix_cache_hits_total") == pulled


def test_states_travel_between_servers(tmp_path):
    """D pulls K/V up to P's last full block, and the hybrid's state there."""
    write_models(tmp_path)
    hybrid, address = str(tmp_path / "hybrid"), f"127.0.0.1:{free_port()}"
    spec = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    rng = np.random.default_rng(1)
    with ExitStack() as stack:

        def start(name, config=None):
            more = [] if config is None else ["--kv-transfer-config", json.dumps(config)]
            speculation = ["--speculative-config", json.dumps(spec | {"num_speculative_tokens": 3})]
            options = [*OPTIONS, "--max-model-len", str(MAX_LEN), *speculation, *more]
            return stack.enter_context(serve(hybrid, options, tmp_path / name))

        p = start("p", transfer("kv_producer", listen=address))
        d = start("d", transfer("kv_consumer", peers=[address]))
        one = start("one")
        for length in LENGTHS:
            prompt = rng.integers(1, VOCAB, length).tolist()
            expected = complete(one, prompt, 24).choices[0].text
            said = complete(p, prompt, 1, kv_transfer_params=FOR_A_DECODER)
            params = said.model_extra["kv_transfer_params"]
            assert complete(d, prompt, 24, kv_transfer_params=params).choices[0].text == expected
        pulled = sum((length - 1) // BLOCK * BLOCK for length in LENGTHS)
        assert d.metric("vllm:external_prefix_cache_hits_total") == pulled
