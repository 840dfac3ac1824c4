# SPDX-License-Identifier: Apache-2.0
"""In-process prefill and decode engines, connected by the real transport."""

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

#: Parameters that vLLM's proxies send to the prefill engine.
FOR_A_DECODER = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
OUTBOX = 64 << 20  # bytes, more than any test computes


def free_port() -> int:
    """Returns a free port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def transfer(role: str, **extra: Any) -> dict[str, Any]:
    """Returns the --kv-transfer-config of an engine in one role."""
    return {"kv_connector": CONNECTOR, "kv_role": role, "kv_connector_extra_config": extra}


@contextmanager
def role_engine(model: str, role: str | None, **options: Any) -> Iterator[LLM]:
    """Runs an engine in a role, or None; in-process, all blocks are free at its end."""
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
    """Runs a prefill engine that peers contact at `port`."""
    extra = {"listen": f"127.0.0.1:{port}", "outbox_bytes": OUTBOX} | options.pop("extra", {})
    with role_engine(model, role, extra=extra, **options) as llm:
        yield llm


@contextmanager
def consumer(model: str, *ports: int, role: str = "kv_consumer", **options: Any) -> Iterator[LLM]:
    """Runs an engine that requests K/V from peers at `ports`."""
    extra = {"peers": [f"127.0.0.1:{port}" for port in ports]} | options.pop("extra", {})
    with role_engine(model, role, extra=extra, **options) as llm:
        yield llm


def worker_of(llm: LLM) -> Any:
    """Returns the worker of an in-process engine."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


def runner_of(llm: LLM) -> Any:
    """Returns the current model runner."""
    return worker_of(llm).runner.runner


def blocks_of(llm: LLM, req_id: str) -> list[int]:
    """Returns a request's blocks in the first KV cache group."""
    scheduler: Any = llm.llm_engine.engine_core.engine_core.scheduler
    return list(scheduler.kv_cache_manager.get_block_ids(req_id)[0])


def peer_store(llm: LLM) -> PeerStore:
    """Returns an engine's send cache and its peers."""
    found: PeerStore = worker_of(llm).transfers.hooks.store.stores["peers"]
    return found


@dataclass(frozen=True)
class Served:
    """A request's answer, and its source."""

    tokens: list[int]
    pulled: float  # prompt tokens pulled from a peer
    drafted: float
    accepted: float


def prefill(llm: LLM, prompt: list[int], max_tokens: int = 1, **options: Any) -> dict[str, Any]:
    """Prefills a prompt for another engine; returns the transfer parameters."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, **options)
    params.extra_args = {"kv_transfer_params": dict(FOR_A_DECODER)}
    (output,) = llm.generate([TokensPrompt(prompt_token_ids=prompt)], params, use_tqdm=False)
    run_out(llm)  # a server's engine keeps stepping by itself
    assert output.kv_transfer_params is not None
    return output.kv_transfer_params


def decode(
    llm: LLM, prompt: list[int], params: dict[str, Any] | None = None, max_tokens: int = 12
) -> Served:
    """Returns a greedy answer, with a proxy's parameters or none."""
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
