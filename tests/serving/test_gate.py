# SPDX-License-Identifier: Apache-2.0
"""Tenants in front of a fake vLLM: access, and the requests that vLLM receives."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from serving_double import SECRET, App, ask, counted, identity, make, ready

from vllm_metal.serving import tenants_file
from vllm_metal.serving.routes import ROUTES
from vllm_metal.settings import salts

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "temperature": 0}
#: Routes that embed, score and classify.
POOLING = ("/v1/embeddings", "/pooling", "/classify", "/score", "/rerank", "/v2/rerank")
#: Routes of vLLM's that are not for tenants; some reach the engine.
UNLISTED = [
    *(("POST", f"/{name}") for name in ("invocations", "generative_scoring", "ping", "sleep")),
    *(("POST", f"/{name}") for name in ("abort_requests", "inference/v1/generate", "v2/embed")),
    *(("POST", f"/v1/{name}") for name in ("chat/completions/batch", "embeddings/render")),
    *(("POST", f"/v1/{name}") for name in ("chat/completions/render", "load_lora_adapter")),
    *(("POST", f"/v1/{name}") for name in ("responses/resp_1/cancel/", "chat/completions/")),
    *(("GET", path) for path in ("/docs", "/openapi.json", "/load", "/version", "/server_info")),
    *(("GET", path) for path in ("/metrics/", "/metricsx", "/v1/models/m", "//v1/models", "/")),
    *(("GET", path) for path in ("/v1/responses/../models", "/v1/responses/a b", "/HEALTH")),
    *((method, "/v1/chat/completions") for method in ("GET", "HEAD", "OPTIONS", "PUT", "DELETE")),
    ("OPTIONS", "/health"),
]


def run(coroutine):
    return asyncio.run(coroutine)


@pytest.fixture
def app():
    return App()


@pytest.fixture
def made(app, tmp_path):
    return make(app, tmp_path, cache=False)


def refused(gate, app, status, *args, **kwargs):
    """Asserts that a request is rejected before vLLM sees it."""
    before = app.asked
    reply = run(ask(gate, *args, **kwargs))
    assert (reply.status, app.asked) == (status, before), reply.body
    assert reply.json()["error"]["code"] == status
    return reply


def test_a_missing_key_is_refused_on_every_route_but_health(made, app):
    gate, _ = made
    for route in ROUTES:
        if route.path != "/health":
            path = route.path.replace("{id}", "resp_1")
            reply = refused(gate, app, 401, path, CHAT, method=route.method)
            assert reply.headers["www-authenticate"] == "Bearer"
    for method, path in UNLISTED:
        refused(gate, app, 401, path, method=method)
    assert run(ask(gate, "/health", method="GET")).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        [(b"authorization", b"Bearer wrong")],
        [(b"authorization", b"Basic KEY")],
        [(b"authorization", b"KEY")],
        [(b"authorization", b"Bearer")],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", b"Bearer KEY"), (b"authorization", b"Bearer KEY")],
        [(b"authorization", b"Bearer KEY"), (b"x-api-key", b"KEY")],
        [(b"authorization", b"Bearer KEY KEY")],
        [(b"authorization", "Bearer KEYé".encode("latin-1"))],
        [(b"x-api-key", b"wrong")],
        [(b"cookie", b"key=KEY")],
    ],
)
def test_a_key_that_is_none_is_refused(made, app, headers):
    gate, keys = made
    with_key = [(name, value.replace(b"KEY", keys["acme"].encode())) for name, value in headers]
    refused(gate, app, 401, fields=CHAT, headers=with_key)


def test_a_key_of_a_megabyte_is_refused(made, app):
    gate, _ = made
    refused(gate, app, 401, fields=CHAT, key="k" * 10**6)


@pytest.mark.parametrize("value", [b"a\r\nx-tenant: other", b"a\nb", b"a\0b", b"\x7f"])
def test_header_injection_is_refused(made, app, value):
    gate, keys = made
    refused(gate, app, 400, fields=CHAT, key=keys["acme"], headers=[(b"x-session-id", value)])
    bearer = b"Bearer " + keys["acme"].encode() + value
    refused(gate, app, 400, fields=CHAT, headers=[(b"authorization", bearer)])


def test_an_unlisted_route_is_refused(made, app):
    gate, keys = made
    for method, path in UNLISTED:
        refused(gate, app, 404, path, CHAT, keys["acme"], method=method)


@pytest.mark.parametrize("extension", [True, False])
def test_a_websocket_is_refused(made, app, extension):
    gate, keys = made
    for headers, status in (([], 401), ([(b"x-api-key", keys["acme"].encode())], 404)):
        sent = []

        async def receive():
            return {"type": "websocket.connect"}

        async def send(message, sent=sent):
            sent.append(message)

        scope = {
            "type": "websocket",
            "path": "/v1/realtime",
            "headers": headers,
            "extensions": {"websocket.http.response": {}} if extension else {},
        }
        run(gate(scope, receive, send))
        if extension:
            assert sent[0]["type"] == "websocket.http.response.start"
            assert sent[0]["status"] == status
        else:
            assert sent == [{"type": "websocket.close", "code": 1008}]
        assert app.asked == 0


def test_x_api_key_is_a_key_too(made, app):
    gate, keys = made
    key = [(b"x-api-key", keys["acme"].encode())]
    assert run(ask(gate, "/v1/messages", CHAT, headers=key)).status == 200


def test_metrics_answer_to_a_key_of_their_own(made, app, tmp_path):
    gate, keys = made
    refused(gate, app, 404, "/metrics", key=keys["acme"], method="GET")
    refused(gate, app, 404, "/v1/models", key=keys["metrics"], method="GET")
    refused(gate, app, 404, fields=CHAT, key=keys["metrics"])
    assert run(ask(gate, "/metrics", key=keys["metrics"], method="GET")).status == 200


def test_metrics_can_be_open(app, tmp_path):
    gate, _ = make(app, tmp_path, cache=False, open_metrics=True)
    assert run(ask(gate, "/metrics", method="GET")).status == 200
    refused(gate, app, 401, "/v1/models", method="GET")


@pytest.mark.parametrize("path", ["/v1/chat/completions", *POOLING])
def test_vllm_gets_the_tenants_salt(made, app, path):
    gate, keys = made
    for name in ("acme", "other"):
        run(ask(gate, path, CHAT, keys[name]))
        run(ask(gate, path, CHAT | {"cache_salt": "mine", "request_id": "mine"}, keys[name]))
        assert "request_id" not in app.seen[-1][2]
        plain, mine = (fields["cache_salt"] for _, _, fields in app.seen[-2:])
        assert plain == salts.derive(SECRET, identity(gate, keys[name]))
        assert mine == salts.derive(SECRET, identity(gate, keys[name]), "mine")
    assert len({fields["cache_salt"] for _, _, fields in app.seen}) == 4


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]
)
def test_a_forged_salt_is_refused(made, app, path):
    """Forges a tenant's salt without the secret, and tries values that vLLM would reject."""
    gate, keys = made
    forged = salts.derive(b"a guess of the secret", "other")
    real = salts.derive(SECRET, identity(gate, keys["other"]))
    for salt in (forged, real, "", 1, {}, ["a"], "a/b", "a@b", "x" * 129):
        refused(gate, app, 400, path, CHAT | {"cache_salt": salt}, keys["acme"])


@pytest.mark.parametrize(
    "raw",
    [
        b'{"messages": [], "cache_salt": "a", "cache_salt": "b"}',
        b'{"messages": [{"role": "user", "role": "system"}]}',
        b'{"temperature": 0, "\\u0074emperature": 1}',
        b"[1]",
        b'"text"',
        b"",
        b"{",
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b'{"a": 1e999}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"a": ' + b"[" * 65 + b"]" * 65 + b"}",
        b'{"a": ' + b"[" * 20000 + b"]" * 20000 + b"}",
        b'\xef\xbb\xbf{"a": 1}',
        '{"a": "é"}'.encode("latin-1"),
        '{"a": 1}'.encode("utf-16"),
        b'{"a": 1} {"b": 2}',
    ],
)
def test_a_body_that_can_be_read_in_two_ways_is_refused(made, app, raw):
    """Duplicate keys, among others."""
    gate, keys = made
    for path in ("/v1/chat/completions", "/tokenize"):
        refused(gate, app, 400, path, key=keys["acme"], raw=raw)


def test_a_body_that_is_too_long_is_refused(made, app):
    gate, keys = made
    for headers in ([], [(b"content-length", b"2000000")], [(b"content-length", b"10")]):
        refused(gate, app, 413, key=keys["acme"], raw=b" " * 200_000, headers=headers)


@pytest.mark.parametrize("tenants", [(), ("acme",)])
@pytest.mark.parametrize(
    ("limits", "status"),
    [
        ({"max_body_bytes": 50}, 413),
        ({"max_body_depth": 2}, 400),
        ({"max_body_values": 4}, 400),
        ({"max_body_names": 5}, 400),
        ({"max_body_items": 1}, 400),
        ({"max_body_choices": 2}, 400),
    ],
)
def test_bodies_have_limits_with_tenants_and_without(tmp_path, tenants, limits, status):
    app = App()
    gate, keys = make(app, tmp_path, tenants=tenants, cache=False, timeout_s=5, **limits)
    fields = CHAT | {"messages": CHAT["messages"] * 2, "n": "3"}
    reply = run(ask(gate, fields=fields, key=keys.get("acme")))
    assert reply.status == status and next(iter(limits)) in reply.json()["error"]["message"]
    assert app.asked == 0


@pytest.mark.parametrize(
    "headers",
    [
        [(b"content-type", b"text/plain")],
        [(b"content-type", b"application/json"), (b"content-type", b"text/plain")],
        [(b"content-encoding", b"gzip")],
    ],
)
def test_a_body_that_is_not_said_to_be_json_is_refused(made, app, headers):
    gate, keys = made
    refused(gate, app, 400, fields=CHAT, key=keys["acme"], headers=headers)


@pytest.mark.parametrize("name", ["kv_transfer_params", "ec_transfer_params"])
def test_pages_of_other_engines_are_not_for_tenants(made, app, name):
    gate, keys = made
    refused(gate, app, 400, fields=CHAT | {name: {"do_remote_prefill": True}}, key=keys["acme"])
    refused(gate, app, 400, fields=CHAT | {"vllm_xargs": {name: "x"}}, key=keys["acme"])
    assert run(ask(gate, fields=CHAT | {name: None}, key=keys["acme"])).status == 200


def test_vllm_gets_what_was_looked_at_and_nothing_else(made, app):
    """One body, without the client's key, request id and query."""
    gate, keys = made
    strange = {"content": "\ud800 \u2028 é", "role": "user"}
    fields = CHAT | {"messages": [strange], "temperature": 0.1, "request_id": "mine", "new": [1]}
    headers = [
        (b"x-request-id", b"mine"),
        (b"x-data-parallel-rank", b"1"),
        (b"cookie", b"a=b"),
        (b"x-session-id", b"s"),
        (b"transfer-encoding", b"chunked"),
    ]
    reply = run(ask(gate, fields=fields, key=keys["acme"], headers=headers, query=b"key=k"))
    assert reply.status == 200
    ((path, got, body),) = app.seen
    assert path == "/v1/chat/completions"
    assert got.keys() == {"content-length", "content-type", "host", "x-request-id", "x-session-id"}
    assert len(got["x-request-id"]) == 32 and keys["acme"] not in json.dumps([got, body])
    expected = {key: value for key, value in fields.items() if key != "request_id"}
    assert body == expected | {"cache_salt": salts.derive(SECRET, identity(gate, keys["acme"]))}


def test_routes_that_never_reach_the_engine_get_no_salt(made, app):
    gate, keys = made
    for path in ("/tokenize", "/detokenize", "/v1/messages/count_tokens"):
        assert run(ask(gate, path, CHAT | {"cache_salt": "a"}, keys["acme"])).status == 200
        assert app.seen[-1] == (path, app.seen[-1][1], CHAT)
    assert run(ask(gate, "/v1/models", key=keys["acme"], method="GET")).status == 200


def test_a_stored_response_belongs_to_its_tenant(made, app):
    gate, keys = made
    mine = run(ask(gate, "/v1/responses", CHAT | {"request_id": "resp_a"}, keys["acme"])).json()[
        "id"
    ]
    assert mine != "resp_a"
    assert run(ask(gate, f"/v1/responses/{mine}", key=keys["acme"], method="GET")).status == 200
    assert run(ask(gate, f"/v1/responses/{mine}/cancel", key=keys["acme"])).status == 200
    follow = CHAT | {"previous_response_id": mine}
    assert run(ask(gate, "/v1/responses", follow, keys["acme"])).status == 200
    for theirs in (mine, "resp_a", "resp_" + "0" * 64):
        refused(gate, app, 404, f"/v1/responses/{theirs}", key=keys["other"], method="GET")
        refused(gate, app, 404, f"/v1/responses/{theirs}/cancel", key=keys["other"])
        follow = CHAT | {"previous_response_id": theirs}
        refused(gate, app, 404, "/v1/responses", follow, keys["other"])
    refused(gate, app, 404, "/v1/responses", CHAT | {"previous_response_id": 1}, keys["acme"])


def test_a_removed_key_is_refused_within_a_second(app, tmp_path):
    now = [0.0]
    gate, keys = make(app, tmp_path, cache=False, clock=lambda: now[0])
    assert run(ask(gate, fields=CHAT, key=keys["acme"])).status == 200
    tenants_file.remove(tmp_path / "tenants.json", "acme")
    now[0] = 1.0
    refused(gate, app, 401, fields=CHAT, key=keys["acme"])
    assert run(ask(gate, fields=CHAT, key=keys["other"])).status == 200


def test_requests_and_tokens_are_counted_by_tenant(made, app):
    gate, keys = made
    for stream in (False, True):
        run(ask(gate, fields=CHAT | {"stream": stream}, key=keys["acme"]))
    run(ask(gate, "/v1/messages", CHAT, keys["other"]))
    refused(gate, app, 404, "/invocations", key=keys["other"])
    refused(gate, app, 401, "/v1/models", method="GET")
    assert counted(gate, "vllm:tenant_requests_total", tenant="acme", status="200") == 2
    assert counted(gate, "vllm:tenant_requests_total", tenant="other", status="404") == 1
    assert counted(gate, "vllm:tenant_requests_total", tenant="none", status="401") == 1
    for tenant, times in (("acme", 2), ("other", 1)):
        for kind, tokens in (("prompt", 5), ("cached", 2), ("completion", 3)):
            found = counted(gate, "vllm:tenant_tokens_total", tenant=tenant, kind=kind)
            assert found == times * tokens


def test_a_stream_has_usage_only_where_the_client_asks_for_it(made, app):
    gate, keys = made
    for options, has in ((None, False), ({}, False), ({"include_usage": True}, True)):
        fields = CHAT | {"stream": True, "stream_options": options}
        reply = run(ask(gate, fields=fields, key=keys["acme"]))
        assert any("usage" in chunk for chunk in reply.chunks()) == has
        assert reply.events()[-1] == "[DONE]" and reply.ended
        assert app.seen[-1][2]["stream_options"] == options


def test_vllms_own_key_beside_is_refused(made, app, monkeypatch):
    gate, keys = made
    app.state.args = SimpleNamespace(api_key=["vllms"])
    reply = run(ask(gate, fields=CHAT, key=keys["acme"]))
    assert (reply.status, app.asked) == (500, 0)
    assert "--api-key" in reply.json()["error"]["message"]


def test_without_tenants_all_routes_are_open_and_bodies_keep_their_salts(app, tmp_path):
    gate, _ = make(app, tmp_path, tenants=(), cache=True)
    run(ready(gate))
    for method, path in UNLISTED:
        assert run(ask(gate, path, CHAT, method=method)).status == 200
    assert run(ask(gate, fields=CHAT | {"cache_salt": "a"})).status == 200
    assert app.seen[-1][2]["cache_salt"] == "a"


def test_no_error_of_ours_repeats_what_the_client_sent(made, app):
    gate, keys = made
    secret = "s3cr3t"
    for raw in (b'{"s3cr3t": 1, "s3cr3t": 2}', b'{"cache_salt": "s3cr3t/"}', b"s3cr3t"):
        reply = refused(gate, app, 400, key=keys["acme"], raw=raw)
        assert secret not in reply.body.decode()
    assert secret not in refused(gate, app, 401, key=secret).body.decode()
