# SPDX-License-Identifier: Apache-2.0
"""A fake vLLM application, and an ASGI client for the middleware in front of it.

The fake answers like vLLM, and its text depends on every field except the salt, so that wrong
cache hits are detected.
"""

import asyncio
import hashlib
import json
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

from prometheus_client import CollectorRegistry

from vllm_metal.patches.vllm_patches.http_protocol import HANG_UP
from vllm_metal.serving import tenants_file
from vllm_metal.serving.config import BodyLimits, ResponseCacheConfig, ServingConfig, TenantsConfig
from vllm_metal.serving.gate import Tenants
from vllm_metal.serving.metrics import ServerMetrics
from vllm_metal.serving.response_cache.key import Rendered

SECRET = b"0123456789abcdef0123456789abcdef"
#: Fields that do not affect vLLM's answer.
_IGNORED = ("cache_salt", "stream", "stream_options", "user", "metadata", "request_id", "priority")


class OutputProcessor:
    """Like vLLM's, for requests with one choice."""

    def __init__(self):
        self.external_req_ids, self.request_states = {}, {}

    def add_request(self, request):
        self.external_req_ids[request.external_req_id] = [request.request_id]
        self.request_states[request.request_id] = SimpleNamespace(
            detokenizer=SimpleNamespace(num_output_tokens=lambda: request.said)
        )

    def process_outputs(self, outputs):
        for output in outputs:
            if output.finish_reason is not None:
                self._forget(output.request_id)
        return SimpleNamespace(reqs_to_abort=[])

    def abort_requests(self, request_ids, internal):
        inner = [request_id if internal else f"{request_id}-inner" for request_id in request_ids]
        return [request_id for request_id in inner if self._forget(request_id)]

    def _forget(self, request_id):
        if self.request_states.pop(request_id, None) is None:
            return False
        self.external_req_ids.pop(request_id.removesuffix("-inner"))
        return True


class Engine:
    """The engine interface for time limits and token counts. It generates two tokens at a time."""

    def __init__(self):
        self.output_processor = OutputProcessor()
        self.aborted = []
        self._ended = {}

    def begin(self, request_id, salt):
        """Adds a request; returns it, and an event set by its abort."""
        inner = f"{request_id}-inner"
        request = SimpleNamespace(
            external_req_id=request_id, request_id=inner, cache_salt=salt, said=0
        )
        self.output_processor.add_request(request)
        self._ended[request_id] = asyncio.Event()
        return request, self._ended[request_id]

    def say(self, request, tokens, end=None):
        """Outputs a request's tokens, the first time with its prompt's."""
        prompt = SimpleNamespace(num_prompt_tokens=5, num_cached_tokens=2)
        output = SimpleNamespace(
            request_id=request.request_id,
            new_token_ids=[1] * tokens,
            prefill_stats=None if request.said else prompt,
            finish_reason=end,
        )
        request.said += tokens
        self.output_processor.process_outputs([output])

    async def abort(self, request_id):
        self.aborted += request_id
        self.output_processor.abort_requests(request_id, internal=False)
        for name in request_id:
            self._ended[name].set()


class App:
    """vLLM's application. `gate`, if set, delays every answer until it is opened."""

    def __init__(self, gate=None, pieces=3, status=200, finish="stop", deaf=False, quiet=False):
        self.seen = []  # (path, headers, fields) of each request
        self.gate, self.pieces, self.status, self.finish = gate, pieces, status, finish
        self.deaf = deaf  # whether the engine knows no requests, so that none is aborted
        self.quiet = quiet  # whether there is no token of an answer before `gate` opens
        self.engine = Engine()
        self.state = SimpleNamespace(engine_client=self.engine, args=SimpleNamespace(api_key=None))

    @property
    def asked(self):
        return len(self.seen)

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            self.seen.append((scope["path"], {}, {}))
            await send({"type": "websocket.accept"})
            return
        body = b""
        while (message := await receive()).get("more_body"):
            body += message["body"]
        body += message.get("body", b"")
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        fields = json.loads(body) if body else {}
        self.seen.append((scope["path"], headers, fields))
        request_id = f"chatcmpl-{headers.get('x-request-id')}"
        if "request_id" in fields:
            request_id = f"{fields['request_id']}_0"
        if self.deaf:
            finish = await self._wait(receive, asyncio.Event())
        else:
            request, ended = self.engine.begin(request_id, fields.get("cache_salt"))
            if not self.quiet:
                self.engine.say(request, 1)
            finish = await self._wait(receive, ended)
            self.engine.say(request, 2, finish)
        await self._answer(scope["path"], fields, finish, send)

    async def _wait(self, receive, ended):
        if self.gate is None:
            return self.finish
        waits = [asyncio.ensure_future(x) for x in (self.gate.wait(), ended.wait(), _gone(receive))]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        opened, aborted, _ = (wait.done() for wait in waits)
        for wait in waits:
            wait.cancel()
        return self.finish if opened else "abort" if aborted else "gone"

    async def _answer(self, path, fields, finish, send):
        if finish == "gone":
            if not fields.get("stream"):  # FastAPI's result of a canceled handler
                await _send_json(send, None)
            return
        if self.status != 200:
            await _send_json(send, {"error": {"message": "no"}}, self.status)
        elif path == "/v1/responses":
            await _send_json(send, response(fields))
        elif fields.get("stream"):
            await self.send_stream(path, fields, finish, send)
        else:
            await _send_json(send, whole(path, fields, finish))

    async def send_stream(self, path, fields, finish, send):
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for event in stream(path, fields, finish, self.pieces):
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def _gone(receive):
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_json(send, value, status=200):
    body = json.dumps(value, separators=(",", ":")).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def text_of(fields):
    """Returns the fake's text for a body."""
    counted = {name: value for name, value in fields.items() if name not in _IGNORED}
    return hashlib.sha256(json.dumps(counted, sort_keys=True).encode()).hexdigest()


def response(fields):
    return {
        "id": fields.get("request_id", "resp_its_own"),
        "status": "completed",
        "incomplete_details": None,
        "output": text_of(fields),
        "usage": {"input_tokens": 5, "output_tokens": 3},
    }


def whole(path, fields, finish="stop"):
    """Formats a body like the Completion, ChatCompletion and AnthropicMessages responses."""
    text = text_of(fields)
    usage = {
        "prompt_tokens": 5,
        "total_tokens": 8,
        "completion_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    if path == "/v1/messages":
        ends = {"stop": "end_turn", "length": "max_tokens"}
        return {
            "id": "msg",
            "type": "message",
            "content": [{"type": "text", "text": text}],
            "stop_reason": ends.get(finish),
            "usage": {"input_tokens": 3, "output_tokens": 3, "cache_read_input_tokens": 2},
        }
    base = {"id": "one", "created": 1, "model": "m", "system_fingerprint": "f", "usage": usage}
    end = {"index": 0, "logprobs": None, "finish_reason": finish, "stop_reason": None}
    if path == "/v1/completions":
        return base | {"object": "text_completion", "choices": [end | {"text": text}]}
    message = {"role": "assistant", "content": text, "refusal": None, "reasoning": None}
    choice = end | {"message": message, "token_ids": None}
    return base | {"object": "chat.completion", "choices": [choice], "prompt_logprobs": None}


def stream(path, fields, finish="stop", pieces=3):
    """Formats chunks of the same types; exclude_unset omits missing fields."""
    text = text_of(fields)
    size = -(-len(text) // pieces)
    parts = [text[place : place + size] for place in range(0, len(text), size)]
    usage = whole(path, fields, finish)["usage"]
    if path == "/v1/messages":
        yield from _messages(parts, whole(path, fields, finish))
        return
    chat = path == "/v1/chat/completions"
    kind = "chat.completion.chunk" if chat else "text_completion"
    base = {"id": "one", "object": kind, "created": 1, "model": "m"}
    if chat:
        yield _event(base, [{"index": 0, "delta": {"role": "assistant", "content": ""}}])
    for number, part in enumerate(parts, 1):
        end = finish if number == len(parts) else None
        said = {"delta": {"content": part}} if chat else {"text": part}
        yield _event(base, [{"index": 0, **said, "logprobs": None, "finish_reason": end}])
        yield b": keep-alive\n\n"
    if (fields.get("stream_options") or {}).get("include_usage"):
        yield _event(base, [], usage=usage, system_fingerprint="f")
    yield b"data: [DONE]\n\n"


def _event(base, choices, **more):
    chunk = json.dumps(base | {"choices": choices} | more, separators=(",", ":"))
    return f"data: {chunk}\n\n".encode()


def _messages(parts, answer):
    events = [{"type": "message_start", "message": {"usage": {"input_tokens": 3}}}]
    events += [
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": part}}
        for part in parts
    ]
    delta = {"stop_reason": answer["stop_reason"]}
    events.append({"type": "message_delta", "delta": delta, "usage": answer["usage"]})
    events.append({"type": "message_stop"})
    for event in events:
        data = json.dumps(event, separators=(",", ":"))
        yield f"event: {event['type']}\ndata: {data}\n\n".encode()


@dataclass
class Reply:
    """The client's received reply."""

    status: int | None = None
    headers: dict = field(default_factory=dict)
    body: bytes = b""
    ended: bool = False

    def json(self):
        return json.loads(self.body)

    @property
    def x_cache(self):
        return self.headers.get("x-cache")

    def events(self):
        """Data of its server-sent events."""
        lines = [line for line in self.body.decode().splitlines() if line.startswith("data: ")]
        return [line.removeprefix("data: ") for line in lines]

    def chunks(self):
        return [json.loads(data) for data in self.events() if data != "[DONE]"]

    def text(self):
        """Its text, for a chat or a completion, streamed or not."""
        if not self.headers["content-type"].startswith("text/event-stream"):
            (choice,) = self.json()["choices"]
            return choice.get("text") or choice["message"]["content"]
        choices = [choice for chunk in self.chunks() for choice in chunk["choices"]]
        return "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in choices)


async def ask(
    gate,
    path="/v1/chat/completions",
    fields=None,
    key=None,
    *,
    method="POST",
    headers=(),
    raw=None,
    gone=None,
    query=b"",
    reads=None,
    hang_up=None,
):
    """Sends a request through ASGI.

    Args:
        gate: the middleware.
        path: request path.
        fields: JSON body.
        key: an API key; None: none.
        method: HTTP method.
        headers: additional headers.
        raw: raw body, instead of `fields`.
        gone: event that the client disconnects.
        query: query string.
        reads: event that the client waits for before it reads anything.
        hang_up: called when the connection is to be closed.
    """
    body = raw if raw is not None else b"" if fields is None else json.dumps(fields).encode()
    sent = [(b"content-type", b"application/json"), (b"host", b"h")]
    if key is not None:
        sent.append((b"authorization", f"Bearer {key}".encode()))
    names = {name for name, _ in headers}
    sent = [pair for pair in sent if pair[0] not in names] + list(headers)
    reply, given = Reply(), False

    async def receive():
        nonlocal given
        if not given:
            given = True
            return {"type": "http.request", "body": body, "more_body": False}
        await (gone or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message):
        if reads is not None:
            await reads.wait()
        if message["type"] == "http.response.start":
            assert reply.status is None
            reply.status = message["status"]
            reply.headers = {n.decode(): v.decode() for n, v in message["headers"]}
        else:
            assert not reply.ended and reply.status is not None
            reply.body += message.get("body", b"")
            reply.ended = not message.get("more_body", False)

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": query,
        "root_path": "",
        "headers": sent,
        "app": SimpleNamespace(state=app_of(gate).state),
        "extensions": {HANG_UP: {"call": hang_up}} if hang_up else {},
    }
    await gate(scope, receive, send)
    if "content-length" in reply.headers and reply.ended:
        assert int(reply.headers["content-length"]) == len(reply.body)
    return reply


def app_of(gate):
    return gate.app


def identity(gate, key):
    """Returns the identity that a tenant's salts and ids derive from, by its key."""
    return gate.keys.find(key).identity


async def render(style, fields):
    """Returns a prompt's tokens, its bytes; None for what vLLM would reject."""
    prompt = fields.get("messages", fields.get("prompt"))
    return None if prompt is None else [Rendered(list(json.dumps(prompt).encode()))]


MODEL = (lambda state: render, lambda state, memo: "the model")


def make(
    app,
    folder,
    *,
    tenants=("acme", "other"),
    cache=True,
    timeout_s=None,
    sleep=asyncio.sleep,
    model=MODEL,
    max_answer_bytes=10**6,
    open_metrics=False,
    response_cache=None,
    clock=time.monotonic,
    **limits,
):
    """Makes the middleware in front of the fake, and keys by tenant."""
    keys, of_tenants, of_cache = {}, None, response_cache
    if tenants:
        file = folder / "tenants.json"
        for name in tenants:
            keys[name] = tenants_file.add(file, name)[1]
        keys["metrics"] = tenants_file.add(file, "prometheus", "metrics")[1]
        (folder / "secret").write_bytes(SECRET)
        (folder / "secret").chmod(0o600)
        of_tenants = TenantsConfig(file, folder / "secret", open_metrics)
    if cache and of_cache is None:
        of_cache = ResponseCacheConfig(folder / "answers", max_answer_bytes=max_answer_bytes)
    limits = BodyLimits(**{"max_body_bytes": 10**5} | limits)
    config = ServingConfig(of_tenants, of_cache, timeout_s, limits)
    metrics = ServerMetrics(CollectorRegistry())
    return Tenants(app, config, metrics, sleep, model, clock), keys


async def ready(gate):
    """Waits until the model's identity is known."""
    await gate.ready(gate.app.state)


def counted(gate, name, **labels):
    """Returns a sample of /metrics; 0 if it is missing."""
    return gate.metrics.registry.get_sample_value(name, labels) or 0
