# SPDX-License-Identifier: Apache-2.0
"""The whole server through the OpenAI client."""

import json
import re
import subprocess
import sys
import time
from importlib.metadata import version

import jsonschema
import openai
import pytest
from e2e.server import SPAWNED, VLLM, refused_start, serve

from vllm_metal.patches.vllm_patches.start_failures import ERROR_PREFIX

BLOCK_SIZE = 16  # vllm-metal's default
MAX_MODEL_LEN = 1024
pytestmark = pytest.mark.more
OPTIONS = (
    *("--served-model-name", "smollm2"),
    *("--max-model-len", str(MAX_MODEL_LEN)),
    *("--max-num-batched-tokens", "256"),
    *("--kv-cache-memory-bytes", str(128 << 20)),
    "--enable-prefix-caching",
    "--enable-prompt-tokens-details",
)
QUESTION = {"role": "user", "content": "What is the capital of France? Answer in one sentence."}


@pytest.fixture(scope="module")
def server(smollm2, tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "log"
    with serve(smollm2, OPTIONS, log, environment=SPAWNED) as started:
        yield started


@pytest.fixture(scope="module")
def client(server):
    with server.client() as connected:
        yield connected


def chat(client, **options):
    """Returns a greedy answer to QUESTION, unless `options` differ."""
    settings = {"messages": [QUESTION], "temperature": 0, "max_tokens": 32}
    return client.chat.completions.create(model="smollm2", **(settings | options))


def complete(client, prompt, **options):
    """Returns a greedy completion, unless `options` differ."""
    settings = {"temperature": 0, "max_tokens": 8}
    return client.completions.create(model="smollm2", prompt=prompt, **(settings | options))


def assert_alive(server, client):
    assert server.health() == 200
    assert complete(client, "1, 2, 3, 4,").choices[0].text.startswith(" 5, 6")


def wait_for(condition, seconds):
    """Waits until `condition()` holds, for `seconds` at most."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"still not so after {seconds} s"
        time.sleep(0.1)


def test_the_engine_has_a_process_of_its_own(server):
    log = server.log.read_text()
    assert len(set(re.findall(r"\((?:APIServer|EngineCore) pid=(\d+)\)", log))) == 2


def test_streaming_gives_the_text_of_one_answer_and_its_usage(client):
    whole = chat(client)
    assert "Paris" in whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "stop"

    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == (
        whole.choices[0].message.content
    )
    assert len(choices) > 4  # it came in parts
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["stop"]
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert getattr(chunks[-1].usage, count) == getattr(whole.usage, count)


def test_a_repeated_prompt_is_cached_in_whole_blocks(client):
    messages = [{"role": "system", "content": "You are a geographer."}, QUESTION]
    first, again = (chat(client, messages=messages) for _ in range(2))
    # The last token is computed in any case: its logits choose the next one.
    expected = (first.usage.prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert first.usage.prompt_tokens_details.cached_tokens < expected
    assert again.usage.prompt_tokens_details.cached_tokens == expected
    assert again.choices[0].message.content == first.choices[0].message.content


def test_chat_logprobs_belong_to_the_text_and_are_ranked(client):
    choice = chat(client, logprobs=True, top_logprobs=5).choices[0]
    content = choice.logprobs.content
    assert "".join(entry.token for entry in content).startswith(choice.message.content)
    for entry in content:
        ranked = [top.logprob for top in entry.top_logprobs]
        assert len(ranked) == 5
        assert ranked == sorted(ranked, reverse=True)
        assert (entry.token, entry.logprob) == (entry.top_logprobs[0].token, ranked[0])


def test_decode_and_prompt_logprobs_agree(client):
    prompt = "The quick brown fox"
    extra = {"return_token_ids": True}
    written = complete(client, prompt, logprobs=2, extra_body=extra).choices[0]
    assert len(written.logprobs.token_logprobs) == len(written.token_ids) == 8
    assert all(len(top) == 2 for top in written.logprobs.top_logprobs)

    # The same tokens once more, as a prompt: computed in one chunk instead of one by one.
    tokens = written.prompt_token_ids + written.token_ids
    extra = {"prompt_logprobs": 0}
    read = complete(client, tokens, max_tokens=1, extra_body=extra).choices[0]
    scored = [
        position[str(token)]
        for token, position in zip(written.token_ids, read.prompt_logprobs[-8:], strict=True)
    ]
    assert [entry["rank"] for entry in scored] == [1] * 8
    assert [entry["logprob"] for entry in scored] == pytest.approx(
        written.logprobs.token_logprobs,
        abs=1e-3,  # float32 sums in another order
    )


def test_json_schema_is_obeyed_by_every_sample(client):
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 30},
            "kind": {"enum": ["cat", "dog"]},
        },
        "required": ["name", "age", "kind"],
        "additionalProperties": False,
    }
    answer = chat(
        client,
        messages=[{"role": "user", "content": "Describe a pet."}],
        **{"temperature": 1, "seed": 1, "n": 3, "max_tokens": 120},
        response_format={"type": "json_schema", "json_schema": {"name": "pet", "schema": schema}},
    )
    pets = [json.loads(choice.message.content) for choice in answer.choices]
    for pet in pets:
        jsonschema.validate(pet, schema)
    assert pets[0] != pets[1] or pets[1] != pets[2]


def test_samples_of_one_request_differ_and_repeat_with_the_seed(client):
    def texts(seed):
        answer = complete(client, "Once upon a time", temperature=1, n=2, seed=seed)
        return [choice.text for choice in answer.choices]

    first, second = texts(7)
    assert first != second
    assert texts(7) == [first, second]
    assert texts(8) != [first, second]


def test_stop_strings_cut_the_text(client):
    counting = "1, 2, 3, 4,"
    whole = complete(client, counting, max_tokens=24).choices[0]
    assert whole.finish_reason == "length"
    before, found, _ = whole.text.partition(" 7")
    assert found

    cut = complete(client, counting, max_tokens=24, stop=["no such text", " 7"]).choices[0]
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (before, "stop", " 7")


def test_closing_a_stream_frees_its_request(server, client):
    def finished():
        return server.metric("vllm:request_success_total", finished_reason="length")

    def usage():
        return server.metric("vllm:kv_cache_usage_perc")

    def running():
        return server.metric("vllm:num_requests_running")

    before = finished()
    stream = complete(
        client, "Once upon", max_tokens=1000, stream=True, extra_body={"ignore_eos": True}
    )
    for _ in range(4):
        next(stream)
    wait_for(lambda: running() == 1 and usage() > 0, 240)
    stream.close()
    wait_for(lambda: running() == 0 and usage() == 0, 240)
    assert finished() == before  # it was cut off, not served to its end
    assert_alive(server, client)


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        pytest.param(
            {"prompt": "word " * 2 * MAX_MODEL_LEN},
            *(400, f"maximum context length is {MAX_MODEL_LEN} tokens"),
            id="prompt too long",
        ),
        pytest.param(
            {"prompt": "Once", "max_tokens": MAX_MODEL_LEN + 1},
            *(400, f"max_tokens={MAX_MODEL_LEN + 1}"),
            id="too many tokens asked for",
        ),
        pytest.param(
            {"prompt": "Once", "extra_body": {"watermarking": True}},
            *(400, "watermarking is not supported by vllm-metal"),
            id="unsupported by vllm-metal",
        ),
        pytest.param(
            {"prompt": "Once", "extra_body": {"thinking_token_budget": 4}},
            *(400, "thinking_token_budget"),
            id="unsupported without a reasoning parser",
        ),
        pytest.param({"prompt": "Once", "n": 2}, *(400, "n must be 1"), id="greedy twice"),
        pytest.param(
            {"prompt": "Once", "extra_body": {"structured_outputs": {"regex": "(["}}},
            *(400, "invalid regex"),
            id="broken grammar",
        ),
        pytest.param(
            {"prompt": "Once", "model": "nobody"}, *(404, "`nobody` does not exist"), id="model"
        ),
    ],
)
def test_a_bad_request_is_answered_and_harms_no_one(server, client, options, status, message):
    settings = {"model": "smollm2", "temperature": 0, "max_tokens": 4}
    with pytest.raises(openai.APIStatusError) as refusal:
        client.completions.create(**(settings | options))
    assert refusal.value.status_code == status
    assert message in refusal.value.body["message"]
    assert_alive(server, client)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "environment", "message"),
    [
        pytest.param(
            ["--dtype", "float64"],
            *({}, "argument --dtype: invalid choice: 'float64'"),
            id="dtype",
        ),
        pytest.param(
            ["--block-size", "7"],
            *({}, "--block-size 7 is not supported: choose one of (16, 32)"),
            id="block size",
        ),
        pytest.param(
            ["--max-model-len", "100000"],
            *({}, "max_model_len (100000) is greater than the derived max_model_len"),
            id="longer than the model",
        ),
        pytest.param(
            # 30 layers × (K + V) × 3 heads × 64 × 4 bytes = 45 KiB a token
            ["--max-model-len", "8192", "--kv-cache-memory-bytes", str(16 << 20)],
            *({}, "one request of --max-model-len 8192 needs 0.35 GiB of KV cache"),
            # Two engines with the model, this one and the server's.
            marks=pytest.mark.heavy,
            id="longer than the pool",
        ),
        pytest.param(
            [
                *("--kv-transfer-config", '{"kv_connector": "x", "kv_role": "kv_both"}'),
                *("--kv-cache-dtype", "nvfp4"),
            ],
            *({}, "vllm-metal does not support --kv-transfer-config kv_connector 'x' "),
            id="two refused features",
        ),
        pytest.param(
            *([], {"VLLM_METAL_DEVICE": "gpu"}),
            "VLLM_METAL_DEVICE='gpu': choose metal, cpu or off",
            id="device",
        ),
    ],
)
def test_a_start_that_cannot_work_says_why(smollm2, tmp_path, options, environment, message):
    log = tmp_path / "log"
    assert refused_start(smollm2, options, environment, log) > 0
    assert message in log.read_text()


@pytest.mark.slow
def test_a_start_without_a_model_says_which(tmp_path):
    missing, log = str(tmp_path / "no-such-model"), tmp_path / "log"
    assert refused_start(missing, [], {}, log) > 0
    last = log.read_text().strip().splitlines()[-1]
    assert last == f"{ERROR_PREFIX}there is no folder {missing}"


def printed(*arguments):
    """Returns the output of a vLLM command that succeeds."""
    command = [sys.executable, *VLLM, *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("complete --url {url}/v1 -q 1,2,3,4, --max-tokens 8", r"5,6,"),
        ("chat --url {url}/v1 -q What.is.the.capital.of.France?", r"Paris"),
        (
            "bench serve --base-url {url} --model smollm2 --tokenizer {model} --dataset-name random"
            " --random-input-len 32 --random-output-len 4 --num-prompts 3",
            r"Successful requests: +3\s+Failed requests: +0",
        ),
        ("collect-env", rf"transformers=={re.escape(version('transformers'))}"),
    ],
)
def test_vllms_other_commands(server, smollm2, command, shown):
    arguments = command.format(url=server.url, model=smollm2).split()
    assert re.search(shown, printed(*arguments))


@pytest.mark.slow
def test_a_batch_in_a_file(smollm2, tmp_path, client):
    asked, answered = tmp_path / "asked.jsonl", tmp_path / "answered.jsonl"
    of_all = {"model": "smollm2", "messages": [QUESTION], "temperature": 0}
    bodies = {"good": of_all | {"max_tokens": 32}, "bad": of_all | {"watermarking": True}}
    asked.write_text(
        "".join(
            json.dumps(
                {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}
            )
            + "\n"
            for name, body in bodies.items()
        )
    )
    printed("run-batch", "-i", str(asked), "-o", str(answered), "--model", smollm2, *OPTIONS)
    lines = map(json.loads, answered.read_text().splitlines())
    found = {line["custom_id"]: line for line in lines}
    (choice,) = found["good"]["response"]["body"]["choices"]
    assert choice["message"]["content"] == chat(client).choices[0].message.content
    assert found["bad"]["response"]["status_code"] == 400
    assert "watermarking is not supported" in found["bad"]["error"]["error"]["message"]
