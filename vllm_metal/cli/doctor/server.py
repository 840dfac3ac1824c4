# SPDX-License-Identifier: Apache-2.0
"""Checks that a server starts, streams an answer, and ends on Ctrl-C."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

import httpx

from vllm_metal.cli.doctor.engine import KV_CACHE_BYTES, NUM_TOKENS, PROMPT, environment
from vllm_metal.cli.doctor.model import Model
from vllm_metal.cli.doctor.report import REPORT_BUG, Finding
from vllm_metal.cli.local_server import HOST, OWN_SERVER, free_port
from vllm_metal.cli.own_server import lifeline
from vllm_metal.device.child import LIMITS, Child, ChildResult, Progress, StageTimeout, python

_NAME = "engine, as a server"
_SERVED = "doctor"  # the model's name in requests
_POLL = 0.25  # seconds
#: Pause between two answers, long enough for macOS to take back unused GPU memory.
IDLE_SECONDS = 5.0
_GENERATED = "vllm:generation_tokens_total"
_ADVICE = {
    "loading the model": "The error says what is wrong with the model, a setting or the memory. "
    "If the engine in one process works, attach the report to a bug report.",
}


class WrongAnswer(Exception):
    """A response of the tested server is not as expected."""


def try_server(
    model: Model,
    small_pool: bool,
    progress: Progress,
    command: Sequence[str] | None = None,
    limits: Mapping[str, float] = LIMITS,
    idle_seconds: float = IDLE_SECONDS,
) -> Finding:
    """Runs `vllm serve` on a free loopback port, from its start to Ctrl-C.

    The server also ends with this process, however that ends.

    Args:
        small_pool: whether to limit the KV cache to KV_CACHE_BYTES instead of vLLM's default.
        command: command to run instead of `vllm serve`; host and port are appended.
        limits: seconds by stage.
        idle_seconds: pause before the last of three requests.
    """
    port = free_port()
    # With the user's key the server would reject the doctor, and the log might show the key.
    variables = environment(model) | {"VLLM_API_KEY": None}
    with (
        lifeline() as read_end,
        Child(
            [
                *(command or _serve(model, small_pool, read_end)),
                *("--host", HOST, "--port", str(port)),
            ],
            variables,
            pass_fds=[read_end],
        ) as child,
        # Bypasses the user's proxy.
        httpx.Client(base_url=f"http://{HOST}:{port}", trust_env=False, timeout=30) as client,
    ):
        stages = _stages(child, client, limits, idle_seconds)
        try:
            for stage in stages:
                child.reported["stage"] = stage
                progress(stage)
        except StageTimeout:
            return _failed(child.ended(None))
        except (httpx.HTTPError, ValueError, WrongAnswer) as error:
            seen = f"{type(error).__name__} while {child.reported['stage']}: {error}"
            return Finding(_NAME, "failed", seen, REPORT_BUG, child.ended(None).lines)
        ended = child.wait(limits["shutting down"])
    return _failed(ended) if not ended.ok else _passed(ended)


def _serve(model: Model, small_pool: bool, read_end: int) -> tuple[str, ...]:
    pool = ("--kv-cache-memory-bytes", str(KV_CACHE_BYTES)) if small_pool else ()
    options = ("--served-model-name", _SERVED, "--max-model-len", "-1", *pool)
    return python(OWN_SERVER, str(read_end), "-1", "serve", model.argument, *options)


def _stages(
    child: Child, client: httpx.Client, limits: Mapping[str, float], idle_seconds: float
) -> Iterator[str]:
    """Yields each stage before it starts; returns after Ctrl-C, or once the server has ended."""
    yield "loading the model"
    if not _is_up(child, client, limits["loading the model"]):
        return
    yield "answering"
    child.reported |= _ask(client, limits["answering"])
    if (generated := _metric(client)) < NUM_TOKENS:
        raise WrongAnswer(f"/metrics says {_GENERATED} {generated:g} after {NUM_TOKENS} tokens")
    again = _ask(client, limits["answering"])
    time.sleep(idle_seconds)
    after = _ask(client, limits["answering"])
    child.reported |= {
        "again_first_seconds": again["first_seconds"],
        "idle_seconds": idle_seconds,
        "idle_first_seconds": after["first_seconds"],
    }
    yield "shutting down"
    child.interrupt()


def _is_up(child: Child, client: httpx.Client, limit: float) -> bool:
    deadline = time.monotonic() + limit
    while child.alive:
        with suppress(httpx.TransportError):  # nobody listens yet
            if client.get("/health").status_code == 200:
                return True
        if time.monotonic() > deadline:
            raise StageTimeout
        time.sleep(_POLL)
    return False


def _ask(client: httpx.Client, limit: float) -> dict[str, float]:
    asked = time.monotonic()
    first, last, usage = None, "", 0
    for last in _stream(client, limit):
        first = first or time.monotonic() - asked
        if last.startswith("data: {"):
            fields = json.loads(last.removeprefix("data: "))
            if "error" in fields:
                raise WrongAnswer(f"an error in the stream: {fields['error']}")
            usage = (fields.get("usage") or {}).get("completion_tokens", usage)
    if last != "data: [DONE]" or usage != NUM_TOKENS or first is None:
        raise WrongAnswer(f"the stream ended with {last!r} after {usage} tokens of {NUM_TOKENS}")
    return {"first_seconds": first, "answer_seconds": time.monotonic() - asked}


def _stream(client: httpx.Client, limit: float) -> Iterator[str]:
    body: dict[str, object] = {
        "model": _SERVED,
        "temperature": 0,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    # A model without a chat template gets the plain prompt instead.
    requests: dict[str, dict[str, object]] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": PROMPT}]},
        "/v1/completions": {"prompt": PROMPT},
    }
    for path, prompt in requests.items():
        with client.stream("POST", path, json=body | prompt, timeout=limit) as reply:
            if reply.status_code == 200:
                yield from filter(None, reply.iter_lines())
                return
            error = f"HTTP status {reply.status_code}: {reply.read().decode(errors='replace')}"
        if reply.status_code != 400 or "chat template" not in error.lower():  # a real error
            break
    raise WrongAnswer(error[:500])


def _metric(client: httpx.Client) -> float:
    reply = client.get("/metrics")
    lines = [line for line in reply.text.splitlines() if line.startswith(_GENERATED)]
    if reply.status_code != 200 or not lines:
        raise WrongAnswer(f"/metrics answers {reply.status_code}, without {_GENERATED}")
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def _failed(ended: ChildResult) -> Finding:
    advice = _ADVICE.get(ended.reported["stage"], REPORT_BUG)
    return Finding(_NAME, "failed", ended.exit_reason, advice, ended.lines)


def _passed(ended: ChildResult) -> Finding:
    if ended.reported["stage"] != "shutting down":
        seen = f"ended by itself with exit status 0 while {ended.reported['stage']}"
        return Finding(_NAME, "failed", seen, REPORT_BUG, ended.lines)
    took = ended.reported
    seen = (
        f"{NUM_TOKENS} tokens streamed in {took['answer_seconds']:.1f} s, the first after "
        f"{took['first_seconds']:.1f} (asked again: {took['again_first_seconds']:.2f}, and "
        f"{took['idle_first_seconds']:.2f} after {took['idle_seconds']:g} s idle); Ctrl-C ended it "
        f"with exit status 0, {ended.seconds:.0f} s in all"
    )
    return Finding(_NAME, "ok", seen, log=ended.lines)
