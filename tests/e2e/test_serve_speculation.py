# SPDX-License-Identifier: Apache-2.0
"""A server with speculation, prefix caching and sleep mode all on, through the OpenAI client."""

import json
import re
import time
import urllib.request

import pytest
from e2e.harness import Dense, text_tokens
from e2e.server import serve

pytestmark = [pytest.mark.heavy, pytest.mark.slow]

SPECULATION = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 4,
}
OPTIONS = (
    *("--served-model-name", "smollm2"),
    *("--max-model-len", "512"),
    *("--kv-cache-memory-bytes", str(96 << 20)),
    *("--speculative-config", json.dumps(SPECULATION)),
    *("--additional-config", '{"fixed_draft_length": true}'),
    "--enable-prompt-tokens-details",
    "--enable-sleep-mode",
)


@pytest.fixture(scope="module")
def server(smollm2, tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "log"
    # Dev mode: the endpoints for sleeping. Log line every second instead of every ten.
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_LOG_STATS_INTERVAL": "1"}
    with serve(smollm2, OPTIONS, log, environment=environment) as started:
        yield started


@pytest.fixture(scope="module")
def prompt(smollm2):
    return text_tokens(smollm2)[:40] * 3  # a text that repeats itself


def stream(server, prompt, num_tokens=24):
    """Returns a stream's token ids, and the number of cached prompt tokens."""
    with server.client() as client:
        chunks = list(
            client.completions.create(
                model="smollm2",
                prompt=prompt,
                temperature=0,
                max_tokens=num_tokens,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )
        )
    tokens = [token for chunk in chunks for choice in chunk.choices for token in choice.token_ids]
    return tokens, chunks[-1].usage.prompt_tokens_details.cached_tokens


def test_drafts_and_cache_hits_in_one_stream(server, smollm2, prompt):
    (cold, _), (warm, cached) = stream(server, prompt), stream(server, prompt)
    assert cached == len(prompt) // 16 * 16
    assert cold == warm and len(cold) == 24
    Dense(smollm2).check(prompt, cold)
    assert server.metric("vllm:spec_decode_num_accepted_tokens_total") > 0
    assert server.metric("vllm:spec_decode_num_accepted_tokens_per_pos_total", position="0") > 0
    assert server.metric("vllm:prefix_cache_hits_total") >= cached


def test_the_log_has_both_figures(server, prompt):
    figures = r"Prefix cache hit rate: [1-9][\d.]*%(.|\n)*Mean acceptance length: [\d.]+"
    deadline = time.monotonic() + 120
    while not re.search(figures, server.log.read_text()):
        assert time.monotonic() < deadline, server.log.read_text()[-2000:]
        stream(server, prompt, 4)


def test_a_grammar_holds_with_drafts(server):
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}}
    schema |= {"required": ["city"], "additionalProperties": False}
    with server.client() as client:
        answer = client.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": 'Repeat: {"city": "Rome"} {"city": "Rome"}'}],
            max_tokens=40,
            temperature=0,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "place", "schema": schema},
            },
        )
    assert json.loads(answer.choices[0].message.content)["city"] in ("Paris", "Rome")


def test_min_p_and_logit_bias_hold_with_drafts(server, prompt):
    """The likeliest token is forbidden, and with min_p 1 only the next in line is left: again and
    again, so that drafts are right."""

    def continue_with(**options):
        with server.client() as client:
            answer = client.completions.create(
                model="smollm2",
                prompt=prompt,
                max_tokens=24,
                extra_body={"ignore_eos": True, "return_token_ids": True, **options},
            )
        return answer.choices[0].token_ids

    (banned, *_) = continue_with(temperature=0)
    bias = {"logit_bias": {str(banned): -100}}
    before = server.metric("vllm:spec_decode_num_accepted_tokens_total")
    greedy = continue_with(temperature=0, **bias)
    assert banned not in greedy
    assert continue_with(temperature=1, min_p=1, **bias) == greedy
    assert server.metric("vllm:spec_decode_num_accepted_tokens_total") > before


def test_a_server_that_slept_answers_as_before(server, prompt):
    def post(path):
        request = urllib.request.Request(server.url + path, method="POST")
        with urllib.request.urlopen(request, timeout=120) as reply:
            assert reply.status == 200

    before, _ = stream(server, prompt)
    post("/sleep?level=2")
    post("/wake_up")
    after, cached = stream(server, prompt)
    assert after == before
    assert cached == 0
