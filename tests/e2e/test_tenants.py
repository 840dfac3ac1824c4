# SPDX-License-Identifier: Apache-2.0
"""Tenants, response cache and time limits on a real server."""

import json
import os
import random
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest
from e2e.tenants import (
    MAX_MODEL_LEN,
    identities,
    serve_tenants,
    wait_until_answers_are_kept,
    write_settings,
)

from vllm_metal.cli.main import main
from vllm_metal.settings import salts, secret_file

BLOCK_SIZE = 16  # vllm-metal's default
STRANGERS = ("first", "second")  # who have asked nothing before the test that counts their drafts
TEXT = "The river rises in the hills, runs through three towns and a lake, and ends in the sea. "
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
ANSWERED = "vllm:request_success_total"
KEPT = "vllm:response_cache_requests_total"
TOKENS = "vllm:tenant_tokens_total"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tenants")


@pytest.fixture(scope="module")
def keys(folder):
    return write_settings(folder, ("acme", "other", *STRANGERS))


@pytest.fixture(scope="module")
def tenants(long_texts, folder, keys):
    with serve_tenants(long_texts, folder, keys, "log") as running:
        wait_until_answers_are_kept(running)
        yield running


def wait_for(condition, seconds=240):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"still not so after {seconds} s"
        time.sleep(0.1)


def cached(reply):
    return (reply.json()["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0


def messages(text):
    return [{"role": "user", "content": text}]


def test_tenants_with_equal_prompts_share_nothing(tenants, folder):
    """Counters show no shared K/V, in memory or on disk, nor drafts, nor answers."""
    prompt, seen = TEXT * 8, {}
    tokens = {"max_tokens": 64, "ignore_eos": True}
    for name in STRANGERS:
        before = tenants.metric(DRAFTED), tenants.metric(KEPT, result="hit")
        first = tenants.fresh(name, prompt=prompt, **tokens)
        assert cached(first) == 0
        drafted = tenants.metric(DRAFTED) - before[0]
        again = tenants.fresh(name, prompt=prompt, **tokens)
        expected = (first.json()["usage"]["prompt_tokens"] - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert cached(again) == expected
        assert again.json()["choices"][0]["text"] == first.json()["choices"][0]["text"]
        more = tenants.metric(DRAFTED) - before[0] - drafted
        answers = [tenants.ask(name, prompt=prompt, **tokens).headers["x-cache"] for _ in range(2)]
        assert answers == ["MISS", "HIT"]
        assert tenants.metric(KEPT, result="hit") - before[1] == 1
        seen[name] = drafted, more
    # Texts left by the first tenant's requests would have drafted for the second's.
    first, second = (seen[name] for name in STRANGERS)
    assert first == second
    assert first[1] > first[0]
    secret = secret_file.read(folder / "secret", "secret")
    who = identities(folder)
    namespaces = {salts.namespace(secret, salts.derive(secret, who[name])) for name in seen}
    wait_for(lambda: namespaces <= {path.name for path in (folder / "disk").rglob("tenant-*")})
    assert not any(
        path.is_file() for x in (folder / "disk").rglob("shared") for path in x.rglob("*")
    )


def test_a_clients_own_salt_keeps_it_apart_within_a_tenant(tenants):
    prompt = "A salt of its own. " + TEXT * 4
    assert cached(tenants.fresh("acme", prompt=prompt, max_tokens=1, cache_salt="one")) == 0
    assert cached(tenants.fresh("acme", prompt=prompt, max_tokens=1, cache_salt="two")) == 0
    assert cached(tenants.fresh("acme", prompt=prompt, max_tokens=1, cache_salt="one")) > 0
    for salt, mark in (("one", "MISS"), ("two", "MISS"), ("one", "HIT")):
        reply = tenants.ask("acme", prompt=prompt, max_tokens=1, cache_salt=salt)
        assert reply.headers["x-cache"] == mark


def chunks(reply):
    lines = [line for line in reply.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


PLAIN = {"prompt": TEXT, "max_tokens": 12}
CASES = {
    "chat": ("/v1/chat/completions", {"messages": messages(TEXT), "max_tokens": 12}),
    "chat-logprobs": (
        "/v1/chat/completions",
        {"messages": messages(TEXT), "max_tokens": 12, "logprobs": True, "top_logprobs": 2},
    ),
    "chat-ids": (
        "/v1/chat/completions",
        {"messages": messages(TEXT), "max_tokens": 12, "return_token_ids": True},
    ),
    "chat-choices": (
        "/v1/chat/completions",
        {"messages": messages(TEXT), "max_tokens": 6, "n": 3, "seed": 5, "temperature": 1},
    ),
    "completion": ("/v1/completions", PLAIN),
    "completion-logprobs": ("/v1/completions", PLAIN | {"logprobs": 2}),
    "completion-prompts": ("/v1/completions", PLAIN | {"prompt": [TEXT, "Once"]}),
    "completion-ids": (
        "/v1/completions",
        PLAIN | {"prompt": [[5, 6, 7]], "return_token_ids": True},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_repeat_gets_what_was_said_in_the_form_it_wants(tenants, case):
    path, fields = CASES[case]
    fields = fields | {"user": case, "cache_salt": f"kept {case}"}
    whole, again = (tenants.ask("acme", path, **fields) for _ in range(2))
    assert [reply.headers["x-cache"] for reply in (whole, again)] == ["MISS", "HIT"]
    assert again.json() == whole.json()
    told = {"stream": True, "stream_options": {"include_usage": True}}
    stream, again = (tenants.ask("acme", path, **fields, **told) for _ in range(2))
    assert [reply.headers["x-cache"] for reply in (stream, again)] == ["MISS", "HIT"]
    assert chunks(again) == chunks(stream) and chunks(again)[-1]["usage"]["total_tokens"] > 0


def said(stream):
    """Returns text, log-probabilities, tokens and end of each choice of a stream."""
    found = {}
    for chunk in stream:
        for choice in chunk["choices"]:
            one = found.setdefault(choice["index"], {"text": "", "logprobs": [], "ids": []})
            one["text"] += choice.get("text") or choice.get("delta", {}).get("content") or ""
            logprobs = choice.get("logprobs") or {}
            found_here = logprobs.get("content") or logprobs.get("token_logprobs") or []
            one["logprobs"] += found_here
            one["ids"] += choice.get("token_ids") or []
            one["end"] = choice.get("finish_reason") or one.get("end")
    return found


def test_a_body_is_read_as_vllm_reads_it(tenants):
    prompt = "Read as it is meant. " + TEXT
    for seed in (-1, "-1", -1.0):  # none, for vLLM
        drawn = [tenants.ask("acme", prompt=prompt, seed=seed, temperature=1) for _ in range(2)]
        assert [reply.headers["x-cache"] for reply in drawn] == ["BYPASS", "BYPASS"]
    asked = {"prompt": prompt, "max_tokens": 6, "ignore_eos": True}
    kept, again = (tenants.ask("acme", **asked, stream=no) for no in (False, "false"))
    assert (kept.headers["x-cache"], again.headers["x-cache"]) == ("MISS", "HIT")
    assert again.json() == kept.json()
    # A stream is another answer, and its tokens are counted whether or not it tells them.
    counted = tenants.metric(TOKENS, tenant="acme", kind="completion")
    untold = {"stream": "true", "stream_options": {"include_usage": "false"}}
    stream = tenants.ask("acme", **asked, **untold)
    assert stream.headers["x-cache"] == "MISS" and '"usage":{' not in stream.text
    assert tenants.metric(TOKENS, tenant="acme", kind="completion") == counted + 6


def test_64_twins_make_one_generation(tenants):
    before = tenants.metric(ANSWERED), tenants.metric(KEPT, result="hit")
    fields = {"prompt": "Equal. " + TEXT, "max_tokens": 100, "ignore_eos": True}
    with ThreadPoolExecutor(64) as pool:
        replies = list(pool.map(lambda _: tenants.ask("acme", **fields), range(64)))
    assert len({reply.text for reply in replies}) == 1
    assert tenants.metric(ANSWERED) - before[0] == 1
    assert tenants.metric(KEPT, result="hit") - before[1] == 63


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_past_the_time_limit_ends_with_what_there_is(tenants, stream):
    before = tenants.metric("vllm:request_timeouts_total")
    fields = {"prompt": TEXT, "max_tokens": MAX_MODEL_LEN - 100, "ignore_eos": True}
    reply = tenants.ask("acme", **fields, stream=stream)
    parts = chunks(reply) if stream else [reply.json()]
    ends = [choice["finish_reason"] for part in parts for choice in part["choices"]]
    assert (reply.status_code, ends[-1]) == (200, "abort")
    assert sum(len(choice["text"]) for part in parts for choice in part["choices"]) > 100
    assert tenants.metric("vllm:request_timeouts_total") - before == 1
    wait_for(lambda: tenants.metric("vllm:kv_cache_usage_perc") == 0)  # its blocks are free
    assert tenants.metric("vllm:num_requests_running") == 0
    assert tenants.ask("acme", prompt="Once", max_tokens=2).status_code == 200


def test_a_stored_response_belongs_to_its_tenant(tenants):
    fields = {"input": "Hello", "max_output_tokens": 4}
    reply = tenants.ask("acme", "/v1/responses", **fields, request_id="resp_chosen")
    mine = reply.json()["id"]
    assert mine != "resp_chosen" and reply.headers["x-cache"] == "BYPASS"
    path = f"/v1/responses/{mine}"
    assert tenants.send("GET", path, tenants.keys["acme"]).json()["id"] == mine
    assert tenants.send("GET", path, tenants.keys["other"]).status_code == 404
    assert tenants.send("GET", path, None).status_code == 401
    assert tenants.send("POST", f"{path}/cancel", tenants.keys["other"]).status_code == 404
    for name, status in (("acme", 200), ("other", 404)):
        follow = tenants.ask(name, "/v1/responses", **fields, previous_response_id=mine)
        assert follow.status_code == status


def test_other_apis_and_routes_answer(tenants):
    """These take a key and use no cached responses."""
    key = tenants.keys["acme"]
    fields = {"messages": messages("Hello"), "max_tokens": 4}
    for mark in ("MISS", "HIT"):
        reply = tenants.ask("acme", "/v1/messages", **fields)
        assert (reply.status_code, reply.headers["x-cache"]) == (200, mark)
        assert reply.json()["stop_reason"] == "max_tokens"
    for mark in ("MISS", "HIT"):
        stream = tenants.ask("acme", "/v1/messages", **fields, stream=True)
        assert stream.headers["x-cache"] == mark and "message_stop" in stream.text
    assert tenants.send("GET", "/v1/models", key).json()["data"][0]["id"] == "m"
    tokens = tenants.ask("acme", "/tokenize", prompt="Hello").json()["tokens"]
    assert tenants.ask("acme", "/detokenize", tokens=tokens).json()["prompt"] == "Hello"
    counted = tenants.ask("acme", "/v1/messages/count_tokens", messages=messages("Hello"))
    assert counted.json()["input_tokens"] > 0
    assert tenants.send("GET", "/health", None).status_code == 200


def raw(url, request):
    """Returns the first line of a server's answer to raw bytes."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), 30) as connection:
        connection.sendall(request)
        answer = b""
        while b"\r\n" not in answer and (part := connection.recv(65536)):
            answer += part
    return answer.split(b"\r\n")[0].decode()


SECRET_PROMPT = "Nobody may read of the purple elephant"


def test_attacks_on_a_real_server(tenants, keys, folder):
    """Tries forged salts, duplicate or invalid keys, header injection and unlisted routes."""
    key, path = keys["acme"], "/v1/chat/completions"
    secret = secret_file.read(folder / "secret", "secret")
    salt = salts.derive(secret, identities(folder)["other"])
    good = {"model": "m", "messages": messages(SECRET_PROMPT), "max_tokens": 1}
    answered = tenants.metric(ANSWERED)

    def status(method, path, key, **options):
        return tenants.send(method, path, key, **options).status_code

    assert status("POST", path, key, json=good | {"cache_salt": salt}) == 400
    for twice in ('{"cache_salt": "a", "cache_salt": "b"}', '{"messages": [], "messages": []}'):
        assert status("POST", path, key, content=twice, headers=JSON) == 400
    for wrong in (None, "vm-wrong", "k" * 10**6, f"{key} {key}"):
        assert status("POST", path, wrong, json=good) == 401
    for method, unlisted in (
        ("POST", "/invocations"),
        ("POST", "/generative_scoring"),
        ("POST", "/v1/chat/completions/batch"),
        ("POST", "/inference/v1/generate"),
        ("POST", "/abort_requests"),
        ("POST", "/v1/completions/render"),
        ("GET", "/openapi.json"),
        ("OPTIONS", path),
        ("POST", "/v1/chat/completions/"),
        ("POST", "//v1/chat/completions"),
    ):
        assert status(method, unlisted, None, json=good) == 401
        assert status(method, unlisted, key, json=good) == 404
    bearer = f"Authorization: Bearer {key}\r\n"
    host, url = "Host: h\r\n", tenants.server.url
    injected = f"GET /v1/models HTTP/1.1\r\n{host}{bearer}X-Session-Id: a\rX-B: c\r\n\r\n"
    assert " 400 " in raw(url, injected.encode())
    upgrade = "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    upgrade += "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    for credentials, expected in (("", " 401 "), (bearer, " 404 ")):
        request = f"GET /v1/realtime HTTP/1.1\r\n{host}{credentials}{upgrade}\r\n"
        assert expected in raw(url, request.encode())
    assert tenants.metric(ANSWERED) == answered


JSON = {"Content-Type": "application/json"}


def test_logs_hold_no_key_no_prompt_and_no_salt(tenants, keys, folder):
    secret = secret_file.read(folder / "secret", "secret")
    for fields in (
        {"messages": messages(SECRET_PROMPT), "max_tokens": 1},
        {"messages": messages(SECRET_PROMPT), "max_tokens": "many"},
        {"messages": messages(SECRET_PROMPT), "max_tokens": 1, "model": "none"},
        {"messages": messages(SECRET_PROMPT), "max_tokens": 1, "cache_salt": "my-own-salt"},
    ):
        tenants.ask("acme", "/v1/chat/completions", **fields)
        tenants.ask("acme", "/v1/chat/completions", **fields, stream=True)
    tenants.send("GET", f"/v1/models?key={keys['other']}", keys["acme"])
    log = tenants.server.log.read_text()
    assert "POST /v1/chat/completions" in log  # it is the one that requests are written to
    hidden = [*keys.values(), "purple elephant", "my-own-salt", secret.decode()]
    hidden += [salts.derive(secret, who) for who in identities(folder).values()]
    assert [word for word in hidden if word in log] == []
    metrics = tenants.send("GET", "/metrics", keys["metrics"]).text
    assert [word for word in hidden if word in metrics] == []


def test_a_tenants_requests_and_tokens_are_counted(tenants):
    def now():
        return [
            tenants.metric(TOKENS, tenant="other", kind=kind)
            for kind in ("prompt", "cached", "completion")
        ] + [tenants.metric("vllm:tenant_requests_total", tenant="other", status="200")]

    before, prompt = now(), "Counted. " + TEXT * 2
    for stream in (False, True):
        reply = tenants.fresh("other", prompt=prompt, max_tokens=5, stream=stream)
        usage = reply.json()["usage"] if not stream else usage  # noqa: F821 - of the first round
    after = [new - old for new, old in zip(now(), before, strict=True)]
    blocks = (usage["prompt_tokens"] - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert after == [2 * usage["prompt_tokens"], blocks, 2 * usage["completion_tokens"], 2]


@pytest.fixture
def command(folder, monkeypatch, capsys):
    """Runs `vllm-metal` with the server's settings; returns its output."""
    monkeypatch.setenv("VLLM_METAL_SERVING_CONFIG", str(folder / "serving.toml"))

    def run(*arguments):
        capsys.readouterr()
        assert main([*map(str, arguments)]) == 0
        return capsys.readouterr().out

    return run


def test_what_is_purged_or_removed_is_not_answered_from(tenants, folder, command):
    fields = {"prompt": "Purged. " + TEXT, "max_tokens": 4}

    def marks():
        return [tenants.ask(name, **fields).headers["x-cache"] for name in ("acme", "other")]

    assert marks() == ["MISS", "MISS"] and marks() == ["HIT", "HIT"]
    before = tenants.metric("vllm:response_cache_bytes")
    assert command("answers", "purge", "--tenant", "acme").startswith("removed ")
    assert marks() == ["MISS", "HIT"]
    command("answers", "purge")
    assert 0 < tenants.metric("vllm:response_cache_bytes") < before
    assert marks() == ["MISS", "MISS"] and marks() == ["HIT", "HIT"]
    for path in (folder / "answers").iterdir():
        path.unlink()
    assert marks() == ["MISS", "MISS"] and marks() == ["HIT", "HIT"]


def test_a_tenant_that_is_added_again_gets_nothing_of_the_old_one(tenants, folder, command):
    """It finds no answers, K/V in memory or on disk, or stored responses."""
    fields = {"prompt": "A guest. " + TEXT * 8, "max_tokens": 4}
    stored = {"input": "Hello", "max_output_tokens": 4}
    secret, disk = secret_file.read(folder / "secret", "secret"), folder / "disk"

    def add():
        tenants.keys["guest"] = command("tenants", "add", "guest").strip()
        wait_for(lambda: tenants.send("GET", "/v1/models", tenants.keys["guest"]).is_success)
        who = salts.derive(secret, identities(folder)["guest"])
        return salts.namespace(secret, who)

    def files(namespace):
        found = [path for each in disk.rglob(namespace) for path in each.rglob("*")]
        return sum(path.is_file() for path in found)

    first = add()
    earlier = tenants.ask("guest", "/v1/responses", **stored).json()["id"]
    for _ in range(2):
        reply = tenants.fresh("guest", **fields)
    assert cached(reply) > 0
    assert [tenants.ask("guest", **fields).headers["x-cache"] for _ in "ab"] == ["MISS", "HIT"]
    wait_for(lambda: files(first) > cached(reply) // BLOCK_SIZE)  # with the stored response's
    printed = command("tenants", "rm", "guest", "--prefix-cache", disk)
    assert "removed 1 cached response" in printed and "blocks of K/V" in printed
    assert files(first) == 0
    wait_for(lambda: tenants.ask("guest", **fields).status_code == 401)
    read = tenants.metric("vllm:prefix_cache_disk_read_bytes_total")
    assert add() != first
    again = tenants.ask("guest", **fields)
    assert again.headers["x-cache"] == "MISS" and cached(again) == 0
    path = f"/v1/responses/{earlier}"
    assert tenants.send("GET", path, tenants.keys["guest"]).status_code == 404
    follow = tenants.ask("guest", "/v1/responses", **stored, previous_response_id=earlier)
    assert follow.status_code == 404
    assert tenants.metric("vllm:prefix_cache_disk_read_bytes_total") == read


@pytest.mark.slow
def test_1000_mixed_requests_get_no_wrong_answer(tenants):
    """Compares with the engine's own answer to each kind of request, without the cache."""
    rng, truth = random.Random(14), {}

    def request():
        fields = {
            "max_tokens": rng.choice((2, 5)),
            "temperature": rng.choice((0, 0, 1)),
            "stream": rng.random() < 0.4,
            "user": rng.choice("xyz"),
        }
        if fields["temperature"] or rng.random() < 0.2:
            fields["seed"] = rng.choice((1, 2))
        for name, value in (("stop", ["e"]), ("logit_bias", {"28": 5}), ("top_k", 3)):
            if rng.random() < 0.15:
                fields[name] = value
        topic = rng.choice(("the sea", "a town", "two hills"))
        if rng.random() < 0.5:
            return "/v1/completions", fields | {"prompt": f"Tell me of {topic}."}
        return "/v1/chat/completions", fields | {"messages": messages(f"Tell me of {topic}.")}

    hits = 0
    for _ in range(1000):
        path, fields = request()
        name = rng.choice(("acme", "other"))
        counted = {k: v for k, v in fields.items() if k not in ("stream", "user")}
        known = json.dumps([path, counted], sort_keys=True)
        if known not in truth:
            truth[known] = text(tenants.fresh(name, path, **counted))
        reply = tenants.ask(name, path, **fields)
        assert text(reply) == truth[known], known
        hits += reply.headers["x-cache"] == "HIT"
    assert 300 < hits < 1000


def text(reply):
    if reply.headers["content-type"].startswith("text/event-stream"):
        (choice,) = said(chunks(reply)).values()
        return choice["text"], choice["end"]
    (choice,) = reply.json()["choices"]
    return choice.get("text") or choice["message"]["content"], choice["finish_reason"]


@pytest.mark.slow
def test_after_kill_9_answers_and_blocks_are_there_for_their_tenant(long_texts, tmp_path):
    """The server dies during writes; the next one has each tenant's data."""
    keys, prompt = write_settings(tmp_path), "After a kill. " + TEXT * 8
    with serve_tenants(long_texts, tmp_path, keys, "first") as first:
        wait_until_answers_are_kept(first)
        kept = first.ask("acme", prompt=prompt, max_tokens=8)
        assert kept.headers["x-cache"] == "MISS"
        blocks = kept.json()["usage"]["prompt_tokens"] // BLOCK_SIZE
        wait_for(lambda: num_files(tmp_path / "disk") >= blocks)
        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(quietly, first, number) for number in range(60)]
            while sum(each.done() for each in asked) < 20:
                time.sleep(0.01)
            os.killpg(first.server.process.pid, signal.SIGKILL)
    with serve_tenants(long_texts, tmp_path, keys, "second") as second:
        wait_until_answers_are_kept(second)
        again = second.ask("acme", prompt=prompt, max_tokens=8)
        assert again.headers["x-cache"] == "HIT" and again.text == kept.text
        assert cached(second.fresh("other", prompt=prompt, max_tokens=7)) == 0
        assert second.ask("other", prompt=prompt, max_tokens=8).headers["x-cache"] == "MISS"
        assert second.metric("vllm:prefix_cache_disk_read_bytes_total") == 0
        by_acme = second.fresh("acme", prompt=prompt, max_tokens=7)
        assert cached(by_acme) >= (blocks - 1) * BLOCK_SIZE  # from its folder
        assert second.metric("vllm:prefix_cache_disk_read_bytes_total") > 0
        for number in range(60):
            reply = second.ask("acme", prompt=f"Load {number}", max_tokens=2)
            fresh = second.fresh("acme", prompt=f"Load {number}", max_tokens=2)
            assert text(reply) == text(fresh)


def num_files(folder):
    """Returns the number of files in tenants' folders."""
    return sum(path.is_file() for each in folder.rglob("tenant-*") for path in each.rglob("*"))


def quietly(tenants, number):
    try:
        return tenants.ask("acme", prompt=f"Load {number}", max_tokens=2).status_code
    except Exception as error:  # the server is killed meanwhile
        return error
