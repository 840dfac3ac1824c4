# SPDX-License-Identifier: Apache-2.0
"""Reports of prefix misses to clients of a real server, for each route and cause."""

import anthropic
import httpx
import pytest
from e2e.server import serve
from prompt_shapes import PLAIN, RULES, SHAPES

OPTIONS = (
    *("--served-model-name", "smollm2"),
    *("--max-model-len", "1024"),
    *("--max-num-batched-tokens", "512"),
    *("--kv-cache-memory-bytes", str(128 << 20)),
    "--enable-prompt-tokens-details",
    *("--additional-config", '{"normalize_prompts": ["token_countdown"]}'),
)
pytestmark = pytest.mark.more
#: SmolLM2's template ignores tools.
TOLD = [name for name, shape in SHAPES.items() if not any(shape.tools)]


@pytest.fixture(scope="module")
def server(short, tmp_path_factory):
    with serve(short, OPTIONS, tmp_path_factory.mktemp("server") / "log") as started:
        yield started


@pytest.fixture(scope="module")
def client(server):
    with server.client() as connected:
        yield connected


def missed(client, messages, salt, **options):
    """Returns a chat's cached tokens, and its header as fields; the cause is "cause"."""
    settings = {"messages": messages, "temperature": 0, "max_tokens": 1, **options}
    reply = client.chat.completions.with_raw_response.create(
        model="smollm2", extra_body={"cache_salt": salt}, **settings
    )
    details = reply.parse().usage.prompt_tokens_details
    return details.cached_tokens if details else 0, read(reply.headers)


def read(headers):
    cause, *parts = headers.get("prefix-cache-miss", "").split("; ")
    return {"cause": cause} | dict(part.split("=", 1) for part in parts)


@pytest.mark.parametrize("name", TOLD)
def test_a_shape_of_change_is_told(client, name):
    shape = SHAPES[name]
    missed(client, shape.before, name)
    cached, miss = missed(client, shape.now, name)
    if shape.cause is None:
        assert miss["cause"] in ("", "first_seen")
        return
    role = None if shape.role is None else f'"{shape.role}"'
    message = None if shape.message is None else str(shape.message)
    assert (miss["cause"], miss.get("message"), miss.get("role")) == (shape.cause, message, role)
    assert int(miss["cached"]) == cached
    assert cached <= int(miss["token"]) < cached + 16
    assert int(miss["lost"]) >= 64


def test_streams_texts_and_the_other_routes_say_it_too(client, server):
    before, now = (SHAPES["the day"].before, SHAPES["the day"].now)
    missed(client, before, "streams")
    with client.chat.completions.with_streaming_response.create(
        *(), model="smollm2", messages=now, max_tokens=4, stream=True,
        extra_body={"cache_salt": "streams"}, extra_headers={"Prefix-Cache-Miss": "text"},
    ) as stream:  # fmt: skip
        miss = read(stream.headers)
        assert (miss["cause"], miss["before"], miss["now"]) == (
            *("date", '%"2026-11-25"', '%"2026-11-26"'),
        )
        assert "[DONE]" in "".join(stream.iter_text())

    def texts(day):
        reply = client.completions.with_raw_response.create(
            model="smollm2", prompt=f"{day}: {RULES}", max_tokens=1
        )
        return read(reply.headers)

    assert texts("2026-11-25")["cause"] == "first_seen"
    assert texts("2026-11-26")["cause"] == "date"

    def responses(day):
        reply = client.responses.with_raw_response.create(
            model="smollm2", instructions=f"{day}: {RULES}", input="Hello", max_output_tokens=1
        )
        return read(reply.headers)

    responses("10:11:12")
    miss = responses("10:12:59")
    assert (miss["cause"], miss["message"], miss["role"]) == ("date", "0", '"system"')

    def messages(day):
        body = {"model": "smollm2", "max_tokens": 1, "system": f"{day}: {RULES}"}
        body["messages"] = [{"role": "user", "content": "Hello"}]
        return read(httpx.post(f"{server.url}/v1/messages", json=body, timeout=120).headers)

    messages("at turn 7")
    assert messages("at turn 8")["cause"] == "counter"
    assert server.metric("vllm:prefix_cache_lost_tokens_total", cause="counter") > 64
    log = server.log.read_text()
    assert "Prefix cache missed" in log
    assert "bakery" not in log


ASKED = {"Prefix-Cache-Miss": "usage"}


def system(hour, name):
    """Makes a first line that changes with the hour, before some hundred tokens."""
    return f"{name}, {hour}:12:13: {RULES}"[:500]


def chat(client, text):
    reply = client.chat.completions.create(
        model="smollm2", messages=[{"role": "system", "content": text}], max_tokens=1,
        extra_headers=ASKED,
    )  # fmt: skip
    return reply.usage.prompt_tokens_details


def chat_streamed(client, text):
    chunks = client.chat.completions.create(
        model="smollm2", messages=[{"role": "system", "content": text}], max_tokens=1,
        stream=True, stream_options={"include_usage": True}, extra_headers=ASKED,
    )  # fmt: skip
    return [*chunks][-1].usage.prompt_tokens_details


def completion(client, text):
    reply = client.completions.create(
        model="smollm2", prompt=text, max_tokens=1, extra_headers=ASKED
    )
    return reply.usage.prompt_tokens_details


def completion_streamed(client, text):
    chunks = client.completions.create(
        model="smollm2", prompt=text, max_tokens=1, extra_headers=ASKED,
        stream=True, stream_options={"include_usage": True},
    )  # fmt: skip
    return [*chunks][-1].usage.prompt_tokens_details


def response(client, text):
    reply = client.responses.create(
        model="smollm2", instructions=text, input="Hi", max_output_tokens=1, extra_headers=ASKED
    )
    return reply.usage.input_tokens_details


def response_streamed(client, text):
    events = client.responses.create(
        model="smollm2", instructions=text, input="Hi", max_output_tokens=1, stream=True,
        extra_headers=ASKED,
    )  # fmt: skip
    return [*events][-1].response.usage.input_tokens_details


def anthropics(client):
    base_url = str(client.base_url).removesuffix("/v1/")
    return anthropic.Anthropic(base_url=base_url, api_key="none", max_retries=0, timeout=120)


MESSAGES = [{"role": "user", "content": "Hi"}]


def message(client, text):
    reply = anthropics(client).messages.create(
        model="smollm2", system=text, messages=MESSAGES, max_tokens=1, extra_headers=ASKED
    )
    return reply.usage


def message_streamed(client, text):
    with anthropics(client).messages.stream(
        model="smollm2", system=text, messages=MESSAGES, max_tokens=1, extra_headers=ASKED
    ) as stream:
        return stream.get_final_message().usage


@pytest.mark.parametrize(
    ("ask", "role"),
    [
        (chat, "system"),
        (chat_streamed, "system"),
        (completion, None),
        (completion_streamed, None),
        (response, "system"),
        (response_streamed, "system"),
        (message, "system"),
        (message_streamed, "system"),
    ],
)
def test_the_clients_usage_has_it(client, ask, role):
    ask(client, system(10, ask.__name__))
    miss = ask(client, system(11, ask.__name__)).prefix_cache_miss
    assert (miss["cause"], miss.get("role")) == ("date", role)
    assert miss.get("message") == (None if role is None else 0)
    assert miss["lost"] >= 64
    assert miss["token"] >= miss["cached"]
    assert "before" not in miss


def test_nobody_gets_a_field_that_he_did_not_ask_for(client, server):
    missed(client, SHAPES["the day"].before, "fields")
    body = {"model": "smollm2", "max_tokens": 1, "cache_salt": "fields"}
    body["messages"] = SHAPES["the day"].now
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
    assert "prefix-cache-miss" in reply.headers
    assert "prefix_cache_miss" not in reply.text


def test_what_is_taken_out_of_system_messages_costs_no_prefix(client):
    for left in ("14,000", "13,500"):
        system = {"role": "system", "content": f"<t>{left} tokens left</t>\n{RULES}"}
        cached, miss = missed(client, [system, *PLAIN[1:]], "normalized")
    assert cached > 64
    assert miss == {"cause": ""}


def test_what_was_found_has_no_header(client):
    missed(client, PLAIN, "found")
    cached, miss = missed(client, PLAIN, "found")
    assert cached > 64
    assert miss == {"cause": ""}
