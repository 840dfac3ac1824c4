# SPDX-License-Identifier: Apache-2.0
"""Engines that prefill and engines that decode, in this process, over the real transport."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from e2e.disk import HITS
from e2e.harness import counters, engine, free_blocks, greedy, is_apart, run_out
from vllm import LLM, SamplingParams, TokensPrompt

from vllm_metal.kv_transfer.config import CONNECTOR
from vllm_metal.kv_transfer.peer.store import PeerStore

#: What vLLM's proxies send along to the engine that prefills.
FOR_A_DECODER = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
OUTBOX = 64 << 20  # bytes; no test computes so much


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def transfer(role: str, **extra: Any) -> dict[str, Any]:
    """--kv-transfer-config of an engine in one role."""
    return {"kv_connector": CONNECTOR, "kv_role": role, "kv_connector_extra_config": extra}


@contextmanager
def role_engine(model: str, role: str | None, **options: Any) -> Iterator[LLM]:
    """An engine in a role, or alone (None); all blocks of its pool are free at its end, which one
    in a process of its own does not tell."""
    extra = options.pop("extra", {})
    settings: dict[str, Any] = {"max_model_len": 256, "kv_cache_memory_bytes": 8 << 20}
    if role is not None:
        config = transfer(role, **extra) | options.pop("transfer", {})
        settings["kv_transfer_config"] = config
    with engine(model, **(settings | options)) as llm:
        free = None if is_apart(llm) else free_blocks(llm)
        yield llm
        run_out(llm)
        assert free is None or free_blocks(llm) == free, "blocks were never freed"


@contextmanager
def producer(model: str, port: int, role: str = "kv_producer", **options: Any) -> Iterator[LLM]:
    """An engine that prefills for others, which ask at `port`."""
    extra = {"listen": f"127.0.0.1:{port}", "outbox_bytes": OUTBOX} | options.pop("extra", {})
    with role_engine(model, role, extra=extra, **options) as llm:
        yield llm


@contextmanager
def consumer(model: str, *ports: int, role: str = "kv_consumer", **options: Any) -> Iterator[LLM]:
    """An engine that asks those at `ports` for K/V."""
    extra = {"peers": [f"127.0.0.1:{port}" for port in ports]} | options.pop("extra", {})
    with role_engine(model, role, extra=extra, **options) as llm:
        yield llm


def worker_of(llm: LLM) -> Any:
    """The worker of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


def runner_of(llm: LLM) -> Any:
    """The model runner of now."""
    return worker_of(llm).runner.runner


def blocks_of(llm: LLM, req_id: str) -> list[int]:
    """Blocks of the first KV cache group that a request has."""
    scheduler: Any = llm.llm_engine.engine_core.engine_core.scheduler
    return list(scheduler.kv_cache_manager.get_block_ids(req_id)[0])


def peer_store(llm: LLM) -> PeerStore:
    """An engine's outbox, and the peers that it fetches pages from."""
    found: PeerStore = worker_of(llm).transfers.hooks.store.stores["peers"]
    return found


@dataclass(frozen=True)
class Served:
    """What came of a request, and what it took."""

    tokens: list[int]
    pulled: float  # prompt tokens that came from elsewhere
    drafted: float
    accepted: float


def prefill(llm: LLM, prompt: list[int], max_tokens: int = 1, **options: Any) -> dict[str, Any]:
    """Has an engine compute a prompt for another; the parameters that it hands out."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, **options)
    params.extra_args = {"kv_transfer_params": dict(FOR_A_DECODER)}
    (output,) = llm.generate([TokensPrompt(prompt_token_ids=prompt)], params, use_tqdm=False)
    run_out(llm)  # a server's engine goes on stepping by itself
    assert output.kv_transfer_params is not None
    return output.kv_transfer_params


def decode(
    llm: LLM, prompt: list[int], params: dict[str, Any] | None = None, max_tokens: int = 12
) -> Served:
    """A greedy answer, after a proxy's parameters or none."""
    before = counters(llm)
    sampling = greedy(max_tokens)
    if params is not None:
        sampling.extra_args = {"kv_transfer_params": params}
    (output,) = llm.generate([TokensPrompt(prompt_token_ids=prompt)], sampling, use_tqdm=False)
    run_out(llm)
    after = counters(llm)

    def added(name: str) -> float:
        return after.get(name, 0) - before.get(name, 0)

    return Served(
        list(output.outputs[0].token_ids),
        added(HITS),
        added("vllm:spec_decode_num_draft_tokens"),
        added("vllm:spec_decode_num_accepted_tokens"),
    )
