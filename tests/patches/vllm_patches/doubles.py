# SPDX-License-Identifier: Apache-2.0
"""A small model's folder, vLLM's scheduler without a worker, and a dead engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "max_position_embeddings": 512,
}


def arguments(folder: str, **options: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    options = {"max_model_len": 256} | options
    return EngineArgs(model=folder, skip_tokenizer_init=True, **options)


def folder_config(folder: str) -> Any:
    return arguments(folder).create_engine_config()


def make_scheduler(config: Any, num_blocks: int) -> Any:
    """Makes vLLM's scheduler without a worker."""
    import torch
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    config.cache_config.num_gpu_blocks = num_blocks
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=16, dtype=torch.float32)
    cache = KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    return Scheduler(config, cache, StructuredOutputManager(config), block_size=16)


class DeadEngine:
    """The interface of a dead engine for a server."""

    errored, is_running, should_keep_api_server_alive = True, False, False
    vllm_config = SimpleNamespace(
        shutdown_timeout=0,
        additional_config=None,
        cache_config=SimpleNamespace(enable_prefix_caching=False),
    )


async def serve_until_it_ends(engine):
    """Runs vLLM's HTTP server, which checks its engine as soon as it has started."""
    import asyncio

    from fastapi import FastAPI
    from vllm.entrypoints.launchers import launcher
    from vllm.entrypoints.launchers.api_server import entry

    app = FastAPI()
    app.state.engine_client = engine

    async def look():
        while not getattr(getattr(app.state, "server", None), "started", False):
            await asyncio.sleep(0.01)
        launcher.terminate_if_errored(app.state.server, engine)

    looking = asyncio.create_task(look())
    ending = await entry.serve_http(app, sock=None, host="127.0.0.1", port=0, log_level="error")
    await looking
    await ending
